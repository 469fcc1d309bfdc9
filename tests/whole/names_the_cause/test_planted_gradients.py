"""A bad gradient, planted at every operand: blamed where the gradient of a weight turns bad."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support import zoo
from support.planting_gradients import BAD, Planter, reports_and_bad_leaves

Record = Callable[[str, object], None]


def plant_everywhere(
    name: str,
    patch: pytest.MonkeyPatch,
    record: Record,
    *,
    every: int = 1,
    compiler: str | None = None,
) -> None:
    """Plant at each operand in turn, or at each of so many."""
    entry = zoo.ZOO[name]
    counting = Planter()
    assert reports_and_bad_leaves(entry, counting, patch, compiler) == ([], [])
    sites = range(every // 2, counting.count, every)
    assert sites
    missed = []
    for site in sites:
        planter = Planter(site, BAD[site % 2])
        found, bad = reports_and_bad_leaves(entry, planter, patch, compiler)
        named = [report.origins[0].what for report in found]
        if planter.is_planted and named != (["planted"] if bad else []):
            missed.append((site, bad[:2], [report.message for report in found]))
    record(
        "planted",
        (f"gradients of {name} {compiler or 'eager'}", len(sites) - len(missed), len(sites)),
    )
    assert not missed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("in_place", marks=pytest.mark.campaign),
        pytest.param("containers", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_small_models(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """Writes in place, containers and module outputs of every kind."""
    plant_everywhere(name, monkeypatch, record_property)


@pytest.mark.campaign
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(("cnn", 1), ("twice", 1), ("t5", 12), ("llama", 12), ("gpt2", 12), ("bert", 12)),
        *(("mixtral", 12), ("vit", 12), ("resnet", 12), ("whisper", 12)),
    ],
)
def test_gradients_of_real_models(
    name: str,
    every: int,
    compiler: str | None,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    """Transformers and convolutions, in eager mode and under AOTAutograd."""
    plant_everywhere(name, monkeypatch, record_property, every=every, compiler=compiler)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "every"), [("cnn", 2), ("t5", 96), ("llama", 48), ("resnet", 24)])
def test_gradients_under_inductor(
    name: str, every: int, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """Each planted gradient is another graph to compile: a few of them."""
    plant_everywhere(name, monkeypatch, record_property, every=every, compiler="inductor")
