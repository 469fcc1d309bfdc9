"""What one operation may have otherwise: its numbers, its kind, its operands and their order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.matching._region import Call
from fxguard.recording.recorded import Operation, Ref
from fxguard.recording.replay import operation_named, reads_of

__all__ = ["Change", "arguments_of_others", "forms", "left_out", "numbers", "numbers_in", "reading"]

USUAL_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3)
SMALL = 1e-2  # a number below this is taken for an eps
MOST = 24  # numbers of the other program
NAMELESS = frozenset(["diagonal", "exponent", "other", "self", "value"])
# What another number may be tried for: kernels check some others not at all.
NUMBERS = frozenset(
    [
        *("beta", "diagonal", "end", "eps", "exponent", "lambd", "max", "max_val", "min"),
        *("min_val", "negative_slope", "other", "scale", "self", "start", "threshold", "value"),
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
            *("rounding_mode", "shifts", "step", "stride"),
        ]
    )
)
FAMILIES = (
    ("eq", "ge", "gt", "le", "lt", "ne"),
    ("ceil", "floor", "round", "trunc"),
    ("cos", "sin"),
    ("add", "sub"),
    ("div", "mul"),
    ("maximum", "minimum"),
    ("reciprocal", "rsqrt", "sqrt"),
    (
        *("elu", "gelu", "hardsigmoid", "hardswish", "leaky_relu", "mish", "relu", "sigmoid"),
        *("silu", "softplus", "tanh"),
    ),
)
REDUCE: Mapping[str, Callable[..., Tensor]] = {
    "amax": torch.amax,
    "mean": torch.mean,
    "sum": torch.sum,
}
SPLITS = frozenset(["chunk", "split", "split_with_sizes", "tensor_split", "unbind"])
VIEWS = frozenset(["_reshape_alias", "_unsafe_view", "reshape", "view"])


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
    given = _named(operation)
    for number, other in others:
        if other.kind.rstrip("_") != operation.kind.rstrip("_"):
            continue
        for name, x in _named(other).items():
            if name not in TAKEN or name not in given or _holds_tensors(x, given[name]):
                continue
            if x != given[name]:
                yield Change(at, _with(operation, name, x), _in_words(name, x, given[name]), number)


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
    for name, x in _named(operation).items():
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
            yield Change(at, _with(operation, name, z), _in_words(name, z, x), theirs.get(float(y)))


def forms(at: int, operation: Operation, shapes: Sequence[Sequence[int]]) -> Iterator[Change]:
    """Another kind, operands in another order, another dimension, another sign.

    Args:
        at: the number of the operation.
        operation: it.
        shapes: of its operands.
    """
    yield from _kinds(at, operation)
    yield from _flags(at, operation, shapes)
    yield from _orders(at, operation, shapes)
    yield from _signs(at, operation)


def left_out(at: int, operation: Operation) -> Iterator[Change]:
    """The operation left out: an operand in the place of its result."""
    refs = reads_of(operation)
    for number in range(len(refs)):

        def call(overload: Any, args: Any, kwargs: Any, number: int = number) -> Any:
            result = overload(*args, **kwargs)
            x = _tensors(args, kwargs)[number]
            if isinstance(result, (list, tuple)):
                return [x if x.shape == y.shape else y for y in result]
            return x.expand(result.shape)

        yield Change(at, call, f"without this {operation.kind.strip('_')}")


def reading(at: int, number: int, instead: Tensor, text: str) -> Change:
    """Another tensor as one of the operands.

    Args:
        at: the number of the operation.
        number: of the operand among those that are tensors.
        instead: what it reads.
        text: of the change.
    """

    def call(overload: Any, args: Any, kwargs: Any) -> Any:
        return overload(*_replaced(args, number, instead), **kwargs)

    return Change(at, call, text)


def numbers_in(operations: Iterable[tuple[int, Operation]]) -> dict[float, int]:
    """The numbers that operations have, each with the first of these."""
    found: dict[float, int] = {}
    for at, operation in operations:
        for name, x in _named(operation).items():
            is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
            if is_number and name in NUMBERS and len(found) < MOST:
                found.setdefault(float(x), at)
    return found


def _named(operation: Operation) -> dict[str, Any]:
    """Its arguments by name, with defaults."""
    overload = operation_named(operation.name)
    if overload is None:
        return {}
    arguments = overload._schema.arguments
    found = {x.name: x.default_value for x in arguments}
    found |= dict(zip(found, operation.args, strict=False))
    return found | dict(operation.kwargs)


def _with(operation: Operation, name: str, x: Any) -> Call:
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


def _in_words(name: str, x: Any, before: Any) -> str:
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


def _kinds(at: int, operation: Operation) -> Iterator[Change]:
    kind = operation.kind.rstrip("_")
    _, _, overload_name = operation.name.partition(".")[2].partition(".")
    for family in FAMILIES:
        for other in family if kind in family else ():
            packet = getattr(torch.ops.aten, other)
            same = getattr(packet, overload_name, None) or packet
            text = f"with {other} in place of {kind}"

            def call(overload: Any, args: Any, kwargs: Any, same: Any = same) -> Any:
                named = {"approximate"} if "gelu" in str(same) else {"alpha"}
                return same(*args, **{k: v for k, v in kwargs.items() if k in named})

            if other != kind:
                yield Change(at, call, text)
    for other in REDUCE if kind in REDUCE else ():
        if other != kind:
            yield Change(at, _reduced(other), f"with {other} in place of {kind}")
    if kind == "gelu":
        names = ("none", "tanh")
        for x, before in (names, names[::-1]):
            if _named(operation).get("approximate") == before:
                change = _with(operation, "approximate", x)
                yield Change(at, change, _in_words("approximate", x, before))


def _reduced(other: str) -> Call:
    def call(overload: Any, args: Any, kwargs: Any) -> Any:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        if dim is None:
            return REDUCE[other](args[0])
        return REDUCE[other](args[0], dim, keepdim=keepdim)

    return call


def _flags(at: int, operation: Operation, shapes: Sequence[Sequence[int]]) -> Iterator[Change]:
    most = max(map(len, shapes), default=0)
    for name, x in _named(operation).items():
        if isinstance(x, bool) and name in FLAGS:
            yield Change(at, _with(operation, name, not x), _in_words(name, not x, x))
        elif name == "dim" and isinstance(x, int):
            for dim in range(most):
                if dim != x % most:
                    yield Change(at, _with(operation, name, dim), _in_words(name, dim, x))
        elif name == "dim" and isinstance(x, (list, tuple)) and len(x) == 1:
            for dim in range(most):
                if dim != x[0] % most:
                    yield Change(at, _with(operation, name, [dim]), _in_words(name, dim, x[0]))
        elif name == "correction":
            other = 0 if x is None or x == 1 else 1
            yield Change(at, _with(operation, name, other), _in_words(name, other, x))
        elif name == "pad" and isinstance(x, (list, tuple)):
            pad = [y for pair in zip(x[1::2], x[::2], strict=True) for y in pair]
            if pad != list(x):
                yield Change(at, _with(operation, name, pad), _in_words(name, pad, list(x)))


def _orders(at: int, operation: Operation, shapes: Sequence[Sequence[int]]) -> Iterator[Change]:
    kind = operation.kind.rstrip("_")
    if kind in ("cat", "stack"):

        def reversed_cat(overload: Any, args: Any, kwargs: Any) -> Any:
            return overload(list(args[0])[::-1], *args[1:], **kwargs)

        yield Change(at, reversed_cat, "with its parts in the other order")
    for one, two in itertools.combinations(range(min(len(operation.made), 4)), 2):

        def swapped(overload: Any, args: Any, kwargs: Any, one: int = one, two: int = two) -> Any:
            results = list(overload(*args, **kwargs))
            results[one], results[two] = results[two], results[one]
            return results

        if kind in SPLITS:
            yield Change(at, swapped, f"with results {one + 1} and {two + 1} exchanged")
    refs = [place for place, x in enumerate(operation.args) if isinstance(x, Ref)]
    for one, two in itertools.combinations(refs, 2):
        if kind in ("add", "mul", "maximum", "minimum", "addmm", "native_layer_norm"):
            break

        def exchanged(overload: Any, args: Any, kwargs: Any, one: int = one, two: int = two) -> Any:
            args = list(args)
            if args[one].shape != args[two].shape:  # some kernels check no sizes
                raise ValueError("operands of other shapes")
            args[one], args[two] = args[two], args[one]
            return overload(*args, **kwargs)

        which = "its operands"
        if len(refs) > 2:
            names = list(_named(operation))
            which = f"{names[one]} and {names[two]}"
        yield Change(at, exchanged, f"with {which} exchanged")
    for number, shape in enumerate(shapes):
        if len(shape) >= 2 and shape[-1] == shape[-2] and kind in ("addmm", "baddbmm", "bmm", "mm"):

            def transposed(overload: Any, args: Any, kwargs: Any, number: int = number) -> Any:
                x = _tensors(args, kwargs)[number].transpose(-1, -2)
                return overload(*_replaced(args, number, x), **kwargs)

            yield Change(at, transposed, f"with operand {number + 1} transposed")
    if kind in VIEWS and len(shapes) == 1:
        yield from _orders_of_dimensions(at, shapes[0])


def _orders_of_dimensions(at: int, shape: Sequence[int]) -> Iterator[Change]:
    """Two dimensions exchanged before they are merged, or behind a split."""
    for one, two in itertools.combinations(range(len(shape)), 2):
        if two - one > 2 or shape[one] < 2 or shape[two] < 2:
            continue

        def before(overload: Any, args: Any, kwargs: Any, one: int = one, two: int = two) -> Any:
            return args[0].transpose(one, two).reshape(args[1])

        yield Change(at, before, f"with dimensions {one} and {two} exchanged before it")

    def split(order: tuple[int, int]) -> Call:
        def call(overload: Any, args: Any, kwargs: Any) -> Any:
            one, two = order
            size = list(overload(*args, **kwargs).shape)
            size[one], size[two] = size[two], size[one]
            return args[0].reshape(size).transpose(one, two)

        return call

    for one in range(len(shape) + 1):
        for two in (one + 1, one + 2):
            text = f"with dimensions {one} and {two} of its result split in the other order"
            yield Change(at, split((one, two)), text)


def _signs(at: int, operation: Operation) -> Iterator[Change]:
    def of_result(change: Callable[[Tensor], Tensor]) -> Call:
        def call(overload: Any, args: Any, kwargs: Any) -> Any:
            result = overload(*args, **kwargs)
            if not isinstance(result, Tensor):
                raise TypeError("several results")
            return change(result)

        return call

    kind = operation.kind.rstrip("_")
    if kind in ("arange", "cumsum", "iota"):
        yield Change(at, of_result(lambda x: x + 1), "with 1 more")
        yield Change(at, of_result(lambda x: x - 1), "with 1 less")
    yield Change(at, of_result(_inverted), "with the opposite result")
    for number in range(len(reads_of(operation))):

        def call(overload: Any, args: Any, kwargs: Any, number: int = number) -> Any:
            x = _tensors(args, kwargs)[number]
            return overload(*_replaced(args, number, _inverted(x)), **kwargs)

        yield Change(at, call, f"with the opposite of operand {number + 1}")


def _inverted(x: Tensor) -> Tensor:
    return ~x if x.dtype == torch.bool else -x


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += _tensors(x, {})
    return found


def _replaced(args: Any, number: int, instead: Tensor) -> tuple[Any, ...]:
    """Arguments with another tensor in the place of one."""
    left = [number]

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            left[0] -= 1
            return instead if left[0] == -1 else x
        return [of(y) for y in x] if isinstance(x, (list, tuple)) else x

    return tuple(of(x) for x in args)
