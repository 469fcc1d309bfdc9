"""What ranks do for tests/ranks/test_distributed.py: run by torchrun, once for several cases.

    torchrun --nproc_per_node 2 tests/support/ranks_at_work.py folder case [case ...]

Each rank writes ``folder/case.rank.json``, and its traces into ``folder/case``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxguard

FAULTY = 1  # the rank on which something overflows
LAST = -1


@dataclass(frozen=True)
class Case:
    """One way to run a model on several ranks.

    Attributes:
        wrapper: "ddp", "fsdp", "hsdp" (sharded in one dimension of the mesh, replicated in
            the other), "tp" (tensor parallelism) or "tp and fsdp".
        instrumented: "before" it is wrapped, or "after".
        backend: of ``torch.compile``, "" for eager.
        sync_ranks: as for ``instrument``.
        on_detect: as for ``instrument``.
        fault: "input" (a product overflows on one rank), "weight" (one rank's part holds NaN), or
            "everywhere" (a product overflows on each rank).
        full_every: as for ``instrument``.
    """

    wrapper: str
    instrumented: str = "before"
    backend: str = ""
    sync_ranks: bool = False
    on_detect: str = "raise"
    fault: str = "input"
    full_every: int | None = None

    @property
    def name(self) -> str:
        """Of its files."""
        given = [value for value in dataclasses.astuple(self) if value is not None]
        return "-".join(map(str, given))


CASES = [
    *(
        Case(wrapper, instrumented, backend)
        for wrapper, instrumented, backend in itertools.product(
            ("ddp", "fsdp"), ("before", "after"), ("", "aot_eager")
        )
    ),
    Case("ddp", sync_ranks=True),
    Case("fsdp", sync_ranks=True),
    Case("ddp", backend="aot_eager", sync_ranks=True),
    Case("ddp", fault="everywhere"),
    Case("ddp", fault="everywhere", on_detect="warn"),
    Case("ddp", fault="everywhere", sync_ranks=True),
    Case("ddp", sync_ranks=True, on_detect="warn"),
    Case("ddp", backend="aot_eager", sync_ranks=True, full_every=2),
    Case("fsdp", fault="weight"),
    Case("tp", fault="everywhere"),
]
OF_FOUR = [
    Case("ddp", backend="inductor"),
    Case("fsdp", backend="inductor"),
    Case("tp", "after", "aot_eager", fault="everywhere"),
    Case("hsdp"),
    Case("hsdp", "after", "aot_eager"),
    Case("tp and fsdp", fault="everywhere"),
    Case("tp and fsdp", "after", "aot_eager", fault="everywhere"),
]


def cases(count: int) -> list[Case]:
    """What so many ranks do."""
    return CASES if count < 4 else CASES + OF_FOUR


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * self.gate(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    count = distributed.get_world_size()
    mesh = None  # of one dimension
    if wrapper == "hsdp":
        mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    if wrapper.startswith("tp"):
        both = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("fsdp", "tp"))
        mesh = both["fsdp"]
        for block in model.blocks:
            styles = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, both["tp"], styles)
    if wrapper == "tp":
        return model
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def guarded(case: Case, model: nn.Module, traces: Path) -> tuple[Any, nn.Module]:
    """What is called, and what is instrumented."""
    options = {"sync_ranks": case.sync_ranks, "on_detect": case.on_detect, "trace_to": traces}
    options["full_every"] = case.full_every
    if case.instrumented == "before":
        fxguard.instrument(model, **options)
    run = wrapped(model, case.wrapper)
    if case.instrumented == "after":
        fxguard.instrument(model := run, **options)
    return compiled(run, case), model


def compiled(model: nn.Module, case: Case) -> Any:
    return torch.compile(model, backend=case.backend) if case.backend else model


def numbers(tensor: Any) -> Tensor:
    """Of a gradient; this rank's part of a sharded one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train_step(run: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What a step returned, and the gradients."""
    output = run(x)
    output.square().mean().backward()
    gradients = [numbers(p.grad).clone() for p in run.parameters()]
    run.zero_grad()
    return output.detach(), gradients


def work(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    plain = compiled(wrapped(copy.deepcopy(model), case.wrapper), case)
    run, instrumented = guarded(case, model, folder / case.name)
    same = True
    share = rank // 2 if case.wrapper.startswith("tp") else rank  # of the data
    for batch in range(2):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * batch + share))
        (output, gradients), (expected, wanted) = train_step(run, x), train_step(plain, x)
        same &= torch.equal(output, expected)
        same &= all(map(torch.equal, gradients, wanted))
    guard = fxguard.guard_of(instrumented)
    found = {"same": same, "coverage": guard.coverage()}
    found["frames"] = [frame.title for frame in guard.frames()]
    found["weights"] = {
        f"{frame.name}.{row.label}": row.abs_max
        for frame in guard.frames()
        for row in frame.rows
        if frame.kind == "Linear" and row.label in ("weight", "bias")
    }
    if case.fault == "weight":
        if rank == FAULTY:
            with torch.no_grad():
                numbers(model.blocks[1].gate.weight)[LAST, LAST] = float("nan")
    elif case.fault == "everywhere" or rank == FAULTY:
        x = x * 1e20
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), quiet():
        try:
            run(x)
            found["raised"] = None
        except fxguard.NonFiniteError as error:
            found["raised"] = str(error)
    report = guard.last_report
    found["report"] = None if report is None else report.to_dict()
    found["printed"] = printed.getvalue()
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(folder: Path, names: list[str]) -> None:
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    for case in cases(distributed.get_world_size()):
        if case.name not in names:
            continue
        found = work(case, rank, folder)
        (folder / f"{case.name}.{rank}.json").write_text(json.dumps(found))
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
