"""The tensors that an operation of ATen writes among its operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fxguard import trees
from fxguard.graph.operations import read_call

__all__ = ["written_operands"]


def written_operands(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Those that its schema says, and statistics, which none tells; each once.

    Args:
        func: the operation; one without a schema says nothing.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    call = read_call(func, args, dict(kwargs))
    found = [*_tensors([*call.written, *(x for _, x in call.apart)])]
    schema = getattr(func, "_schema", None)
    for at, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[at] if at < len(args) else kwargs.get(argument.name))
    return list({id(x): x for x in found}.values())


def _tensors(nest: Any) -> Iterator[Tensor]:
    return (x for x in trees.tree_leaves(nest) if isinstance(x, Tensor))
