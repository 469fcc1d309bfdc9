"""Runs a captured graph with only its matrix products in float8.

Operands are cast with one scale per tensor, so that its largest element becomes the largest number
of the format and nothing overflows. Far smaller elements become 0 or lose their digits. The product
sums in float64, where kernels use float32, and its result is cast in the same way. The graph
continues with that result, or, if it fails, with the result without float8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.forecasting._backward_in_dtype import (
    Came,
    LookBack,
    Made,
    cancels,
    gradient_rows,
)
from fxguard.forecasting._failure import SHARE, Failure, Failures, share_of
from fxguard.formats import FORMATS
from fxguard.graph.operations import Call
from fxguard.graph.own_gradients import backward_of
from fxguard.graph.tables import MATRIX_PRODUCTS, MIX_AND_ADD
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure.at_hand import name_of_dtype
from fxguard.plan.plan import Place
from fxguard.rerun.differences import relative_error
from fxguard.rerun.other_values import AsTheModel
from fxguard.rerun.walk import Walk

__all__ = ["BackwardInFloat8", "InFloat8", "cast_to_float8", "is_matrix_product"]


WIDE = torch.float64

# In units of the format's eps. Elements of both operands and of the result are each off by at most
# half a unit, so the largest element of a sum that does not cancel is off by one and a half.
ROUNDINGS = 1.5

# The argument that is only added to the product.
_ADDED: frozenset[int | str] = frozenset({0, "input"})
_BIAS: frozenset[int | str] = frozenset({2, "bias"})


def is_matrix_product(call: Call) -> bool:
    """Whether an operation is a product of two matrices, or of batches of them."""
    kind = call.kind
    is_sum = kind in MIX_AND_ADD and not kind.startswith(("addmv", "addr"))
    return (kind in MATRIX_PRODUCTS or is_sum) and not call.written


def cast_to_float8(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor rounded to float8 with its own scale, back in its own dtype.

    Args:
        value: a finite tensor of float32 or float64.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Example:
        >>> cast_to_float8(torch.tensor([448.0, 100.0, 1e-4]), torch.float8_e4m3fn)
        tensor([448., 104.,   0.])
    """
    largest = float(value.abs().max()) if value.numel() else 0.0
    if not largest:
        return value.clone()
    scale = FORMATS[name_of_dtype(dtype)].max / largest
    cast: Tensor = (value * scale).to(torch.float32).to(dtype).to(value.dtype) / scale
    return cast


class InFloat8(AsTheModel):
    """The graph with its matrix products in float8.

    Args:
        dtype: the format.

    Attributes:
        failures: which products fail, and why.
        products: the places of all products.
        island: products whose result without float8 was used.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = name_of_dtype(dtype)
        self.failures = Failures()
        self.products: dict[Place, None] = {}
        self.island: dict[Place, None] = {}

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return differs or is_matrix_product(walk.call_of(node))

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        low = ran.result
        if any(read in walk.others for read in node.all_input_nodes):
            low = super().follow(walk, node, ran, args, kwargs)
        if not is_matrix_product(ran.call) or not is_float(low) or low.is_complex():
            return low
        place = walk.place(node)
        self.products[place] = None
        try:
            return self.product(place, ran, args, kwargs).to(low.dtype)
        except NotJudged as reason:
            self.failures.skip(place, ran, str(reason))
            return low

    def product(self, place: Place, ran: Ran, args: Any, kwargs: Any) -> Tensor:
        """The result of a product in float8, or without float8 if it fails."""
        args, kwargs = widened((args, kwargs), WIDE)
        exact: Tensor = wide_result(ran, args, kwargs, WIDE)
        cast = self.cast_operands(ran.call.kind, args, kwargs)
        pairs = zip(
            operands_of(ran.call.kind, args, kwargs), operands_of(ran.call.kind, *cast), strict=True
        )
        fails = False
        for (label, operand), (_, low) in pairs:
            failure = self.underflow(operand, low, label)
            self.failures.note(place, ran, failure)
            fails = fails or failure is not None
        summed = wide_result(ran, *cast, WIDE)
        result = self.cast(summed)
        failure = self.underflow(summed, result) or self.rounding(result, exact)
        self.failures.note(place, ran, failure)
        if fails or failure is not None:
            self.island[place] = None
            return exact
        return result

    def cast(self, value: Tensor) -> Tensor:
        """A tensor rounded to float8, back in float64; unchanged if it is not finite."""
        return cast_to_float8(value, self.dtype) if bool(value.isfinite().all()) else value

    def cast_operands(self, kind: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a product, with operands in float8."""
        beside = _beside(kind)

        def cast(slot: int | str, value: Any) -> Any:
            return self.cast(value) if slot not in beside and is_float(value) else value

        return (
            tuple(cast(at, x) for at, x in enumerate(args)),
            {name: cast(name, x) for name, x in kwargs.items()},
        )

    def underflow(self, wide: Tensor, cast: Tensor, label: str = "") -> Failure | None:
        """The failure of a tensor that loses half of its elements."""
        sizes = wide.abs()
        lost = (cast == 0) & (sizes > 0)
        share = share_of(lost, sizes > 0)
        if share < SHARE:
            return None
        largest = float(sizes.where(lost, 0.0).max())
        return Failure("underflow", self.name, largest, share, relative_error(cast, wide), label)

    def rounding(self, result: Tensor, exact: Tensor) -> Failure | None:
        """The failure of a product that is far from its result without float8."""
        error = relative_error(result, exact)
        if error <= ROUNDINGS * FORMATS[self.name].eps:
            return None
        return Failure("rounding", self.name, float(exact.abs().max()), 1.0, error)


def operands_of(kind: str, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The two matrices of a product, with their labels in frames."""
    beside, number = _beside(kind), 0
    for slot, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            if slot not in beside:
                yield f"input[{number}]", value
            number += 1


def _beside(kind: str) -> frozenset[int | str]:
    return _ADDED if kind in MIX_AND_ADD else _BIAS


class BackwardInFloat8(InFloat8):
    """The graph in float8, with the backward of each product alone.

    The incoming gradient is in float8 with its own scale, as are the operands that the backward
    multiplies it with.

    Args:
        dtype: the format.
        made: the gradients of the results of each operation.

    Attributes:
        back: the findings. No gradient is beyond the format, because each has its own scale.
    """

    def __init__(self, dtype: torch.dtype, made: Made) -> None:
        super().__init__(dtype)
        self.back = LookBack(made)

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        result = super().follow(walk, node, ran, args, kwargs)
        place = walk.place(node)
        came = self.back.came_to(place)
        if came is not None and place in self.products and place not in self.failures.found:
            try:
                self.look_back(place, ran, widened((args, kwargs), WIDE), came)
            except NotJudged as reason:
                self.back.failures.skip(place, ran, str(reason))
        return result

    def look_back(self, place: Place, ran: Ran, given: tuple[Any, Any], came: Came) -> None:
        """Run the backward of one product in float8 and in float64."""
        wanted = came.gradients[0].to(WIDE)
        if not bool(wanted.isfinite().all()):
            return
        come = self.cast(wanted)
        failure = self.underflow(wanted, come, "grad of output")
        if failure is not None:
            self.back.failures.note(place, ran, failure)
            return
        cast = self.cast_operands(ran.call.kind, *given)
        back = backward_of(ran, cast, {0: come}, came.wants, WIDE)
        exact = backward_of(ran, given, {0: wanted}, came.wants, WIDE)
        self.back.rows[place] = gradient_rows(ran, (ran.args, ran.kwargs), {0: wanted}, exact)
        for position, (one, other) in enumerate(zip(back, exact, strict=True)):
            if one is None or other is None:
                continue
            failure = self.rounding(one, other)
            if failure is None:
                continue
            signed = self.back.with_random_signs(wanted)
            sizes = backward_of(ran, given, {0: signed}, came.wants, WIDE)[position]
            if not cancels(failure, other, sizes, ROUNDINGS):
                self.back.failures.note(place, ran, failure)
