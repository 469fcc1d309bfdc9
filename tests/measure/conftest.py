"""Both ways to measure what is in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxguard.measure import native


@pytest.fixture(params=["in C", "by torch's operations"], scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds with the part in C and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "in C":
            patch.setattr(native, "abs_min_max", lambda value: None)
        elif not native.is_built:
            pytest.skip("the part in C is not built")
        yield
