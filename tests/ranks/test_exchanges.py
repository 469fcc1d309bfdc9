"""Exchanges between graphs: what other ranks write counts no version, and is known all the same."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from fxguard.graph.exchanges import exchange_of
from support.ranks_exchanges import CASES, FAULTY
from support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(),
        reason="torch was built without gloo",
    ),
]

WRITTEN = "no cause: an input of its graph was written since"
UNKNOWN = "which operation made it is not known: operations between graphs did not run again"
BROUGHT = {
    "all_reduce": "all_reduce made inf (ranks_exchanges.py:",
    "gather": "all_gather brought inf from another rank (ranks_exchanges.py:",
    "direct": "input `h`: 3 +inf, every element",
    "receive": "recv brought inf from another rank (ranks_exchanges.py:",
    "receive_later": "irecv brought inf from another rank (ranks_exchanges.py:",
    "batched": "irecv brought inf from another rank (ranks_exchanges.py:",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what they found: one run of torchrun for all cases.

    After each case all ranks have met within five seconds. Workers of pytest-xdist share the run.
    """
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exchanges"
    with FileLock(f"{found}.lock"):
        if not (found / "done").exists():
            found.mkdir(exist_ok=True)
            ran = torchrun(Path(__file__).parents[1] / "support" / "ranks_exchanges.py", str(found))
            assert ran.returncode == 0, ran.stderr[-3000:]
            (found / "done").touch()
    return found


@pytest.fixture
def ranks(name: str, way: str, exchange: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank found in a case."""
    files = [folder / f"{name}-{way}-{exchange}.{rank}.json" for rank in (0, 1)]
    return [json.loads(file.read_text()) for file in files]


def only(prefix: str) -> pytest.MarkDecorator:
    """The cases whose model has a name that begins so."""
    chosen = [case for case in CASES if case[0].startswith(prefix)]
    return pytest.mark.parametrize(("name", "way", "exchange"), chosen)


@only("")
def test_nothing_changes_and_one_rank_tells(
    name: str, way: str, exchange: str, ranks: list[dict[str, Any]]
) -> None:
    """Outputs and gradients are those of the plain model; the steps without a fault say nothing."""
    healthy, faulty = ranks[1 - FAULTY], ranks[FAULTY]
    assert healthy["same"]
    assert faulty["same"]
    assert len(faulty["messages"]) == (way != "trace")  # where detection is off
    assert healthy["messages"] == (faulty["messages"] if way == "together" else [])


@only("Before")
def test_what_was_received_is_what_the_operation_read(
    name: str, way: str, exchange: str, ranks: list[dict[str, Any]]
) -> None:
    """A second run of the graph reads the numbers that the first run has read."""
    for found in ranks[FAULTY : FAULTY + (way != "trace")]:
        assert found["messages"][0].startswith(f"rank {FAULTY}: batch 1: exp made inf (ranks_exch")
        given = float(found["operands"][0].partition("exp(")[2].partition(")")[0])
        assert given == pytest.approx(found["read"], rel=1e-3)


@only("Over")
def test_no_second_run_reads_what_came_in_since(
    name: str, way: str, exchange: str, ranks: list[dict[str, Any]], folder: Path
) -> None:
    """It is refused, and the numbers of the first run are those that are shown."""
    if way == "trace":
        return
    (text,), (message,) = ranks[FAULTY]["texts"], ranks[FAULTY]["messages"]
    assert text.count(WRITTEN) == 1
    assert "in float64" not in text
    kind = "graph" if way == "replay" else "exp"  # with replay=True nothing else measures it
    assert message.startswith(f"rank {FAULTY}: batch 1: {kind} made inf (ranks_exchanges.py:")
    assert f"input[0] up to {2.5 if way == 'replay' else ranks[FAULTY]['read']:.2e}" in text
    assert way != "reproduce" or not [*folder.glob(f"{name}-{way}-{exchange}/*.py")]


@only("Brings")
def test_what_another_rank_has_made_is_not_made_here(
    name: str, way: str, exchange: str, ranks: list[dict[str, Any]]
) -> None:
    """What came in is named, in a part of a tensor, too; or the operation that made the rest."""
    (message,) = ranks[FAULTY]["messages"]
    said = "exp made inf (ranks_exchanges.py:" if name == "BringsRest" else BROUGHT[exchange]
    assert message.startswith(f"rank {FAULTY}: batch 1: {said}")


@only("Backward")
def test_an_exchange_ends_the_second_run_of_a_backward(
    name: str, way: str, exchange: str, ranks: list[dict[str, Any]]
) -> None:
    """Unless it is neither among the operations, nor writes what they had read."""
    (message,), (text,) = ranks[FAULTY]["messages"], ranks[FAULTY]["texts"]
    if name in ("BackwardOfGraph", "BackwardBeside"):
        assert message.startswith(f"rank {FAULTY}: batch 1: backward of sqrt made inf (ranks_exch")
        assert "sqrt(0.0)" in text
    else:
        assert message.startswith(f"rank {FAULTY}: batch 1: gradient of weight weight is ")
        assert UNKNOWN in text


@only("InLoss")
def test_an_exchange_in_a_loss_ends_the_second_run_of_its_backward(
    name: str, way: str, exchange: str, ranks: list[dict[str, Any]]
) -> None:
    """The gradient is named that came into the model."""
    (message,) = ranks[FAULTY]["messages"]
    assert message == f"rank {FAULTY}: batch 1: gradient of what the model returned came in as NaN"


def test_what_each_function_writes_is_known(folder: Path) -> None:
    """Against what gloo wrote, on each of two ranks, into tensors that were all different."""
    for rank in (0, 1):
        found = json.loads((folder / f"signatures.{rank}.json").read_text())
        assert len(found) >= 12
        assert all(map(all, found.values())), found


def test_no_function_is_left_out() -> None:
    """Each function of torch.distributed that a mode can see has its parameters read."""
    functions = [f for _, f in inspect.getmembers(dist.distributed_c10d, inspect.isfunction)]
    functions = [each for each in functions if each.__module__ == dist.distributed_c10d.__name__]
    seen = [f for f in functions if "handle_torch_function(" in inspect.getsource(f)]
    assert len(seen) > 15
    for function in seen:
        names = [*inspect.signature(function).parameters]
        given = {name: torch.ones(2) for name in names if "tensor" in name or "put" in name}
        exchange = exchange_of(function, (), given | ({"dst": 0} if "dst" in names else {}))
        assert exchange is not None
        assert len(given) < 2 or len(exchange.writes) < len(given), function.__name__
    assert exchange_of(torch.gather, (torch.ones(2), 0, torch.zeros(2).long()), {}) is None
