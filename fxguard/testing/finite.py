"""Asserts that no operation of a model makes an inf or a NaN from given inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxguard.report.errors import NumericsError
from fxguard.testing.watch import Model, watch

__all__ = ["assert_finite"]


def assert_finite(
    model: Model,
    *inputs: Any,
    strict: bool = True,
    ignore: Iterable[str] = (),
    gradients: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a model, and fail if an operation in it makes an inf or a NaN.

    Args:
        model: any module, or a function of tensors. It is guarded during the call only. The graphs
            of the last model are kept, so that the next example of a property test does not capture
            them again.
        inputs: positional arguments of the model.
        strict: whether bad values that reach no output also count: a square that overflows under a
            reciprocal, so that the result is a zero.
        ignore: globs of modules and operations, as for :func:`fxguard.instrument`.
        gradients: whether to also differentiate the ``loss`` that the model returns, or else the
            sum of all its outputs, with respect to weights and inputs. No ``.grad`` changes.
        kwargs: keyword arguments of the model.

    Returns:
        What the model returned.

    Raises:
        NumericsError: an ``AssertionError``, with the verdict as its text, and ``.report``.

    Example:
        >>> @given(x=tensors(torch.float16, (4, 64), min_value=-1000, max_value=1000))
        ... def test_no_overflow(x):
        ...     assert_finite(model, x)
    """
    __tracebackhide__ = True
    outcome = watch(model, inputs, kwargs, strict=strict, ignore=tuple(ignore), backward=gradients)
    if outcome.report is not None:
        raise NumericsError("\n".join(outcome.report.verdict), outcome.report)
    return outcome.output
