"""A report on its way out, and which origins have been reported before."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from fxguard.findings import Origin, OriginKey
from fxguard.report.report import Report
from fxguard.verdict.report_of import Finished

__all__ = ["Detection", "Seen"]


@dataclass(frozen=True, slots=True)
class Detection:
    """A report on its way out."""

    report: Report
    finished: Finished  # the batch of this rank
    error: Exception | None  # what an exception is to name as its cause
    is_new: bool  # whether one of its origins has not been reported before
    tells: bool | None  # whether this rank prints it; None if the ranks did not agree on it
    stream: str  # of `sys`, where it is printed


class Seen:
    """The origins that were reported so far, for all threads."""

    def __init__(self) -> None:
        self._keys: set[OriginKey] = set()
        self._lock = threading.Lock()

    def adds(self, origins: Iterable[Origin]) -> bool:
        """Whether any of the origins is new; afterwards none of them is."""
        keys = {origin.key for origin in origins if not origin.follows}
        with self._lock:
            new = not keys <= self._keys
            self._keys |= keys
        return new
