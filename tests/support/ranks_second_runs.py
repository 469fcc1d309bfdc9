"""What two ranks do for tests/ranks/test_second_runs.py: one rank alone has something to look into.

    torchrun --nproc_per_node 2 tests/support/ranks_second_runs.py folder [case ...]

On rank 1 a value turns bad, so that only this rank would run something again. Each rank writes
``folder/case.rank.json``.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import fxguard

FAULTY = 1
SECONDS = 20  # until a collective that not every rank issues is an error


def rank() -> int:
    return distributed.get_rank()


def summed(x: Tensor) -> Tensor:
    """The sum over all ranks, in the graph."""
    return collectives.all_reduce(x, "sum", distributed.group.WORLD)


def fault(x: Tensor) -> Tensor:
    """Too large on one rank, once ``x`` is 2."""
    return torch.exp(x * (1e4 if rank() == FAULTY else 0.0))


class Functional(nn.Module):
    """A functional collective in the graph, then a fault."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = summed(x.sin())
        return h, fault(h * (x - 1))


class Early(nn.Module):
    """A fault, then a collective."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = fault(x * x - 1)
        return summed(x.sin()), y


class InPlace(nn.Module):
    """``all_reduce`` of torch.distributed, which TorchDynamo turns into a functional one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        distributed.all_reduce(h)
        return h, fault(h * (x - 1))


class Between(nn.Module):
    """A collective that TorchDynamo leaves to Python."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        distributed.all_reduce(h, async_op=True).wait()
        return h, fault(h * (x - 1))


class Checkpointed(nn.Module):
    """A collective in the body of activation checkpointing."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = checkpoint(lambda x: summed(x.sin()), x, use_reentrant=False)
        return h, fault(h * (x - 1))


class Reduce(torch.autograd.Function):
    """The sum over all ranks; its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        distributed.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        distributed.all_reduce(gradient)
        return gradient


class ReduceGradient(torch.autograd.Function):
    """The argument itself; its gradient is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class InFunction(nn.Module):
    """A collective in the body of an autograd function."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = Reduce.apply(x.sin())
        return h, fault(h * (x - 1))


class InBackward(nn.Module):
    """A collective in the backward alone, as in front of a layer that is split over ranks."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = ReduceGradient.apply(x.sin())
        return h * 2, fault(h * (x - 1))


@torch.library.custom_op("ranks::summed", mutates_args=())
def hidden(x: Tensor) -> Tensor:
    """A collective that no graph shows."""
    y = x.clone()
    distributed.all_reduce(y)
    return y


@hidden.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def hidden_backward(ctx: Any, gradient: Tensor) -> Tensor:
    return hidden(gradient)


hidden.register_autograd(hidden_backward)


class Hidden(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = hidden(x.sin())
        return h, fault(h * (x - 1))


class Parallel(nn.Module):
    """A linear layer and a weight that are split over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        for name, p in list(self.linear.named_parameters()):
            part = DTensor.from_local(p.detach().chunk(2)[rank()], mesh, [Shard(0)])
            self.linear.register_parameter(name, nn.Parameter(part))
        scale = torch.full((2,), 1e30 if rank() == FAULTY else 1.0)
        self.scale = nn.Parameter(DTensor.from_local(scale, mesh, [Shard(0)]))
        self.mesh = mesh

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        h = self.linear(x).softmax(-1)
        return h, torch.exp(h * self.scale * (x - 1).amax())


class ParallelBreak(Parallel):
    """The same with operations that run outside of every graph."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        torch._dynamo.graph_break()
        h = self.linear(x).softmax(-1)
        torch._dynamo.graph_break()
        return h, self.broken(h * (x - 1).amax())

    @torch.compiler.disable
    def broken(self, h: Tensor) -> Tensor:
        return torch.exp(h * self.scale)


class Net(nn.Module):
    """A layer that FSDP2 shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x).softmax(-1)
        return h, fault(h * (x - 1))


def sharded() -> nn.Module:
    return fully_shard(Net())


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(Functional, Early, InPlace, Between, Checkpointed, InFunction, InBackward, Hidden),
        *(Parallel, ParallelBreak),
    )
} | {"Sharded": sharded}

OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "replay": {"replay": True},
    "trace": {"trace_batch_nums": [0, 1]},
    "reproduce": {},
    "underflow": {"underflow": 0.5},
    "together": {"sync_ranks": True},
}


class Backward(nn.Module):
    """A model whose backward makes a gradient infinite on one rank, if its input is 2."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, _ = self.model(x * self.weight)
        part = h.to_local() if isinstance(h, DTensor) else h
        zero = (x - 2).abs().amax() if rank() == FAULTY else torch.ones(())
        return h, (part.square().sum() * zero.detach()).sqrt()


def numbers(tensor: Any) -> list[float]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().flatten().tolist()


def step(model: nn.Module, value: float, way: str) -> list[list[float]]:
    """One step: what the model returned, and its gradients."""
    x = torch.full((4, 4), value)
    model.zero_grad()
    result = model(x)
    found = [numbers(result[0])]
    if way == "backward":
        result[1].backward()
        found += [numbers(p.grad) for p in model.parameters() if p.grad is not None]
    return found


def work(name: str, way: str, folder: Path) -> dict[str, Any]:
    """Three steps, the second of which has the fault, without and with a guard."""
    runs = []
    reports: list[fxguard.types.Report] = []
    coverage = ""
    for is_guarded in (False, True):
        torch._dynamo.reset()
        model = MODELS[name]()
        if way == "backward":
            model = Backward(model)
        if is_guarded:
            options = OPTIONS.get(way, {})
            for key in ("trace_to", "reproduce_to"):
                if key.startswith(way):
                    options = {**options, key: folder / f"{name}-{way}"}
            fxguard.instrument(model, on_detect=reports.append, **options)
        runs.append([step(model, value, way) for value in (1.0, 2.0, 1.0)])
        if is_guarded:
            coverage = fxguard.guard_of(model).coverage()
    distributed.barrier()
    traces = map(fxguard.load_trace, (folder / f"{name}-{way}").glob(f"*-rank{rank()}.jsonl"))
    frames = [frame for trace in traces for batch in trace.batches for frame in batch.frames]
    prints = [row.fingerprint for frame in frames for row in frame.rows]
    return {
        "same": str(runs[0]) == str(runs[1]),
        "messages": [report.message for report in reports],
        "texts": [str(report) for report in reports],
        "causes": [report.origins[0].cause for report in reports],
        "coverage": coverage,
        "notes": sorted({each.note for each in prints if each is not None}),
    }


WAYS = ("trace", "reproduce", "underflow", "together")
CASES = [
    *((name, way) for name in MODELS for way in ("forward", "backward", "replay")),
    *((name, way) for name in ("Functional", "Hidden", "Parallel", "Sharded") for way in WAYS),
]
# Torch does not define this gradient, and warns: TorchDynamo's is another one.
CASES.remove(("InPlace", "backward"))


def main(folder: Path, names: list[str]) -> None:
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
    torch.set_num_threads(1)
    for name, way in CASES:
        if names and f"{name}-{way}" not in names:
            continue
        with contextlib.redirect_stderr(io.StringIO()):
            found = work(name, way, folder)
        (folder / f"{name}-{way}.{rank()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
