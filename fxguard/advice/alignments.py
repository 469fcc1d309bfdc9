"""Samples that have too few frames for their labels, in numbers: for CTC.

Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice.case import Case

__all__ = ["words_of_short"]

MANY = 1 / 8  # of the samples: fewer are left out

_COUNTED = re.compile(r"(\d+) of the other (\d+)\)")


def words_of_short(case: Case) -> Mapping[str, str]:
    """``{"share": "7 of 32"}`` where many samples have too few frames; {} of a few."""
    told = "" if case.evidence is None else case.evidence.alignment
    found = _COUNTED.search(told)
    if found is None:
        return {}
    short, samples = int(found[1]) + 1, int(found[2]) + 1
    return {"share": f"{short} of {samples}"} if short > MANY * samples else {}
