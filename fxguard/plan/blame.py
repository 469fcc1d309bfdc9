"""One origin in a data flow, by number: a value, and the step that made it bad."""

from __future__ import annotations

from dataclasses import dataclass

from fxguard.records import Severity

__all__ = ["Blame"]


@dataclass(frozen=True, slots=True)
class Blame:
    """One origin: a step that made a bad value, or a weight or input that held one."""

    value: int
    step: int | None  # None for a weight, buffer, constant or input
    severity: Severity  # inf or NaN
