"""``keep_float32``: some operations of a model compute in float32, without an edit of the model."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module

from fxguard.capture import dynamo
from fxguard.capture.keeping import Keeping
from fxguard.errors import UsageError
from fxguard.guard.instrumented import check_can_instrument, find_installed
from fxguard.guard.keeper import Keeper, kept_in
from fxguard.report.precision_plan import PrecisionPlan

__all__ = ["keep_float32"]


def keep_float32(model: Module, plan: PrecisionPlan | Iterable[str]) -> Module:
    """Compute some operations of a model in float32, whatever dtype the model is in.

    The graphs that TorchDynamo captures are rewritten; the model's code, its parameters and its
    ``state_dict`` stay as they are. A kept operation reads operands of float16 and bfloat16 in
    float32, and hands its result on in float32 to other kept operations, in the dtype that it had
    to all others. Autocast is off around it. A ``clamp`` that is kept does not cut off what the
    low dtype would not hold.

    It holds in training, too: gradients have the dtypes of their parameters. Weights that are
    needed in float32 are copied once, and again when they have changed; where the copies would take
    more than a quarter of the free memory, they are cast at each run. A write through ``.data`` is
    seen after the next backward, or when grad mode is switched. What TorchDynamo leaves to
    Python, exports or traces stays as it is.

    Args:
        model: any ``nn.Module``, instrumented or not. Its ``forward`` is wrapped.
        plan: from :meth:`Forecast.plan`, or globs: ``"encoder.block.*:add"`` is of modules, and
            after a colon of operations in them, ``"head:linear#2"`` the second one in its module.
            They replace those of an earlier call.

    Returns:
        The same object. :func:`fxguard.remove` takes it off; where the model is instrumented, the
        first call takes off the guard, the second one this. A plan that has nothing to keep
        leaves the model as it is.

    Raises:
        FxguardError: where there is no glob, or the model is of a kind that cannot be captured; and
            when the model first runs, where no glob names an operation.

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
