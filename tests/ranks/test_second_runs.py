"""What one rank looks into alone: it issues no collective, and no other rank notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks_second_runs import CASES, FAULTY
from support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="torch was built without gloo",
    ),
]

# Why there is no cause, where the fault comes after something that waits for other ranks.
REASONS = {
    **dict.fromkeys(
        ("Functional", "InPlace", "Checkpointed", "InFunction"), "all_reduce is a coll"
    ),
    **dict.fromkeys(("Parallel", "ParallelBreak"), "operations on a DTensor may be collectives"),
    "Hidden": "allreduce_ is a coll",
}
# Where a second run of the backward would issue one, or may.
BACKWARDS = {**REASONS, **dict.fromkeys(("Early", "InBackward"), "all_reduce is a coll")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks have left what they found: one run of torchrun for all cases.

    The run ends well only if every collective of one rank has met that of the other: where one rank
    issues another, both wait until gloo gives up, and no later collective works.
    """
    found = tmp_path_factory.mktemp("ranks")
    ran = torchrun(Path(__file__).parents[1] / "support" / "ranks_second_runs.py", str(found))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return found


@pytest.fixture
def ranks(name: str, way: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank found in a case."""
    return [json.loads((folder / f"{name}-{way}.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_second_run_issues_no_collective(
    name: str, way: str, ranks: list[dict[str, Any]]
) -> None:
    """On both ranks the numbers of each step are those of the plain model, bit for bit.

    One rank names the operation that it saw, and gives the cause or says in one line why not.
    """
    healthy, faulty = ranks[1 - FAULTY], ranks[FAULTY]
    assert healthy["same"]
    assert faulty["same"]
    if way == "trace":  # detection is off
        assert healthy["messages"] == faulty["messages"] == []
        return
    if way == "together":
        assert healthy["messages"] == faulty["messages"]
    (message,), (text,), (cause,) = faulty["messages"], faulty["texts"], faulty["causes"]
    if way == "backward":
        expect_backward(name, message, text)
        return
    assert message.startswith(f"rank {FAULTY}: batch 1: exp made inf (ranks_second_runs.py:")
    assert text.count("no cause: ") == (name in REASONS)
    assert f"no cause: {REASONS.get(name, '')}" in text or name not in REASONS
    assert cause == ("unknown" if name in REASONS else "overflow")
    if way != "together":
        assert healthy["messages"] == []


def expect_backward(name: str, message: str, text: str) -> None:
    """A gradient that one rank makes bad comes to both through the collectives of the backward."""
    if name not in BACKWARDS:
        assert message.startswith(f"rank {FAULTY}: batch 1: backward of sqrt made inf (ranks_sec")
        return
    assert message.startswith(f"rank {FAULTY}: batch 1: gradient of weight ")
    assert f"which operation made it is not known: {BACKWARDS[name]}" in text


@pytest.mark.parametrize(("name", "way"), [case for case in CASES if case[1] == "trace"])
def test_values_without_a_fingerprint_say_why(
    name: str, way: str, ranks: list[dict[str, Any]]
) -> None:
    """Values before the first collective have one; of a sharded model every value has."""
    for found in ranks:
        assert "" in found["notes"]
        notes = [note for note in found["notes"] if note]
        assert len(notes) == (name in REASONS)
        assert all(note.startswith(REASONS[name]) for note in notes)


@pytest.mark.parametrize(("name", "way"), [case for case in CASES if case[1] == "underflow"])
def test_underflows_that_are_not_looked_for_are_counted(
    name: str, way: str, ranks: list[dict[str, Any]]
) -> None:
    """Of the healthy rank, which made zeros in the first batch, behind what waits for others."""
    coverage = ranks[1 - FAULTY]["coverage"]
    assert ("underflow not judged" in coverage) == (name in REASONS)
