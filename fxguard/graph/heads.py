"""Whether dimension 1 of an operation's result are the heads of an attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import GraphModule, Node

from fxguard.graph.operations import read_node
from fxguard.graph.poles import SOFTMAXES, plain

__all__ = ["is_of_heads"]

MOST_NODES = 48  # that are looked at, each way
MOST_READERS = 4  # of which it is asked, too, what they read: values are multiplied with a softmax
ATTENTION = "scaled_dot_product_attention"
SWAPS = frozenset(["swapaxes", "swapdims", "transpose"])
# The operations between the product of queries and keys and that with values.
OF_HEADS = frozenset(
    """
    add div dropout einsum exp float masked_fill matmul mul softmax sub to type_as where
    """.split()
)


def is_of_heads(node: Node, module: GraphModule) -> bool:
    """Whether the four dimensions of a result are samples, heads, and two more.

    An attention splits features into heads, and swaps dimensions 1 and 2; a softmax is near. The
    channels of a picture are in dimension 1, too, and nothing swaps them.

    Args:
        node: an operation whose result has four dimensions.
        module: its graph.
    """

    def kind(each: Node) -> str:
        is_call = each.op in ("call_function", "call_method")
        return plain(read_node(each, module).kind) if is_call else ""

    if kind(node) == ATTENTION:
        return True
    if kind(node) not in OF_HEADS:
        return False
    behind = _around(node, lambda each: each.all_input_nodes)
    ahead = _around(node, lambda each: each.users)
    beside = [
        x for each in ahead[:MOST_READERS] for x in _around(each, lambda y: y.all_input_nodes)
    ]
    near = [node, *behind, *ahead, *beside]
    has_softmax = any(kind(each) in SOFTMAXES for each in near)
    return has_softmax and any(_swaps(each, kind(each)) for each in near)


def _swaps(node: Node, kind: str) -> bool:
    """Whether a node swaps dimensions 1 and 2 of four."""
    given = [x for arg in node.args[1:] for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
    if kind in SWAPS:
        return set(given[:2]) in ({1, 2}, {-3, -2}, {1, -2}, {-3, 2})
    if kind == "permute":
        return given in ([0, 2, 1, 3], [0, 2, 3, 1], [2, 0, 3, 1, 4])
    return False


def _around(start: Node, following: Callable[[Node], Iterable[Node]]) -> list[Node]:
    found: list[Node] = []
    todo = list(following(start))
    while todo and len(found) < MOST_NODES:
        found += todo
        todo = [x for each in todo for x in following(each) if x not in found]
        todo = list(dict.fromkeys(todo))
    return found
