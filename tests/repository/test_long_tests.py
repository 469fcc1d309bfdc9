"""The list of long tests is true of what pytest has collected in this run."""

from __future__ import annotations

import pytest

from support.long_tests import ALL, LONG, OTHERS, Long, collected


def cases_of(test: str, *, campaign: bool) -> set[str]:
    """The cases of a test that only a campaign runs, or that each change runs."""
    return {
        name
        for name, is_campaign in collected.items()
        if name.partition("[")[0] == test and is_campaign == campaign
    }


@pytest.mark.parametrize("long", LONG, ids=lambda long: long.test)
def test_each_change_runs_something_in_its_place(long: Long) -> None:
    """The campaign runs what is listed; each change runs other cases, or the other test."""
    covering = long.test if long.covered_by == OTHERS else long.covered_by
    files = {name.partition("::")[0] for name in collected}
    if not {name.partition("::")[0] for name in (long.test, covering)} <= files:
        pytest.skip("its file is not in this run")
    later = cases_of(long.test, campaign=True)
    if long.cases == ALL:
        assert later
        assert not cases_of(long.test, campaign=False)
    else:
        assert {f"{long.test}[{case}]" for case in long.cases} <= later
    assert cases_of(covering, campaign=False)
