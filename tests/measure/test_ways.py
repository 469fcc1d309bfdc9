"""Whichever way measures, the numbers are the same."""

from __future__ import annotations

import math

import pytest
import torch

from fxguard.measure.traceable import decode
from fxguard.measure.ways import EAGER, INDUCTOR, TRACEABLE, WAYS

TENSORS = {
    "positive": torch.linspace(0.5, 7, 100_000),
    "both signs": torch.linspace(-3, 2, 100_000),
    "half": torch.linspace(-3, 2, 24).half().view(2, 3, 4).transpose(0, 2),
    "infinite": torch.tensor([1.0, -math.inf]),
    "integers": torch.arange(-3, 9),
    "empty": torch.empty(0, 3),
    "meta": torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("way", [EAGER, INDUCTOR], ids=lambda way: way.name)
def test_ways_agree(way: object, name: str) -> None:
    ours, theirs = (
        decode(*each.collect([each.abs_min_max(TENSORS[name])]).tolist()[0])  # type: ignore[attr-defined]
        for each in (way, TRACEABLE)
    )
    assert ours == theirs


def test_only_a_way_that_can_be_traced_is_given_to_a_compiler() -> None:
    """TorchDynamo's "eager" runs a graph as it is; every other backend may trace it."""
    assert [name for name, way in WAYS.items() if not way.is_traceable] == ["eager"]


def test_what_a_cache_may_keep_is_named_with_a_hash() -> None:
    """All names have one hash, of all files of the package; other ways have no names."""
    keys = INDUCTOR.cache_keys()
    assert "fxguard.measure.inductor.collect" in keys
    assert len(set(keys.values())) == 1
    assert not EAGER.cache_keys()
    assert not TRACEABLE.cache_keys()
