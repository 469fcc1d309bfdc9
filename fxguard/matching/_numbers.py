"""Numbers among the arguments of operations: an eps, a factor, a bound."""

from __future__ import annotations

from fxguard.recording.recorded import Operation
from fxguard.recording.replay import operation_named

__all__ = ["numbers_of", "unlike_numbers"]

# Those of layouts, which two programs may have in other ways.
OF_LAYOUT = frozenset(["dim", "dim0", "dim1", "dims", "end", "index", "keepdim", "start", "step"])


def numbers_of(operation: Operation) -> dict[str, str]:
    """Its arguments that are numbers or words, by name, as people write them."""
    overload = operation_named(operation.name)
    if overload is None:
        return {}
    names = [argument.name for argument in overload._schema.arguments]
    given = dict(zip(names, operation.args, strict=False)) | dict(operation.kwargs)
    return {
        name: f"{x:.6g}" if isinstance(x, float) else str(x)
        for name, x in given.items()
        if isinstance(x, (bool, int, float, str))
    }


def unlike_numbers(one: Operation, two: Operation) -> list[str]:
    """The names of numbers in which two operations of one kind differ; none if they are of two."""
    if one.kind.rstrip("_") != two.kind.rstrip("_"):
        return []
    a, b = numbers_of(one), numbers_of(two)
    return [name for name in a if name in b and a[name] != b[name] and name not in OF_LAYOUT]
