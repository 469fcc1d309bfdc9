"""Which of several masks hides all of a row: a second run follows what each of them hides."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.graph.attention_masks import KEY_PADDING, hidden_keys, named_arguments
from fxguard.graph.mask_makers import FILLED, WRITTEN, Mask
from fxguard.graph.poles import ATTENTION, plain
from fxguard.graph.tables import ADDITIONS, MOVES, SELECTS
from fxguard.graph.wide_form import Ran
from fxguard.plan.plan import Place
from fxguard.rerun.start import look_through
from fxguard.rerun.walk import Ended, Walk, Watcher

__all__ = ["HiddenBy", "hidden_by"]


@dataclass(frozen=True, slots=True)
class HiddenBy:
    """What hides all of a row."""

    alone: tuple[Mask, ...]  # masks that need no other one; () if only all together do
    # Of an attention with its own masks: "all 10 keys of sample 3", "… in head 1"; "" of others,
    # whose row the element tells.
    keys: str = ""


def hidden_by(
    run: GraphRun, node: Node, masks: Sequence[Mask], index: Sequence[int]
) -> HiddenBy | None:
    """Which masks hide the row that an operation read at a bad element.

    Args:
        run: the run of the graph, still open.
        node: a softmax, or an attention.
        masks: those behind it.
        index: of the element of its result.

    Returns:
        The answer; None if it is not known, as where what the masks hide is not all of the row.
    """
    watcher = _Hiding(node, masks, index)
    look_through(run, watcher)
    return watcher.found


class _Hiding(Watcher):
    """Follows what masks hide to the operation that read it."""

    def __init__(self, node: Node, masks: Sequence[Mask], index: Sequence[int]) -> None:
        self.node, self.masks, self.index = node.name, masks, index
        self.applied = {mask.applied.name for mask in masks}
        self.hidden: dict[Node, dict[int, Tensor]] = {}  # by what holds it, and the mask's number
        self.found: HiddenBy | None = None

    @property
    def last_places(self) -> Collection[Place]:
        return [((), self.node)]

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        is_behind = any(each in self.hidden for each in node.all_input_nodes)
        return not walk.inside and (is_behind or node.name in (*self.applied, self.node))

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        if node.name != self.node:
            return
        if plain(walk.call_of(node).kind) == ATTENTION:
            self.found = self.of_attention(args, kwargs)
        else:
            self.found = self.of_row(node, args, kwargs)
        raise Ended

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        if not isinstance(ran.result, Tensor) and plain(walk.call_of(node).kind) != "setitem":
            return
        kind = plain(walk.call_of(node).kind)
        holder = node.args[0] if walk.call_of(node).kind in WRITTEN else node
        assert isinstance(holder, Node)
        for read in node.all_input_nodes:
            for number, hidden in list(self.hidden.get(read, {}).items()):
                self.hide(holder, number, _moved(walk, node, ran, read, hidden, kind))
        for number, mask in enumerate(self.masks):
            if mask.applied.name == node.name:
                self.hide(holder, number, _hidden(kind, node, mask, ran))

    def hide(self, holder: Node, number: int, hidden: Tensor) -> None:
        """Note what a mask hides in a value, besides what it hides there already."""
        of_holder = self.hidden.setdefault(holder, {})
        before = of_holder.get(number)
        of_holder[number] = hidden if before is None else before | hidden

    def of_row(self, node: Node, args: Any, kwargs: Any) -> HiddenBy | None:
        """The answer for a softmax."""
        read = node.all_input_nodes[0]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            dim = dim[0]
        scores = args[0] if args else kwargs.get("input")
        if not isinstance(dim, int) or not isinstance(scores, Tensor):
            return None
        at = list(self.index)
        dim %= scores.dim()
        if len(at) < scores.dim():  # a sum without the dimension
            at.insert(dim, 0)
        row: tuple[Any, ...] = (*at[:dim], slice(None), *at[dim + 1 :])
        return self.answer({n: hidden[row] for n, hidden in self.hidden.get(read, {}).items()})

    def of_attention(self, args: Any, kwargs: Any) -> HiddenBy | None:
        """The answer for ``multi_head_attention_forward``, whose result is (query, sample, …)."""
        query, sample = self.index[0], self.index[1] if len(self.index) > 2 else None
        named, rows, is_all_queries = named_arguments(args, kwargs), dict[int, Tensor](), False
        shape = (int(named["num_heads"]), named["key"].shape[0])
        for number, mask in enumerate(self.masks):
            given = next(name for name, value in mask.applied.kwargs.items() if value is mask.node)
            hides = hidden_keys(named, given)
            if hides is None:
                return None
            row = hides[(sample or 0) % len(hides), :, query % hides.shape[2]]
            rows[number] = row.expand(shape)
            is_all_queries |= given == KEY_PADDING and bool(row.all())
        if not rows:
            return None
        is_hidden = torch.stack([*rows.values()]).any(0).all(-1).tolist()
        hidden = [head for head, hides_all in enumerate(is_hidden) if hides_all]
        if not hidden:
            return None
        place = [] if is_all_queries else [f"query {query}"]
        place += [] if sample is None else [f"sample {sample}"]
        told = " of ".join([f"all {shape[1]} keys", *place])
        if len(hidden) < shape[0]:
            told += f" in head{'s' if len(hidden) > 1 else ''} {', '.join(map(str, hidden))}"
        return self.answer({number: row[hidden[0]] for number, row in rows.items()}, told)

    def answer(self, rows: Mapping[int, Tensor], keys: str = "") -> HiddenBy | None:
        """The answer, where masks hide these elements of a row."""
        if not rows or not bool(torch.stack([*rows.values()]).any(0).all()):
            return None
        alone = tuple(self.masks[number] for number in sorted(rows) if bool(rows[number].all()))
        return HiddenBy(alone, keys)


def _hidden(kind: str, node: Node, mask: Mask, ran: Ran) -> Tensor:
    """What an operation hides by its mask."""
    named = zip(node.args, ran.args, strict=False)
    given = {each.name: value for each, value in named if isinstance(each, Node)}
    if kind == "setitem":
        hidden = torch.zeros_like(ran.args[0], dtype=torch.bool)
        hidden[ran.args[1]] = True
        return hidden
    if kind == "where":
        at = ran.args[0]
        return torch.broadcast_to(at if _is_minus_inf(ran.args[1]) else ~at, ran.result.shape)
    if kind in FILLED:
        return torch.broadcast_to(ran.args[1], ran.result.shape)
    if kind in ADDITIONS:
        return torch.broadcast_to(_as_hidden(given[mask.node.name]), ran.result.shape)
    return _as_hidden(ran.result)


def _moved(walk: Walk, node: Node, ran: Ran, read: Node, hidden: Tensor, kind: str) -> Tensor:
    """What was hidden in an operand, in its result."""
    if kind == "setitem":
        return hidden
    if kind in MOVES | SELECTS and node.args and node.args[0] is read:
        # A view asks for the strides of what it is given.
        laid = torch.empty_like(ran.args[0], dtype=torch.bool).copy_(hidden)
        given = (laid, *ran.args[1:])
        moved: Tensor = walk.run_alone(node, given, ran.kwargs, is_the_models=False)
        return moved
    return torch.broadcast_to(hidden, ran.result.shape)


def _as_hidden(mask: Tensor) -> Tensor:
    return mask if mask.dtype is torch.bool else mask == -math.inf


def _is_minus_inf(value: Any) -> bool:
    return bool((torch.as_tensor(value) == -math.inf).all())
