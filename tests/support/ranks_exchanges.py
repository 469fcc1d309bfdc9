"""What two ranks do for tests/ranks/test_exchanges.py: they exchange tensors between graphs.

    torchrun --nproc_per_node 2 tests/support/ranks_exchanges.py folder

No exchange counts a version of what it writes. In the second of three steps, rank 1 has a fault.
Each rank writes ``folder/model-exchange-way.rank.json``.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

import fxguard
from fxguard.graph.exchanges import exchange_of

FAULTY = 1
SECONDS = 20  # until a rank that waits for another is told that it waits in vain


def other() -> int:
    return 1 - dist.get_rank()


def all_reduce(x: Tensor) -> None:
    dist.all_reduce(x)


def receive(x: Tensor) -> None:
    if dist.get_rank() == FAULTY:
        dist.recv(x, other())
    else:
        dist.send(x, other())


def receive_later(x: Tensor) -> None:
    begin = dist.irecv if dist.get_rank() == FAULTY else dist.isend
    begin(x, other()).wait()


def batched(x: Tensor) -> None:
    begin = dist.irecv if dist.get_rank() == FAULTY else dist.isend
    for work in dist.batch_isend_irecv([dist.P2POp(begin, x, other())]):
        work.wait()


def gather(x: Tensor) -> None:
    """Rank 0's part comes into it."""
    dist.all_gather([x, torch.empty_like(x)], x.clone())


def functional(x: Tensor) -> None:
    x.copy_(collectives.all_reduce(x, "sum", dist.group.WORLD))


def direct(x: Tensor) -> None:
    """By a method of the process group, which no mode sees."""
    dist.group.WORLD.allreduce([x]).wait()


EXCHANGES: dict[str, Callable[[Tensor], None]] = {
    each.__name__: each
    for each in (all_reduce, receive, receive_later, batched, gather, functional, direct)
}


class Model(nn.Module):
    """Exchanges a tensor between two graphs.

    Args:
        exchange: writes its argument.
    """

    def __init__(self, exchange: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.exchange = exchange
        self.has_fault = False
        self.read = 0.0  # by the operation that fails

    @torch.compiler.disable
    def between(self, x: Tensor) -> None:
        self.exchange(x.detach())

    def scale(self) -> float:
        """What makes the exponential overflow on one rank."""
        return 1e4 if self.has_fault and dist.get_rank() == FAULTY else 0.5


class Before(Model):
    """The graph that fails reads what was exchanged."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (x * self.weight).sin()
        self.between(h)
        self.read = float(h.detach().amax()) * self.scale()
        return h, torch.exp(h * self.scale())


class Over(Model):
    """The exchange writes what the graph that fails has read."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.detach().clone()
        self.read = float(h.amax()) * self.scale()
        y = torch.exp(h * self.weight * self.scale())
        self.between(h)
        return h * 1.0, y.log()


class Brings(Model):
    """What rank 1 receives is infinite."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.detach().clone()
        self.fill(h)
        self.between(h)
        return x * self.weight, h * self.weight if dist.get_rank() == FAULTY else x

    @torch.compiler.disable
    def fill(self, h: Tensor) -> None:
        if self.has_fault and dist.get_rank() != FAULTY:
            h.data = torch.tensor([float("inf")]).expand(3).clone()


class BringsPart(Model):
    """What rank 1 receives comes into the first of three elements, and is infinite."""

    source = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        large = torch.tensor(
            [1e4 if self.has_fault and i == self.source else 0.0 for i in range(3)]
        )
        h = torch.exp(x.detach() * (large if self.fails() else 0.0))
        self.parts(h)
        return x * self.weight, h * self.weight if dist.get_rank() == FAULTY else x

    def fails(self) -> bool:
        return dist.get_rank() != FAULTY

    @torch.compiler.disable
    def parts(self, h: Tensor) -> None:
        self.exchange(h.detach()[:1])
        self.exchange(h.detach()[2:])


class BringsRest(BringsPart):
    """What it receives is finite, between elements of which its own graph made one infinite."""

    source = 1

    def fails(self) -> bool:
        return dist.get_rank() == FAULTY


def root(x: Tensor, scale: float) -> Tensor:
    """Its gradient is infinite on one rank."""
    return (x.square().sum() * float(scale < 1)).sqrt()


class BackwardOfGraph(Model):
    """Likewise, in the backward of the last graph."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (x * self.weight).sin()
        self.between(h)
        return h, root(h + self.weight, self.scale())


class BackwardBetween(Model):
    """Likewise, where the exchange is one of the operations between graphs."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (x * self.weight).sin() * 1.0
        self.exchange(h.detach())
        return h, root(h + self.weight, self.scale())


class BackwardOver(Model):
    """Likewise, where the exchange writes what these operations had read."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.full((3,), float(self.scale() < 1))
        y = (self.weight * x).square().sum() * 1.0
        root = (y + zero - y.detach()).sqrt().sum()
        self.exchange(zero)
        return zero, root


class BackwardBeside(Model):
    """Likewise, where it writes another tensor."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        zero, beside = torch.full((3,), float(self.scale() < 1)), torch.ones(3)
        y = (self.weight * x).square().sum() * 1.0
        root = (y + zero - y.detach()).sqrt().sum()
        self.exchange(beside)
        return beside, root


class InLoss(Model):
    """A model whose loss exchanges what it returned."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin()


MODELS = {
    kind.__name__: kind
    for kind in (
        *(Before, Over, Brings, BringsPart, BringsRest, InLoss),
        *(BackwardOfGraph, BackwardBetween, BackwardOver, BackwardBeside),
    )
}
OPTIONS: dict[str, dict[str, Any]] = {
    "replay": {"replay": True},
    "trace": {"trace_batch_nums": [0, 1]},
    "underflow": {"underflow": 0.5},
    "together": {"sync_ranks": True},
}
SOME = ("all_reduce", "receive", "functional")
RECEIVES = ("receive", "receive_later", "batched")
BACKWARDS = tuple(name for name in MODELS if name.startswith("Backward"))
CASES = [
    *itertools.product(("Before", "Over"), ("forward",), EXCHANGES),
    *itertools.product(("Before", "Over"), ("replay",), (*SOME, "batched")),
    *itertools.product(
        ("Before", "Over"), ("trace", "reproduce", "underflow", "together"), RECEIVES[:1]
    ),
    *itertools.product(("Brings",), ("forward",), ("all_reduce", "gather", "direct", *RECEIVES)),
    *itertools.product(("BringsPart", "BringsRest"), ("forward", "replay"), RECEIVES),
    *itertools.product(BACKWARDS, ("backward",), SOME),
    *itertools.product(BACKWARDS, ("together",), RECEIVES[:1]),
    *itertools.product(("InLoss",), ("watch",), SOME),
]


def step(model: Model, value: float) -> list[list[float]]:
    """One step: what the model returned, and the gradient of its weight."""
    x = torch.full((3,), value + dist.get_rank())
    model.zero_grad()
    result: Any = model(x)
    if isinstance(model, InLoss):
        h = result * 2.0
        model.exchange(h.detach())
        result = h, root(h, model.scale())
    if type(model).__name__.startswith(("Backward", "In")):
        result[1].backward()
    gradient = [] if model.weight.grad is None else model.weight.grad.tolist()
    return [result[0].detach().tolist(), gradient]


def work(name: str, way: str, exchange: str, folder: Path) -> dict[str, Any]:
    """Three steps without a guard, and three with one."""
    runs: list[Any] = []
    reports: list[fxguard.types.Report] = []
    texts: list[str] = []
    read = 0.0

    def told(report: fxguard.types.Report) -> None:
        nonlocal read
        reports.append(report)
        texts.append(str(report))
        read = model.read

    for is_guarded in (False, True):
        torch._dynamo.reset()
        model = MODELS[name](EXCHANGES[exchange])
        watching: Any = contextlib.nullcontext()
        options = dict(OPTIONS.get(way, {}))
        for key in ("trace_to", "reproduce_to"):
            if key.startswith(way):
                options[key] = folder / f"{name}-{way}-{exchange}"
        if is_guarded and way == "watch":
            watching = fxguard.watch(model, on_detect=told)
        elif is_guarded:
            fxguard.instrument(model, on_detect=told, **options)
        with watching:
            steps = []
            for number in range(3):
                model.has_fault = number == 1
                steps.append(step(model, 0.5 + number))
        runs.append(steps)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))
    return {
        "same": str(runs[0]) == str(runs[1]),
        "messages": [report.message for report in reports],
        "texts": texts,
        "operands": [report.origins[0].operands for report in reports],
        "read": read,
    }


def signatures() -> dict[str, list[bool]]:
    """Of each function: whether it wrote what is said, and nothing else."""
    rank, found = dist.get_rank(), dict[str, list[bool]]()

    def new(count: int = 2) -> Tensor:
        return torch.arange(1.0, count + 1) * (10 + rank)

    def pair() -> list[Tensor]:
        return [new(), new() + 5]

    calls: list[tuple[Any, dict[str, Any]]] = [
        (dist.send if rank else dist.recv, {"tensor": new(), "dst" if rank else "src": other()}),
        (dist.isend if rank else dist.irecv, {"tensor": new(), "dst" if rank else "src": other()}),
        (dist.broadcast, {"tensor": new(), "src": 1}),
        (dist.broadcast, {"tensor": new(), "group_src": 0}),
        (dist.all_reduce, {"tensor": new()}),
        (dist.reduce, {"tensor": new(), "dst": 0}),
        (dist.all_gather, {"tensor_list": pair(), "tensor": new() + 1}),
        (dist.all_gather_into_tensor, {"output_tensor": new(4), "input_tensor": new() + 1}),
        (dist.gather, {"tensor": new() + 1, "gather_list": None if rank else pair(), "dst": 0}),
        (dist.scatter, {"tensor": new() + 1, "scatter_list": None if rank else pair(), "src": 0}),
        (dist.reduce_scatter, {"output": new() + 1, "input_list": pair()}),
        (dist.reduce_scatter_tensor, {"output": new() + 1, "input": new(4)}),
        (dist.all_to_all_single, {"output": new() + 1, "input": new()}),
    ]
    for function, given in calls:
        exchange = exchange_of(function, (), given)
        assert exchange is not None
        tensors = [x for v in given.values() for x in (v if isinstance(v, list) else [v])]
        tensors = [x for x in tensors if isinstance(x, Tensor)]
        before = [x.clone() for x in tensors]
        work = function(**given)
        if function in (dist.isend, dist.irecv):
            work.wait()
        for x, held in zip(tensors, before, strict=True):
            is_written = any(x is each for each in exchange.writes)
            may_stay = function is dist.reduce and rank != 0
            found.setdefault(function.__name__, []).append(
                may_stay or is_written == (not torch.equal(x, held))
            )
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
    torch.set_num_threads(1)
    rank = dist.get_rank()
    (folder / f"signatures.{rank}.json").write_text(json.dumps(signatures()))
    for case in CASES:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            found = work(*case, folder)
        (folder / f"{'-'.join(case)}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
