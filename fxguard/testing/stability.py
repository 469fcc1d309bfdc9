"""One model in two precisions, operation by operation, on the same input."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.errors import UsageError
from fxguard.guard.guard import Guard
from fxguard.guard.instrument import remove
from fxguard.guard.instrumented import find_guard, unwrapped
from fxguard.guard.options import Options
from fxguard.guard.plugins import Plugins
from fxguard.testing.side_by_side import Deviation, SideBySide, converted
from fxguard.testing.watch import Model, as_module

__all__ = ["Deviation", "Stability", "numerically_stable"]

# The default tolerance: in units of the dtype's eps, and no more than this in all. 32 roundings of
# bfloat16 would be a quarter of the largest element.
ROUNDINGS, MOST = 32, 1 / 16


@dataclass(frozen=True, slots=True, repr=False)
class Stability:
    """What came of comparing two precisions. True when every operation stayed within ``rtol``."""

    dtype: torch.dtype
    reference: torch.dtype
    rtol: float
    deviations: tuple[Deviation, ...]  # one for each operation, in order of execution
    between: int = 0  # operations that ran between graphs, and were not compared
    taken_over: int = 0  # operations that draw random numbers or have no kernel for the reference

    def __bool__(self) -> bool:
        return self.first is None

    @property
    def first(self) -> Deviation | None:
        """The first operation whose error is over ``rtol``."""
        return next((d for d in self.deviations if not d.error <= self.rtol), None)

    @property
    def worst(self) -> Deviation | None:
        """The operation with the largest error."""
        return max(self.deviations, key=lambda d: d.error, default=None)

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.reference)]
        counted = f"{len(self.deviations)} operations compared"
        if self.between:
            counted += f", {self.between} between graphs not"
        if self.taken_over:
            counted += f", {self.taken_over} random ones or without a kernel for {names[1]} not"
        if self.first is not None:
            text = f"not stable in {names[0]}: {self.first}, against {names[1]}"
            if self.first.source is not None and self.first.source.code:
                text += f"\n  {self.first.source}"
        else:
            text = f"stable in {names[0]}, against {names[1]}: the worst is {self.worst}"
        return f"{text}\n  rtol {self.rtol:.2g}; {counted}"

    __repr__ = __str__  # what pytest shows of `assert numerically_stable(...)`


@torch.no_grad()
def numerically_stable(
    model: Model,
    *args: Any,
    dtype: torch.dtype = torch.float16,
    reference: torch.dtype = torch.float64,
    rtol: float | None = None,
    **kwargs: Any,
) -> Stability:
    """Compare every operation of a model in one dtype with the same in a more precise one.

    Weights and floating-point inputs are rounded to ``dtype``; the reference starts from the
    rounded ones, so that only what the operations lose is counted. Each captured graph runs in
    both precisions, node by node; in the reference, casts between floating-point dtypes are left
    out. Integers, booleans and random numbers are taken over from the run in ``dtype``: a mask or
    an index that comes out differently is no error by itself.

    The error of a tensor is ``max |x - reference| / max |reference|``.

    Args:
        model: any module, or a function of tensors. A copy of it runs, without gradients.
        args: what it is given.
        dtype: the precision that is tested.
        reference: the precision that it is held against.
        rtol: the largest error that is allowed; where not given 32 times the dtype's ``eps``, and
            at most 1/16 (for bfloat16).
        kwargs: what it is given by name.

    Returns:
        True or False, and as text the first operation whose error is larger.

    Raises:
        FxguardError: when nothing could be compared, or the reference is not more precise.

    Warns:
        RuntimeWarning: when operations were not compared, because they ran between graphs or have
            no kernel for ``reference``.

    Example:
        >>> assert numerically_stable(model, x, dtype=torch.bfloat16)
        >>> print(numerically_stable(RMSNorm(64), x * 1000))
        not stable in float16: pow (norm.py:12) made an inf or a NaN out of 0, against float64
    """
    if not torch.finfo(reference).eps < torch.finfo(dtype).eps:
        raise UsageError(f"{reference} is not more precise than {dtype}")
    tested = copy.deepcopy(unwrapped(as_module(model))).to(dtype)
    if find_guard(tested) is not None:
        remove(tested)
    comparison = _Comparison(reference)
    options = Options(on_detect=lambda report: None)
    guard = Guard(tested, options, Plugins(hear=comparison.hear))
    guard.install()
    tested(*converted(args, dtype), **converted(kwargs, dtype))
    if not comparison.deviations:
        raise UsageError(
            "there is nothing to compare: TorchDynamo captured no operation of this "
            f"{type(tested).__name__}"
        )
    between = guard.counted().between
    rtol = min(ROUNDINGS * torch.finfo(dtype).eps, MOST) if rtol is None else rtol
    found = Stability(
        dtype, reference, rtol, tuple(comparison.deviations), between, comparison.taken_over
    )
    if between or comparison.without_kernel:
        warnings.warn(f"not every operation was compared: {found}", RuntimeWarning, stacklevel=3)
    return found


class _Comparison:
    """Runs each graph again when it has run, in both precisions."""

    def __init__(self, reference: torch.dtype) -> None:
        self.reference = reference
        self.deviations: list[Deviation] = []
        self.taken_over = self.without_kernel = 0
        # What a graph was given or has returned, and the same in the reference, by `id`.
        self.known: dict[int, tuple[Tensor, Any]] = {}

    def hear(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Compare one run of a graph that has returned."""
        if outputs is None:
            return
        assert run.args is not None
        both = SideBySide(run, self.reference)
        returned = both.run([self.in_reference(arg) for arg in run.args])
        self.deviations += both.deviations
        self.without_kernel += both.without_kernel
        self.taken_over += both.not_compared
        for output, reference in zip(outputs, returned, strict=True):
            self.known[id(output)] = (output, reference)

    def in_reference(self, value: Any) -> Any:
        if id(value) not in self.known:
            self.known[id(value)] = (value, converted(value, self.reference))
        return self.known[id(value)][1]
