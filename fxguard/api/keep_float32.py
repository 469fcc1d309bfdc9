"""``keep_float32``: computes some operations of a model in float32, without editing the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch.nn import Module

from fxguard.capture import dynamo
from fxguard.capture.keeping import Keeping
from fxguard.errors import UsageError
from fxguard.install.instrumented import check_can_instrument, find_installed
from fxguard.install.keeper import Keeper, kept_in
from fxguard.report.precision_plan import PrecisionPlan

__all__ = ["keep_float32"]


Model = TypeVar("Model", bound=Module)


def keep_float32(model: Model, plan: PrecisionPlan | Iterable[str]) -> Model:
    """Compute some operations of a model in float32, whatever dtype the model is in.

    The graphs that TorchDynamo captures are rewritten; the model's code, its parameters and its
    ``state_dict`` stay unchanged. A kept operation reads float16 and bfloat16 operands in float32.
    It passes its result on in float32 to other kept operations, and in its original dtype to all
    others. Autocast is off around it. A kept ``clamp`` does not cut off values that the low dtype
    cannot hold.

    This also works in training: gradients have the dtypes of their parameters. Weights that are
    needed in float32 are copied once, and again when they have changed. If the copies would take
    more than a quarter of the free memory, weights are cast at each run instead. A write through
    ``.data`` is noticed after the next backward, or when grad mode is switched. Code that
    TorchDynamo leaves to Python, exports or traces is not changed.

    Args:
        model: any ``nn.Module``, instrumented or not. Its ``forward`` is wrapped.
        plan: a plan from :meth:`Forecast.plan`, or globs. ``"encoder.block.*:add"`` names modules,
            and after the colon operations in them; ``"head:linear#2"`` names the second one in its
            module. They replace those of an earlier call.

    Returns:
        The same object. :func:`fxguard.remove` undoes the change; if the model is instrumented, the
        first call removes the guard, and the second one undoes the change. A plan with nothing to
        keep leaves the model unchanged.

    Raises:
        FxguardError: when there is no glob, or the model is of a kind that cannot be captured; and
            when the model first runs, if no glob names an operation.

    Example:
        >>> model = fxguard.keep_float32(model.half(), ["encoder.block.*:add"])
    """
    globs = plan.operations if isinstance(plan, PrecisionPlan) else plan
    globs = (globs,) if isinstance(globs, str) else tuple(globs)
    if not globs and isinstance(plan, PrecisionPlan):
        return model
    if not globs:
        raise UsageError("keep_float32 needs at least one glob of what to keep")
    there = find_installed(model)
    if there is None:
        check_can_instrument(model)
        of_parts = kept_in(model)
        if of_parts is not None:
            globs = (*globs, *of_parts.globs)
        Keeper(model, Keeping(globs)).install()
    else:
        there.keep(Keeping(globs))
    dynamo.compile_again(model)
    return model
