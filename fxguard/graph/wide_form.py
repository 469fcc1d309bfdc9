"""One operation in the wide form: in float64, on operands that are already wide.

In this form floating-point casts are identities. Integers, booleans and indices come from the
model's run. Python numbers keep their written value: an eps of 1e-8 is not 0. Random numbers are
drawn in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxguard import trees
from fxguard.forgiving import theirs
from fxguard.formats import NEAR_LIMIT, limit_of
from fxguard.graph import tables
from fxguard.graph.nodes import elements_of, memory_of
from fxguard.graph.operations import Call, is_collective, is_custom
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_body import wide_body, with_wide_dtypes
from fxguard.measure.at_hand import dtype_of, name_of_dtype
from fxguard.torch_names import HigherOrderOperator

__all__ = ["NotJudged", "Ran", "converted", "is_float", "wide_result", "widened"]

# Higher-order operations that run unchanged on wide operands.
WHOLE = frozenset({"autograd_function_apply", "flex_attention"})

EPS_AT = 3  # the position of a norm's eps


class NotJudged(Exception):  # noqa: N818 - an answer, not an error
    """Why there is no second form of something: "no float64 kernel for X"."""


@dataclass(slots=True)
class Ran:
    """One operation that has run in the model's form."""

    call: Call  # a call of tensors or nodes: what it reads and writes
    target: Any
    run: Callable[..., Any]  # computes the operation on given arguments
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    # State of the generators before it ran; None if it did not draw.
    before: RandomState | None = None

    @property
    def has_floats(self) -> bool:
        """Whether its result, or what it writes, can be bad."""
        return any(is_float(x) for _, x in elements_of(self.result))


def is_float(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def widened(values: Any, dtype: torch.dtype, *, differentiable: bool = False) -> Any:
    """The floating-point tensors in a value in a wide dtype; the same objects if already wide.

    Args:
        values: any value.
        dtype: the wide one.
        differentiable: whether gradients flow back through this.
    """

    def wide(x: Tensor) -> Tensor:
        if not is_float(x):
            return x
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise NotJudged(
                f"no {name_of_dtype(dtype)} kernel for tensors of type {type(x).__name__}"
            )
        x = x if differentiable or not x.requires_grad else x.detach()
        other = dtype.to_complex() if x.is_complex() else dtype
        # Inside torch.func, any operation would wrap it in another level.
        return x if x.dtype == other else x.to(other)

    return trees.tree_map_only(Tensor, wide, values)


def converted(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another dtype; complex ones only if it has 32 bits or more."""

    def other(x: Tensor) -> Tensor:
        if not is_float(x):
            return x
        if not x.is_complex():
            return x.detach().to(dtype)
        return x.detach().to(dtype.to_complex() if dtype.itemsize >= 4 else x.dtype)

    return trees.tree_map_only(Tensor, other, values)


def wide_result(
    ran: Ran,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    differentiable: bool = False,
) -> Any:
    """The result of an operation in the wide form.

    Args:
        ran: the operation, as the model has run it.
        args: its arguments, with widened tensors.
        kwargs: likewise.
        dtype: the wide one.
        differentiable: whether gradients flow back from the result to the arguments.

    Raises:
        NotJudged: when it cannot be computed in this form.
    """
    call, kind = ran.call, ran.call.kind
    try:
        is_higher_order = isinstance(ran.target, HigherOrderOperator)
        if is_higher_order and ran.target.name() not in WHOLE:
            raise NotJudged(f"inside {kind}")
        if is_collective(ran.target):
            raise NotJudged(f"{kind} is a collective")
        if is_custom(ran.target):
            raise NotJudged(f"no {name_of_dtype(dtype)} kernel for {kind}")
        if call.casts and call.first is not None:
            read = _first(args, kwargs)
            if not is_float(read):
                return read.to(dtype, copy=True)
            return read if _shares_memory(ran) else read.clone()
        if kind in tables.BIT_CASTS and _dtypes_in((args, kwargs)):
            raise NotJudged(f"{kind} reads the bits of another dtype")
        if ran.before is not None:
            return _drawn(ran, args, kwargs, dtype)
        args, kwargs = _with_own_eps(ran, *_without_hiding(ran, args, kwargs))
        result = _computed(ran.run, args, kwargs, dtype, ran.result)
        return widened(result, dtype, differentiable=differentiable)
    except NotJudged:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise NotJudged("out of memory") from error
    except theirs() as error:  # no such kernel, or a fixed dtype
        if "allocate memory" in str(error):
            raise NotJudged("out of memory") from error
        raise NotJudged(f"no {name_of_dtype(dtype)} kernel for {kind}") from error


def _computed(
    run: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype, like: Any
) -> Any:
    """Compute with every floating-point dtype among the arguments replaced."""
    args, kwargs = with_wide_dtypes((args, kwargs), dtype)
    args = trees.tree_map_only(GraphModule, lambda body: wide_body(body, dtype), args)
    made = [x for _, x in elements_of(like)]
    with torch.autocast(made[0].device.type if made else "cpu", enabled=False):
        result = run(*args, **kwargs)

    # Others, such as indices, are those of the model's run.
    return trees.tree_map(lambda low, high: high if is_float(low) else low, like, result)


def _drawn(ran: Ran, args: tuple[Any, ...], kwargs: Any, dtype: torch.dtype) -> Any:
    """The result of an operation that draws random numbers."""
    kind = ran.call.kind
    if kind in tables.DRAWS:
        return widened(ran.result, dtype)
    if kind not in tables.DROPOUTS:
        raise NotJudged(f"{kind} draws random numbers")
    assert ran.before is not None
    read = _first(args, kwargs)
    after = RandomState.now((ran.args, ran.kwargs))
    ran.before.restore()
    try:
        ones = torch.ones_like(read, dtype=_first(ran.args, ran.kwargs).dtype)
        if ran.args:
            kept = ran.run(ones, *ran.args[1:], **ran.kwargs)
        else:
            kept = ran.run(**{**ran.kwargs, _first_name(ran.kwargs): ones})
    finally:
        after.restore()
    if isinstance(kept, tuple):
        return (read * kept[0], *kept[1:])
    if ran.call.in_place:
        return read.mul_(kept)
    return read * kept


def _without_hiding(ran: Ran, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
    """The arguments without a bound that is there to hide an overflow."""
    if ran.call.kind not in tables.LIMITERS or not ran.args:
        return args, kwargs
    limit = limit_of(dtype_of(ran.args[0]))

    def hides(bound: Any) -> bool:
        if isinstance(bound, Tensor):
            return bound.numel() == 1 and hides(float(bound.detach()))
        number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
        return number and NEAR_LIMIT * limit <= abs(bound)

    if ran.call.kind in ("nan_to_num", "nan_to_num_"):
        # By default infinities become the largest number.
        given = dict(zip(("nan", "posinf", "neginf"), args[1:], strict=False)) | dict(kwargs)
        for name, infinite in (("posinf", torch.inf), ("neginf", -torch.inf)):
            if given.get(name) is None or hides(given[name]):
                given[name] = infinite
        return args[:1], given
    unbounded = {"min": -torch.inf, "max": torch.inf, "min_val": -torch.inf, "max_val": torch.inf}
    signs = (-torch.inf, torch.inf) if "max" not in ran.call.kind else (torch.inf,)
    bounds = tuple(
        infinite if hides(bound) else bound
        for bound, infinite in zip(args[1:], signs, strict=False)
    )
    rest = args[1 + len(bounds) :]
    named = {
        key: unbounded[key] if key in unbounded and hides(x) else x for key, x in kwargs.items()
    }
    return (args[0], *bounds, *rest), named


def _with_own_eps(ran: Ran, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
    """The arguments with the eps that a norm has by default in the model, not in the wide dtype."""
    if ran.call.kind != "rms_norm" or (args[EPS_AT:] or (kwargs.get("eps"),))[0] is not None:
        return args, kwargs
    computes_in = torch.promote_types(_first(ran.args, ran.kwargs).dtype, torch.float32)
    return args[:EPS_AT], {**kwargs, "eps": torch.finfo(computes_in).eps}


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs[_first_name(kwargs)]


def _first_name(kwargs: Mapping[str, Any]) -> str:
    return next(name for name, value in kwargs.items() if isinstance(value, Tensor))


def _shares_memory(ran: Ran) -> bool:
    memory = memory_of(_first(ran.args, ran.kwargs))
    return memory is not None and memory == memory_of(ran.result)


def _dtypes_in(values: Any) -> bool:
    return any(isinstance(x, torch.dtype) for x in trees.tree_leaves(values))
