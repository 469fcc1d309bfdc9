"""What two ranks do for tests/ranks/test_pipelines.py: a model that is split into stages.

    torchrun --nproc_per_node 2 tests/support/ranks_pipeline.py folder

Each rank writes ``folder/schedule-way-fault.rank.json``.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import fxguard

MICRO_BATCHES = 4
FAULTY = 2  # the micro-batch that has the fault, in the second step; see `faulty`
SECONDS = 20  # until a rank that waits for another is told that it waits in vain

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
OF_FOUR = ("interleaved", "zero bubble")  # stages, two on each rank

CASES = [
    *((schedule, "instrument", "") for schedule in SCHEDULES),
    *((schedule, "instrument", "forward 1") for schedule in SCHEDULES),
    *((schedule, "instrument", "backward 0") for schedule in SCHEDULES),
    ("interleaved", "instrument", "forward 3"),
    ("gpipe", "watch", ""),
    ("1f1b", "watch", ""),
    ("1f1b", "watch", "loss 1"),
    *(("gpipe", "watch", f"loss 1{which}") for which in ("", " first", " last")),
    ("interleaved", "watch", "loss 3 last"),
    ("zero bubble", "watch", "loss 3 first"),
    ("zero bubble", "instrument", "backward 2 first"),
    ("1f1b", "together", ""),
    ("gpipe", "together", "forward 1"),
]


def faulty(fault: str) -> int:
    """The micro-batch with the fault: that in the middle, the first, or the last."""
    return {"first": 0, "last": MICRO_BATCHES - 1}.get(fault.split()[-1], FAULTY)


def name_of(schedule: str, way: str, fault: str) -> str:
    return f"{schedule}-{way}-{fault}".replace(" ", "")


class Stage(nn.Module):
    """A part of the model; the numbers of a faulty micro-batch are large.

    Args:
        number: of the stage.
        fault: the fault, the number of its stage, and the micro-batch, such as "forward 1 last".
    """

    def __init__(self, number: int, fault: str) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.fault = fault.split()[0] if fault.split()[1:2] == [str(number)] else ""
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) + x
        is_large = x.detach().abs().amax() > 50
        if self.fault == "forward":
            return y + torch.exp(is_large * 100.0)
        if self.fault == "backward":
            return y + (y - y.detach()).abs().where(is_large, torch.ones(())).sqrt()
        return y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    is_large = target.amax() > 50
    return (output - target).square().mean() + (output.sum() * 0 + is_large * 100.0).exp()


def fill_memory() -> None:
    """Leave large numbers where uninitialised memory comes from."""
    junk = [torch.full((2, 16), 1e38) for _ in range(2000)]
    del junk


def work(schedule: str, way: str, fault: str, *, guarded: bool) -> dict[str, Any]:
    """Two steps; returns losses, gradients, and what was said."""
    torch._dynamo.reset()
    rank, device = distributed.get_rank(), torch.device("cpu")
    numbers = (rank, rank + 2) if schedule in OF_FOUR else (rank,)
    models = [Stage(number, fault) for number in numbers]
    reports: list[fxguard.types.Report] = []
    watching: Any = contextlib.nullcontext()
    options: dict[str, Any] = {"on_detect": reports.append}
    if way == "together":
        options["sync_ranks"] = True
    guards = models[-1:] if way == "watch" else models
    if guarded and way == "watch":
        watching = fxguard.watch(models[-1], **options)
    elif guarded:
        for model in models:
            fxguard.instrument(model, **options)
    count = 2 * len(models)
    stages = [PipelineStage(m, n, count, device) for m, n in zip(models, numbers, strict=True)]
    given = stages if schedule in OF_FOUR else stages[0]
    run = SCHEDULES[schedule](given, MICRO_BATCHES, loss_fn=loss_of)
    fill_memory()
    found: list[Any] = []
    coverage: list[str] = []
    notes: list[str] = []
    with watching:
        for number in range(2):
            for model in models:
                model.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            target = torch.zeros(8, 16)
            if fault and number == 1:
                large = target if fault.startswith("loss") else x
                large[2 * faulty(fault)] = 100.0
            losses: list[Tensor] = []
            last = {"target": target, "losses": losses} if rank == 1 else {}
            run.step(*[x] if rank == 0 else [], **last)
            gradients = [p.grad.tolist() for m in models for p in m.parameters()]
            found += [[float(each.detach()) for each in losses], gradients]
        if guarded:
            coverage = [fxguard.guard_of(model).coverage() for model in guards]
            notes = [note.message for model in guards for note in fxguard.guard_of(model).notes]
    return {
        "found": str(found),
        "messages": [report.message for report in reports],
        "places": [(report.rank, report.stage, report.micro_batch) for report in reports],
        "coverage": coverage,
        "notes": notes,
    }


def main(folder: Path) -> None:
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    for case in CASES:
        plain = work(*case, guarded=False)
        with (
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            guarded = work(*case, guarded=True)
        guarded["same"] = plain["found"] == guarded.pop("found")
        guarded["warned"] = [str(each.message) for each in told]
        (folder / f"{name_of(*case)}.{rank}.json").write_text(json.dumps(guarded))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
