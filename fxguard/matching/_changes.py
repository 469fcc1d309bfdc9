"""What one operation may have otherwise: its numbers, its operands; or it may be left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxguard.matching._region import Call
from fxguard.recording.recorded import Operation, Ref
from fxguard.recording.replay import arguments_by_name, operation_named, reads_of

__all__ = [
    "FLAGS",
    "Change",
    "arguments_of_others",
    "in_words",
    "left_out",
    "named_arguments",
    "numbers",
    "numbers_in",
    "reading",
    "tensors_in",
    "with_argument",
    "with_tensor",
]

USUAL_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3)
SMALL = 1e-2  # a number below this is taken for an eps
MOST = 24  # numbers of the other program
NAMELESS = frozenset(["diagonal", "exponent", "other", "self", "value"])
# What another number may be tried for. Kernels do not check some others, and allocate others.
NUMBERS = frozenset(
    [
        *("beta", "diagonal", "eps", "exponent", "lambd", "max", "max_val", "min", "min_val"),
        *("negative_slope", "other", "scale", "self", "threshold", "value"),
    ]
)
FLAGS = frozenset(
    [
        *("align_corners", "ceil_mode", "count_include_pad", "descending", "is_causal"),
        *("largest", "reverse", "right", "unbiased"),
    ]
)
# What an operation may take from another one of its kind.
TAKEN = (
    NUMBERS
    | FLAGS
    | frozenset(
        [
            *("approximate", "correction", "dilation", "dim", "dims", "group", "groups", "k"),
            *("kernel_size", "ord", "p", "pad", "padding", "reduction", "repeats"),
            *("rounding_mode", "shifts", "stride"),
        ]
    )
)


@dataclass(frozen=True, slots=True)
class Change:
    """One operation, called in another way."""

    operation: int
    call: Call
    text: str  # "with eps 1e-06 in place of 1e-05"
    other: int | None = None  # the operation of the other program that has it so


def arguments_of_others(
    at: int, operation: Operation, others: Iterable[tuple[int, Operation]]
) -> Iterator[Change]:
    """The arguments, but tensors, that operations of the same kind have.

    Args:
        at: the number of the operation.
        operation: it.
        others: those of the other program, with their numbers.
    """
    given = named_arguments(operation)
    for number, other in others:
        if other.kind.rstrip("_") != operation.kind.rstrip("_"):
            continue
        for name, x in named_arguments(other).items():
            if name not in TAKEN or name not in given or _holds_tensors(x, given[name]):
                continue
            if x != given[name]:
                yield Change(
                    at, with_argument(operation, name, x), in_words(name, x, given[name]), number
                )


def numbers(
    at: int, operation: Operation, sizes: Iterable[int], theirs: Mapping[float, int]
) -> Iterator[Change]:
    """Other numbers: those of the other program, and what people write by mistake.

    Args:
        at: the number of the operation.
        operation: it.
        sizes: of its operands.
        theirs: numbers that the other program has, with the operation of each.
    """
    of_sizes = [y for n in sorted({*sizes} - {0, 1}) for y in (n, n**0.5, n**-0.5, 1 / n)]
    for name, x in named_arguments(operation).items():
        if name not in NUMBERS or isinstance(x, bool):
            continue
        if x is None and name in ("eps", "scale"):
            wanted = [1.0, *theirs, *of_sizes]
        elif isinstance(x, float):
            near = [1 / x, x * x, abs(x) ** 0.5, 2 * x, x / 2, -x, 1.0] if x else [1.0]
            near += [-math.inf, -1e4] if x < 0 else []
            wanted = [*theirs, *(USUAL_EPS if 0 <= x < SMALL else ()), *of_sizes, *near]
        elif isinstance(x, int):
            wanted = [*theirs, x + 1, x - 1, -x, *of_sizes]
        else:
            continue
        for y in dict.fromkeys(wanted):
            if x is not None and y == x:
                continue
            if isinstance(x, int) and (not float(y).is_integer() or y == 0):
                continue
            z = int(y) if isinstance(x, int) else float(y)
            yield Change(
                at, with_argument(operation, name, z), in_words(name, z, x), theirs.get(float(y))
            )


def left_out(at: int, operation: Operation) -> Iterator[Change]:
    """The operation left out: an operand in the place of its result."""
    refs = reads_of(operation)
    for number in range(len(refs)):

        def call(overload: Any, args: Any, kwargs: Any, number: int = number) -> Any:
            result = overload(*args, **kwargs)
            x = tensors_in(args, kwargs)[number]
            if isinstance(result, (list, tuple)):
                return [x if x.shape == y.shape else y for y in result]
            return x.expand(result.shape)

        yield Change(at, call, f"without this {operation.label or operation.kind.strip('_')}")


def reading(at: int, number: int, instead: Tensor, text: str) -> Change:
    """Another tensor as one of the operands.

    Args:
        at: the number of the operation.
        number: of the operand among those that are tensors.
        instead: what it reads.
        text: of the change.
    """

    def call(overload: Any, args: Any, kwargs: Any) -> Any:
        return overload(*with_tensor(args, number, instead), **kwargs)

    return Change(at, call, text)


def numbers_in(operations: Iterable[tuple[int, Operation]]) -> dict[float, int]:
    """The numbers that operations have, each with the first of these."""
    found: dict[float, int] = {}
    for at, operation in operations:
        for name, x in named_arguments(operation).items():
            is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
            if is_number and name in NUMBERS and len(found) < MOST:
                found.setdefault(float(x), at)
    return found


def named_arguments(operation: Operation) -> dict[str, Any]:
    """Its arguments by name, with defaults."""
    overload = operation_named(operation.name)
    if overload is None:
        return {}
    return arguments_by_name(overload, operation.args, operation.kwargs)


def with_argument(operation: Operation, name: str, x: Any) -> Call:
    """Calls an operation with another argument."""
    overload = operation_named(operation.name)
    names = [argument.name for argument in overload._schema.arguments]

    def call(overload: Any, args: Any, kwargs: Any) -> Any:
        place = names.index(name)
        if place < len(args):
            args = (*args[:place], x, *args[place + 1 :])
        else:
            kwargs = {**kwargs, name: x}
        return overload(*args, **kwargs)

    return call


def in_words(name: str, x: Any, before: Any) -> str:
    """``with eps 1e-06 in place of 1e-05``."""
    of = "" if name in NAMELESS else f"{name} "
    one, two = ("its default" if y is None else _written(y) for y in (x, before))
    return f"with {of}{one} in place of {two}"


def _written(x: Any) -> str:
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def _holds_tensors(*values: Any) -> bool:
    return any(
        isinstance(x, (Ref, Tensor))
        or (isinstance(x, (list, tuple)) and any(isinstance(y, Ref) for y in x))
        for x in values
    )


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments, in order."""
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += tensors_in(x, {})
    return found


def with_tensor(args: Any, number: int, instead: Tensor) -> tuple[Any, ...]:
    """Arguments with another tensor in the place of one."""
    left = [number]

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            left[0] -= 1
            return instead if left[0] == -1 else x
        return [of(y) for y in x] if isinstance(x, (list, tuple)) else x

    return tuple(of(x) for x in args)
