"""The forms in which operations of a script are looked at, as parameters of tests."""

from __future__ import annotations

import pytest

__all__ = ["DEVICE", "FORMS", "MOSTLY_IN_C"]

DEVICE = "on a device"

FORMS = ["C", "Python", pytest.param(DEVICE, marks=pytest.mark.campaign)]
# Where the scripts are many, Python's form is a campaign: `test_without_a_model.py` runs in both.
MOSTLY_IN_C = ["C", *(pytest.param(x, marks=pytest.mark.campaign) for x in ("Python", DEVICE))]
