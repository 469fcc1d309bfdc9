"""Several ranks as one recording: each collective computes again what it brought."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

import fxguard
from fxguard.recording.ranks import read_record, together
from fxguard.recording.recorded import Operation, Recording
from fxguard.recording.replay import Replay
from support.all_collectives import RANKS, record_it
from support.needs import needs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("safetensors")
    found = tmp_path_factory.mktemp("collectives") / "ranks"
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    torch.multiprocessing.spawn(record_it, (found, port), nprocs=RANKS)
    return found


def test_each_collective_computes_again_what_it_brought(folder: Path) -> None:
    whole = read_record(folder)
    replay = Replay(whole)
    for operation in whole.operations:
        replay.run(operation)
    assert not replay.not_run
    assert not replay.told
    names = [name for name, _ in whole.outputs]
    assert len(names) == 2 * 16 + 2, names  # of two, only rank 0 has a result
    for name, value in whole.outputs:
        ran, again = whole.data[value], replay.now[value]
        assert torch.allclose(ran.double(), again, rtol=1e-6), name


def test_lines_are_the_users(folder: Path) -> None:
    """Also where torch wraps a function because its name is old."""
    sources = [operation.source for operation in read_record(folder).operations]
    assert {Path(each.file).name for each in sources if each} == {"all_collectives.py"}


def test_what_a_collective_brings_is_kept_when_it_is_there(folder: Path) -> None:
    """Its numbers are those of its elements, though it may return before they are there."""
    whole = read_record(folder)
    for name, value in whole.outputs:
        largest = whole.values[value].numbers.largest
        assert largest == pytest.approx(float(whole.data[value].abs().max())), name


def test_collectives_that_do_not_fit_together_are_refused() -> None:
    def alone(ranks: list[int]) -> Recording:
        told = {"kind": "all_reduce", "ranks": ranks, "reads": [], "peer": None}
        call = Operation("c10d.allreduce_.default", (), told, (), (), "mlp", None)
        return Recording("a model", operations=[call])

    with pytest.raises(fxguard.FxguardError, match=r"do not fit together:\nrank 0 waits in mlp"):
        together([alone([0, 1]), Recording("a model")])
    with pytest.raises(fxguard.FxguardError, match="do not fit together"):
        together([alone([0, 5]), Recording("a model")])
