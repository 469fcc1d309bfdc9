"""The exceptions that carry a report."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from fxguard import BatchLimitReached, FxguardError, NonFiniteError
from support.t5_overflow import BLOCK, GOLDEN, REPORT


def test_errors_are_value_errors_of_one_family() -> None:
    """Code that catches ValueError, as for the original debugger, catches both errors."""
    for kind in (NonFiniteError, BatchLimitReached):
        assert issubclass(kind, FxguardError)
        assert issubclass(kind, ValueError)
    assert not issubclass(NonFiniteError, BatchLimitReached)


@pytest.mark.parametrize(
    "copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
)
def test_error_takes_its_report_along(copied: Any) -> None:
    """The error survives pickling, as between the processes of a launcher, with its report."""
    error = copied(NonFiniteError(REPORT.message, REPORT))
    assert type(error) is NonFiniteError
    assert str(error) == f"batch 0: mul in {BLOCK} made inf and -inf (modeling_t5.py:109)"
    assert error.report == REPORT
    assert str(error.report) == GOLDEN
