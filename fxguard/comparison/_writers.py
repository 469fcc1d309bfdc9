"""Which operations write a value that another one made."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from fxguard.graph.operations import read_node

__all__ = ["writers_of"]


def writers_of(node: Node) -> Iterator[Node]:
    """The operations that write a value, directly or through a view of it."""
    for user in node.users:
        if not user.op.startswith("call"):
            continue
        call = read_node(user, user.graph.owning_module)
        if node in call.written:
            yield user
        if node in call.written or call.moves or call.selects:
            yield from writers_of(user)
