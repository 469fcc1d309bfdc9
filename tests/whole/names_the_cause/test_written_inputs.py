"""A buffer or an argument that one graph writes and a later operation reads: who made it bad.

Each model writes in its own way, and then reads what it wrote, mostly on the other side of a graph
break. The operation that made the infinity is named, not the tensor that was found to hold it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard


class Keeps(nn.Module):
    """Has a buffer of four elements."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))

    def read(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.kept * 2 + x


class Whole(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.add_(torch.exp(x))
        return self.read(x)


class InParts(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[:2].copy_(torch.exp(x[:2]))
        self.kept[2:].fill_(1.0)
        return self.read(x)


class OneElement(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[0] = torch.exp(x)[0]
        return self.read(x)


class InOneGraph(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[:2].copy_(torch.exp(x[:2]))
        return self.kept * 2 + x


class WrittenInPython(Keeps):
    @torch._dynamo.disable
    def write(self, x: Tensor) -> None:
        self.kept.copy_(torch.exp(x))

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.kept * 2 + x


class ReadInPython(Keeps):
    @torch._dynamo.disable
    def read(self, x: Tensor) -> Tensor:
        return self.kept * 2 + x

    def forward(self, x: Tensor) -> Tensor:
        self.kept.copy_(torch.exp(x))
        return self.read(x)


class Argument(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(x).exp_()
        torch._dynamo.graph_break()
        return x * 2


class PartOfArgument(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        x[:2].exp_()
        torch._dynamo.graph_break()
        return x * 2


MODELS = [
    Whole,
    InParts,
    OneElement,
    InOneGraph,
    WrittenInPython,
    ReadInPython,
    Argument,
    PartOfArgument,
]
HEALTHY = torch.tensor([0.5, 1.0, 0.25, 2.0])
LARGE = torch.tensor([100.0, 1.0, 1.0, 1.0])


def run(make: Any, compiler: str | None, **options: Any) -> fxguard.types.Report:
    """Two healthy batches, compared with the plain model's, and one that overflows."""
    torch._dynamo.reset()
    plain = make()
    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(copy.deepcopy(plain), on_detect=reports.append, **options)
    called = guarded if compiler is None else torch.compile(guarded, backend=compiler)
    for x in (HEALTHY, HEALTHY / 2, LARGE):
        with torch.no_grad():
            assert torch.equal(called(x.clone()), plain(x.clone()))
        assert torch.equal(guarded.kept, plain.kept)
        assert len(reports) == (x is LARGE)
    return reports[0]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_operation_is_blamed(make: Any, compiler: str | None, replay: bool) -> None:
    report = run(make, compiler, replay=replay)
    assert [origin.what.rstrip("_") for origin in report.origins] == ["exp"]


class OnePart(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[:2].copy_(torch.exp(x[:2]))
        return self.read(x)


@pytest.mark.parametrize("replay", [False, True])
def test_what_was_bad_before_is_blamed_itself(replay: bool) -> None:
    """The clean twin, also where ``replay`` runs a graph again on what it wrote."""
    torch._dynamo.reset()
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(OnePart(), on_detect=reports.append, replay=replay)
    model(HEALTHY)
    model.kept[3] = torch.inf
    model(HEALTHY)
    assert [[origin.what for origin in report.origins] for report in reports] == [["buffer kept"]]
