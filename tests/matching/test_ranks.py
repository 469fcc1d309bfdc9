"""Two ranks against one process: the operation or the collective that is wrong is named."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

import fxguard
from support.needs import needs
from support.ranks_of_engines import FAULTS, RANKS, ids, record_all, whole

CASES = [(scheme, fault) for scheme, faults in FAULTS.items() for fault in faults]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("safetensors")
    found = tmp_path_factory.mktemp("ranks")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    torch.multiprocessing.spawn(record_all, (found, port), nprocs=RANKS)
    with torch.no_grad():
        fxguard.record(whole(), found / "single", ids())
    return found


@pytest.mark.parametrize("scheme", FAULTS)
def test_ranks_that_are_right_agree(folder: Path, scheme: str) -> None:
    found = fxguard.compare(folder / "single", folder / scheme / "healthy")
    assert found.agrees, found
    assert found.outputs, found


@pytest.mark.parametrize(("scheme", "fault"), CASES)
def test_a_fault_is_named(folder: Path, scheme: str, fault: str) -> None:
    found = fxguard.compare(folder / "single", folder / scheme / fault)
    assert found.outcome == "operation", found
    assert found.first is not None
    assert found.first.b is not None
    assert found.first.b.source is not None
    if fault == "stale":  # the parts of a batch that was sent in parts are not told apart
        assert "torch.cat(found)" in found.first.b.source.code, found
        return
    assert FAULTS[scheme][fault] in found.first.b.source.code, found
    assert found.first.b.title.startswith("rank ")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("not reduced", "with the sum over ranks of mm"),
        ("tanh", "with approximate none in place of tanh"),
        ("order", "with its parts in the other order"),
    ],
)
def test_what_repairs_it_was_run(folder: Path, fault: str, said: str) -> None:
    found = fxguard.compare(folder / "single", folder / "by hand" / fault)
    assert found.first is not None
    assert said in found.first.tried, found


def test_which_reduction_it_was_is_read_from_the_numbers(folder: Path) -> None:
    found = fxguard.compare(folder / "single", folder / "by hand" / "mean")
    assert found.first is not None
    assert "all_reduce (max) of 2 ranks" in str(found.first.b), found


def test_sides_and_missing_ranks_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(fxguard.FxguardError, match="A has several ranks and B has one"):
        fxguard.compare(folder / "by hand" / "healthy", folder / "single")
    broken = tmp_path / "broken"
    for name in ("rank-0", "rank-2"):
        (broken / name).mkdir(parents=True)
    with pytest.raises(fxguard.FxguardError, match="has no rank-1"):
        fxguard.compare(folder / "single", broken)


def test_two_folders_of_ranks_agree(folder: Path) -> None:
    healthy = folder / "by hand" / "healthy"
    found = fxguard.compare(healthy, healthy)
    assert found.agrees, found


def test_losses_of_the_parts_of_a_batch_are_averaged(tmp_path: Path) -> None:
    """Also where those of the ranks are nearly equal, as at the start of a training."""

    class Loss(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().mean()

    needs("safetensors")
    x = 1 + 1e-3 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for name, given in (("one", x), ("two/rank-0", x[:4]), ("two/rank-1", x[4:])):
        fxguard.record(Loss(), tmp_path / name, given)
    found = fxguard.compare(tmp_path / "one", tmp_path / "two")
    assert found.agrees, found
    (only,) = found.outputs
    assert only.recorded is None  # no rank held the mean
    fxguard.record(Loss(), tmp_path / "wrong/rank-0", x[:4])
    fxguard.record(Loss(), tmp_path / "wrong/rank-1", x[2:6])  # half of it is rank 0's
    assert fxguard.compare(tmp_path / "one", tmp_path / "wrong").outcome == "operation"
