"""Numbers that are drawn in place of those that nobody may see."""

from __future__ import annotations

import pytest
import torch

from fxguard.reproduce._drawn import Drawn

SHAPE = torch.empty(10_000)


def drawn(known: Drawn, *, by_magnitude: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return known.like(SHAPE, generator, by_magnitude=by_magnitude)


@pytest.mark.parametrize("by_magnitude", [False, True])
def test_they_have_the_range_and_the_shares_of_what_was_there(by_magnitude: bool) -> None:
    """The finite ones lie between the smallest and the largest; 0, NaN and inf are as frequent."""
    x = torch.linspace(-2, 6, 1000)
    x[:100], x[100:300], x[300:350], x[350:360] = 0, torch.nan, torch.inf, -torch.inf
    known = Drawn.of(x)
    made = drawn(known, by_magnitude=by_magnitude)
    finite = made[made.isfinite()]
    assert known.low <= float(finite.min()) <= float(finite.max()) <= known.high
    for found, share in (
        (made == 0, 0.1),
        (made.isnan(), 0.2),
        (made == torch.inf, 0.05),
        (made == -torch.inf, 0.01),
    ):
        assert float(found.double().mean()) == pytest.approx(share, abs=0.02)


def test_all_numbers_are_equally_likely_or_most_are_near_the_ends() -> None:
    """Half of them lie in the middle half, or a few."""
    known = Drawn(0.0, 1.0)
    for by_magnitude, share in ((False, 0.5), (True, 0.12)):
        made = drawn(known, by_magnitude=by_magnitude)
        middle = (made > 0.25) & (made < 0.75)
        assert float(middle.double().mean()) == pytest.approx(share, abs=0.03)


def test_an_empty_tensor_gives_an_empty_one() -> None:
    known = Drawn.of(torch.empty(0, 3))
    made = known.like(torch.empty(0, 3), torch.Generator(), by_magnitude=False)
    assert made.shape == (0, 3)
