"""Another form of one operation: its kind, its dimensions, the order of its operands, its sign."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.matching._changes import (
    FLAGS,
    Change,
    in_words,
    named_arguments,
    tensors_in,
    with_argument,
    with_tensor,
)
from fxguard.matching._region import Call
from fxguard.recording.recorded import Operation, Ref
from fxguard.recording.replay import reads_of

__all__ = ["forms"]

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
            if named_arguments(operation).get("approximate") == before:
                change = with_argument(operation, "approximate", x)
                yield Change(at, change, in_words("approximate", x, before))


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
    for name, x in named_arguments(operation).items():
        if isinstance(x, bool) and name in FLAGS:
            yield Change(at, with_argument(operation, name, not x), in_words(name, not x, x))
        elif name == "dim" and isinstance(x, int):
            for dim in range(most):
                if dim != x % most:
                    yield Change(at, with_argument(operation, name, dim), in_words(name, dim, x))
        elif name == "dim" and isinstance(x, (list, tuple)) and len(x) == 1:
            for dim in range(most):
                if dim != x[0] % most:
                    yield Change(
                        at, with_argument(operation, name, [dim]), in_words(name, dim, x[0])
                    )
        elif name == "correction":
            other = 0 if x is None or x == 1 else 1
            yield Change(at, with_argument(operation, name, other), in_words(name, other, x))
        elif name == "pad" and isinstance(x, (list, tuple)):
            pad = [y for pair in zip(x[1::2], x[::2], strict=True) for y in pair]
            if pad != list(x):
                yield Change(at, with_argument(operation, name, pad), in_words(name, pad, list(x)))


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
            names = list(named_arguments(operation))
            which = f"{names[one]} and {names[two]}"
        yield Change(at, exchanged, f"with {which} exchanged")
    for number, shape in enumerate(shapes):
        if len(shape) >= 2 and shape[-1] == shape[-2] and kind in ("addmm", "baddbmm", "bmm", "mm"):

            def transposed(overload: Any, args: Any, kwargs: Any, number: int = number) -> Any:
                x = tensors_in(args, kwargs)[number].transpose(-1, -2)
                return overload(*with_tensor(args, number, x), **kwargs)

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
            x = tensors_in(args, kwargs)[number]
            return overload(*with_tensor(args, number, _inverted(x)), **kwargs)

        yield Change(at, call, f"with the opposite of operand {number + 1}")


def _inverted(x: Tensor) -> Tensor:
    return ~x if x.dtype == torch.bool else -x
