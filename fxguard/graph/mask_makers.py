"""The masks of a softmax or an attention in a graph, and the lines that computed them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxguard.graph.nodes import leaves, placeholder_role
from fxguard.graph.operations import read_node
from fxguard.graph.poles import plain
from fxguard.graph.tables import ADDITIONS, CASTS, LIMITERS, MOVES, SELECTS
from fxguard.records import Role, Source
from fxguard.source.lines import source_of_trace

__all__ = ["FILLED", "WRITTEN", "Mask", "MaskMade", "masks_behind"]

MOST_NODES = 64  # that are looked at
GIVEN = {  # parameters that are masks, and the position of one that is given without its name
    "multi_head_attention_forward": (("key_padding_mask", "attn_mask"), None),
    "scaled_dot_product_attention": (("attn_mask",), 3),
}
FILLED = frozenset(["masked_fill", "where"])
WRITTEN = frozenset(["masked_fill_", "setitem"])
CARRY = MOVES | SELECTS | CASTS | LIMITERS | frozenset(["div", "dropout", "mul"])
# A mask is the same behind these, or its contrary.
PASSED = MOVES | CASTS | frozenset(["bitwise_not", "getitem", "invert", "logical_not"])


@dataclass(frozen=True, slots=True)
class MaskMade:
    """Where a mask was made: the line that computed it, or the input of the graph that it is."""

    source: Source | None = None
    argument: str = ""  # the user's name, "pad_mask"


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask in a graph."""

    made: MaskMade
    node: Node  # its value
    applied: Node  # the operation that hides elements by it


def masks_behind(node: Node, module: GraphModule) -> list[Mask]:
    """The masks that hide elements of what an operation reads, the last first.

    Args:
        node: a softmax, or an attention.
        module: its graph.
    """
    finder = _Finder(module)
    found: dict[MaskMade, Mask] = {}
    for applied, mask in finder.masks(node):
        made = finder.made(mask, source_of_trace(applied.meta.get("stack_trace")))
        if made is not None:
            found.setdefault(made, Mask(made, mask, applied))
    return list(found.values())


class _Finder:
    """Goes back from an operation to its masks."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def kind(self, node: Node) -> str:
        """The name of an operation; "" of an input."""
        is_call = node.op in ("call_function", "call_method")
        return read_node(node, self.module).kind if is_call else ""

    def masks(self, start: Node) -> Iterator[tuple[Node, Node]]:
        """Operations that apply a mask, and the mask."""
        names, position = GIVEN.get(plain(self.kind(start)), ((), None))
        if names:
            given = [start.kwargs.get(name) for name in names]
            given += [] if position is None else start.args[position : position + 1]
            yield from ((start, each) for each in given if isinstance(each, Node))
            return
        todo, added = start.all_input_nodes[:1], set[Node]()
        for node in todo:
            for user in node.users:
                if user is not start and self.kind(user) in WRITTEN and user.args[0] is node:
                    yield from ((user, each) for each in _masks_in(user.args[1]))
            kind = self.kind(node)
            if kind in FILLED or kind in WRITTEN:
                masks = [*_masks_in(node.args[_at(kind)])]
                rest = [x for x in node.all_input_nodes if x not in masks]
                yield from ((node, each) for each in masks)
                todo += [each for each in rest if each not in todo]
            elif kind in ADDITIONS:
                more = [each for each in node.all_input_nodes if each not in todo]
                added |= set(more)
                todo += more
            elif plain(kind) in CARRY:
                todo += [each for each in node.all_input_nodes[:1] if each not in todo]
                added |= set(node.all_input_nodes[:1]) if node in added else set()
            elif node in added and _is_input(node):
                yield next(iter(node.users)), node
            if len(todo) > MOST_NODES:
                return

    def made(self, mask: Node, used_at: Source | None) -> MaskMade | None:
        """The line that computed a mask, behind what only negates and moves it."""
        for _ in range(MOST_NODES):
            if mask.op in ("placeholder", "get_attr"):
                return MaskMade(argument=placeholder_role(mask)[1]) if _is_input(mask) else None
            kind, inputs = self.kind(mask), mask.all_input_nodes
            if plain(kind) not in PASSED:
                source = source_of_trace(mask.meta.get("stack_trace"))
                if source and used_at and source.position != used_at.position:
                    return MaskMade(source)
                if kind in FILLED | WRITTEN and (of := [*_masks_in(mask.args[_at(kind)])]):
                    mask = of[0]  # numbers that were made of another mask
                    continue
                if len(inputs) != 1:
                    return None  # it is computed on the line that is shown anyway
            if not inputs:
                return None
            mask = inputs[0]
        return None


def _at(kind: str) -> int:
    """The position of the mask."""
    return 0 if kind == "where" else 1


def _masks_in(index: object) -> Iterator[Node]:
    yield from (each for each in leaves(index) if isinstance(each, Node))


def _is_input(node: Node) -> bool:
    return node.op == "placeholder" and placeholder_role(node)[0] is Role.INPUT
