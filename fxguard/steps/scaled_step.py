"""A step that read gradients which a loss scale still multiplied, and what later came of it.

Such a step is finite and far too large: what a later batch makes of the weights is its effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fxguard.findings import Fix, Growth
from fxguard.report.report import Report

__all__ = ["ScaledStep", "with_scaled_step"]

GREW = 10.0  # how much larger than in the first batch a weight is that such steps have spoilt


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """A step on gradients that a GradScaler had scaled, and had not unscaled."""

    optimizer: str  # its class
    batch_number: int
    scale: float

    def __str__(self) -> str:
        return (
            f"{self.optimizer}'s step of batch {self.batch_number} read gradients that are still "
            f"multiplied by the loss scale of {self.scale:g}: scaler.step(optimizer), then "
            "scaler.update(), in place of optimizer.step()"
        )


def with_scaled_step(
    report: Report, step: ScaledStep | None, growth: Callable[[float], tuple[Growth, ...]]
) -> Report:
    """The report, whose best fix is about such a step if weights have grown since.

    Args:
        report: the report.
        step: the first such step; None if there was none.
        growth: the weights that have grown by a factor since the first batch, the worst first.
    """
    if step is None or report.batch_number <= step.batch_number:
        return report
    at = next((i for i, origin in enumerate(report.origins) if not origin.follows), None)
    if at is None or not report.origins[at].is_operation:
        return report
    grown = growth(GREW)
    if not grown:
        return report
    origin = report.origins[at]
    origin = replace(origin, fixes=(Fix("advice", str(step)), *origin.fixes))
    origins = (*report.origins[:at], origin, *report.origins[at + 1 :])
    # The step is the cause of the growth, so that the growth is one of the reasons.
    why = report.why if report.grown else (*report.why, grown[0].as_reason)
    return replace(report, origins=origins, grown=(), why=why)
