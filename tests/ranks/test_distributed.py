"""DistributedDataParallel and FSDP2 on several processes of this machine, under torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxguard
from support.ranks_at_work import FAULTY, Case, cases
from support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow_unless_campaign,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="torch was built without gloo",
    ),
]

HERE = Path(__file__).parent
Found = dict[int, dict[str, Any]]  # what each rank wrote
COMPARED = Case("fsdp"), Case("ddp")

# The same operations under both wrappers.
FRAMES = [
    f"{prefix}{title}"
    for block in range(3)
    for prefix in [f"blocks.{block}"]
    for title in (".up Linear", ".gate Linear", " mul", ".down Linear", " add", " Block")
] + ["head Linear", "Net"]


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Where so many ranks have left what they found: one run of torchrun for all chosen cases."""
    folders: dict[int, Path] = {}
    chosen = [
        (item.callspec.params["count"], item.callspec.params["case"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and getattr(item, "originalname", "") == "test_ranks"
    ]
    chosen += [(2, case) for case in COMPARED]

    def found(count: int) -> Path:
        if count not in folders:
            folders[count] = tmp_path_factory.mktemp(f"ranks{count}")
            names = {case.name for of, case in chosen if of == count}
            script = HERE.parent / "support" / "ranks_at_work.py"
            ran = torchrun(script, str(folders[count]), *names, count=count)
            (folders[count] / "errors").write_text(ran.stderr if ran.returncode else "")
        errors = (folders[count] / "errors").read_text()
        assert not errors, errors[-3000:]
        return folders[count]

    return found


@pytest.fixture(scope="module")
def work(folder: Callable[[int], Path]) -> Callable[[Case, int], Found]:
    """What the ranks found in a case."""

    def found(case: Case, count: int) -> Found:
        files = {rank: folder(count) / f"{case.name}.{rank}.json" for rank in range(count)}
        return {rank: json.loads(file.read_text()) for rank, file in files.items()}

    return found


@pytest.fixture(scope="module")
def traces(folder: Callable[[int], Path]) -> Callable[[Case, int], list[fxguard.types.Trace]]:
    """The traces that the ranks wrote in a case."""

    def found(case: Case, count: int) -> list[fxguard.types.Trace]:
        return [fxguard.load_trace(path) for path in sorted((folder(count) / case.name).iterdir())]

    return found


def whole_reports(found: Found) -> int:
    return sum(each["printed"].count("Detected inf/nan during") for each in found.values())


# What DTensors do in a module, next to the operations of the model.
OF_DTENSORS = (" from_local", "redistribute", "to_local", " linear")  # "prim_to_local" in 2.11


# Of two ranks these wait for the campaign, and of four ranks all.
CAMPAIGN = {
    *("ddp-before-aot_eager-False-raise-input", "ddp-after--False-raise-input"),
    *("fsdp-before--False-raise-input", "fsdp-after-aot_eager-False-raise-input"),
    *("ddp-before--True-raise-input", "ddp-before-aot_eager-True-raise-input"),
    *("ddp-before--False-raise-everywhere", "ddp-before--False-warn-everywhere"),
}


def marks_of(case: Case, count: int) -> Any:
    return pytest.mark.campaign if count == 4 or case.name in CAMPAIGN else ()


@pytest.mark.parametrize(
    ("case", "count"),
    [
        pytest.param(case, count, id=f"{case.name}-{count}", marks=marks_of(case, count))
        for count in (2, 4)
        for case in cases(count)
    ],
)
def test_ranks(
    work: Callable[[Case, int], Found],
    traces: Callable[[Case, int], list[fxguard.types.Trace]],
    case: Case,
    count: int,
) -> None:
    """Healthy steps are bitwise the unguarded ones; a fault is found, told once, and written."""
    found = work(case, count)
    prefix = "module." if case.instrumented == "after" and case.wrapper == "ddp" else ""
    for each in found.values():
        assert each["same"]
        assert "not checked" not in each["coverage"]
        titles = [t.removeprefix(prefix).removeprefix("module ") for t in each["frames"]]
        if case.wrapper.startswith("tp"):
            titles = [title for title in titles if not title.endswith(OF_DTENSORS)]
        assert titles[: len(FRAMES)] == FRAMES
        assert len(titles) == len(FRAMES) + bool(prefix)  # DistributedDataParallel has a frame
    faulty = {FAULTY} if case.fault == "input" else set(found)
    concerned = set(found) if case.sync_ranks else faulty
    what = (
        "weight blocks.1.gate.weight "  # turned NaN, where it was written; else it holds NaN
        if case.fault == "weight"
        else f"mul in {prefix}blocks.0 made inf"  # and -inf, where its elements could be looked at
    )
    for rank, each in found.items():
        if rank not in concerned:
            assert (each["report"], each["raised"], each["printed"]) == (None, None, "")
            continue
        blamed = rank if rank in faulty else min(faulty)
        assert each["report"]["rank"] == blamed
        message = f"rank {blamed}: batch 2: {what}"
        if case.fault != "weight":  # a line that only read a weight explains nothing
            message += " (ranks_at_work.py:"
        if case.on_detect == "raise":
            assert either_sign(each["raised"]).startswith(message)
        else:
            assert each["raised"] is None
        if "Detected" not in each["printed"]:
            told = message if blamed == rank else f"rank {rank}: told by {message}"
            assert either_sign(each["printed"]).startswith(told)
            assert each["printed"].count("\n") == 1
    assert whole_reports(found) == 1
    assert {trace.rank for trace in traces(case, count)} == faulty
    for trace in traces(case, count):
        [batch] = trace.batches
        assert batch.number == 2
        assert either_sign(batch.verdict[0]).startswith(what)
        assert batch.blamed


def either_sign(text: str) -> str:
    return text.replace("made inf and -inf", "made inf").replace("made -inf", "made inf")


def test_gathered_weights_are_measured_whole(work: Callable[[Case, int], Found]) -> None:
    """A row of a weight that FSDP shards has the range of the whole weight, on each rank."""
    sharded, replicated = (work(case, 2) for case in COMPARED)
    for rank, each in sharded.items():
        assert len(each["weights"]) == 20
        assert each["weights"] == replicated[rank]["weights"]


SCRIPT = """
import sys
import torch
from torch import distributed, nn
import fxguard

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x) * self.gate(x)

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)  # products of both signs
model = fxguard.instrument(Net(), sync_ranks="sync" in sys.argv)
model = nn.parallel.DistributedDataParallel(model)
for step in range(100):
    x = torch.full((2, 4), 1e30 if (rank, step) == (1, 3) else 1.0)
    model(x).sum().backward()
print("rank", rank, "never stopped")
"""


@pytest.mark.parametrize("how", [pytest.param("alone", marks=pytest.mark.campaign), "sync"])
def test_no_rank_hangs(tmp_path: Path, how: str) -> None:
    """The failing rank ends the job, or all ranks stop together; one report, and it is whole."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = torchrun(script, how)
    assert ran.returncode != 0
    assert "never stopped" not in ran.stdout
    assert ran.stderr.count("Detected inf/nan during batch_number=3 rank=1\n") == 1
    assert "rank 1: batch 3: mul made inf and -inf (train.py:" in ran.stderr
    lines = ran.stderr.splitlines()
    told = [line for line in lines if line.startswith("rank 0: told by rank 1: batch 3: mul made")]
    assert len(told) == (how == "sync")
    start = lines.index("mul made inf and -inf (train.py:13): overflow")
    assert lines[start + 1] == "  train.py:13: return self.up(x) * self.gate(x)"
    end = next(i for i in range(start, len(lines)) if lines[i].endswith("inf output"))
    titles = [line for line in lines[start:end] if line.startswith(" " * 18)]
    assert len(titles) == 15  # three batches of four, and three of this one
    assert not any("rank" in line for line in lines[start:end] if "Detected" not in line)
