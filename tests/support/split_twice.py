"""Frames of a module in which the same operation runs twice: with two outputs, and with one."""

from __future__ import annotations

from fxguard.types import Frame, Row

__all__ = ["frames"]


def frames(largest: float) -> tuple[Frame, ...]:
    """Of one batch, with the largest magnitude of the first output."""
    made = (Row("output[0]", 0.5, largest), Row("output[1]", 0.25, 2 * largest))
    return (
        Frame("first", "split", True, made),
        Frame("first", "split", True, (Row("output", 0.0, 4 * largest),)),
        Frame("first", "Block", False, (Row("output", note="None"),)),
    )
