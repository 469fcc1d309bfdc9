"""Numbers that tanh has rounded to 1, and that were stored before atanh takes them back.

Knows nothing of torch.
"""

from __future__ import annotations

import linecache
import re

from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.graph.poles import plain

__all__ = ["is_of_tanh"]

_STORED = names_in("cat copy empty setitem stack tensor zeros")
_TANH = re.compile(r"\btanh\(")


def is_of_tanh(case: Case) -> bool:
    """It is 1 or -1, was stored or given, and the same file takes a tanh."""
    source = case.around.step.source
    is_end = bool(case.operands) and abs(case.operands[0].low) == 1
    step = made_by(case.around, case.around.culprit)
    if source is None or not is_end or not (step is None or plain(step.kind) in _STORED):
        return False
    return any(map(_TANH.search, linecache.getlines(source.file)))
