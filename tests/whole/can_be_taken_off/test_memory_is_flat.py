"""Nothing of a model, or of an evaluation, is left: the same objects after few as after many.

Objects are counted, and not the memory of the process, which depends on much else.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options

X = torch.randn(4, 4)


class Net(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.last(x)


def living() -> Counter[str]:
    """How many objects of each kind are alive that belong to a model or to fxguard."""
    for _ in range(3):  # a finalizer may free what the next collection finds
        gc.collect()
    kinds = (Tensor, nn.Module, GraphModule, Node)
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, FakeTensor):
            continue  # torch 2.13 keeps those of a graph behind a break, without fxguard as well
        if issubclass(kind, kinds) or str(kind.__module__).startswith("fxguard."):
            found[kind.__name__] += 1
    return found


def instrumented() -> None:
    fxguard.instrument(Net())(X).sum().backward()


def watched() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxguard.watch(model):
        model(X).square().mean().backward()
        optimizer.step()


MADE = {"sample": 10, "campaign": 1000}
counts = [MADE["sample"], pytest.param(MADE["campaign"], marks=pytest.mark.campaign)]


@pytest.mark.parametrize("count", counts, ids=list(MADE))
@pytest.mark.parametrize("use", [instrumented, watched])
def test_models_made_and_dropped(use: Callable[[], None], count: int) -> None:
    """Their graphs, their guards and what TorchDynamo keeps of them are gone."""
    for _ in range(2):
        use()
    before = living()
    for _ in range(count):
        use()
    assert not living() - before


def test_models_of_a_script_made_and_dropped() -> None:
    """Also while the guard of the script is there, which keeps the guards of recent models."""
    with OutermostModules(Options(), follow_losses=True) as outermost:
        for _ in range(6):
            Net()(X).square().mean().backward()
            gc.collect()
            assert len(outermost.guards) == 1


EVALUATED = {"sample": 200, "campaign": 5000}
batches = [EVALUATED["sample"], pytest.param(EVALUATED["campaign"], marks=pytest.mark.campaign)]


@pytest.mark.parametrize("count", batches, ids=list(EVALUATED))
def test_evaluation_batches(count: int) -> None:
    """Under watch, without no_grad, with a loss that never has a backward."""
    model = Net()
    with fxguard.watch(model):

        def evaluate(count: int) -> None:
            total = torch.zeros(())
            for _ in range(count):
                total = total + (model(X) - 1).square().mean().detach()

        evaluate(150)  # from here on, what leads nowhere is forgotten from time to time
        before = living()
        evaluate(count)
        grown = living() - before
    assert all(more < 800 for more in grown.values()), grown  # of batches not forgotten yet
    assert not grown["Tensor"]
