"""Two models on the same inputs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard import compare
from support import zoo


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.linear(x)).square())


X = torch.linspace(-1, 1, 32).view(4, 8)


def test_the_same_model() -> None:
    """Dropout draws the same numbers in both, and nothing is left behind."""
    model = Net().train()
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    keys = set(model.__dict__)
    found = compare(model, copy.deepcopy(model), X, tolerance=0)
    assert found.first is None
    assert all(match.compared for match in found.batches[0].aligned)
    assert set(model.__dict__) == keys
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert compare(model, model, X, tolerance=0).first is None


def test_float32_and_float16() -> None:
    """Floating-point inputs are converted, integers are not."""
    model = Net().eval()
    assert compare(model, copy.deepcopy(model).half(), X).agrees
    with torch.no_grad():
        model.linear.weight.mul_(3e3)
    found = compare(model, copy.deepcopy(model).half(), X)
    assert found.first is not None
    assert (found.first.title, found.first.kind) == ("square", "square")
    assert found.first.reason.startswith("overflow in B: needs ")
    assert found.first.reason.endswith("float16 holds 65504")
    assert found.first.own is not None
    assert found.first.own.absolute == found.first.own.relative == float("inf")
    assert found.first.nearer == "A"
    assert found.ranges.first is not None
    assert (found.ranges.first.frame.kind, found.ranges.first.distance) == ("square", float("inf"))
    assert (found.a, found.b) == ("Net, float32", "Net, float16")
    entry = zoo.ZOO["bert"]
    bert = entry.model().eval()
    args, kwargs = entry.inputs(torch.float32, False)
    assert compare(bert, copy.deepcopy(bert).half(), *args, **kwargs).agrees


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_eager_and_compiled(backend: str) -> None:
    """Of one and the same model."""
    model = Net().eval()
    found = compare(model, torch.compile(model, backend=backend), X)
    assert not found.differs
    assert (found.a, found.b) == ("Net, float32", "Net, float32, compiled")
    assert len(found.batches[0].aligned) == len(found.batches[0].matches) > 3
    other = torch.compile(copy.deepcopy(model), backend=backend)
    with torch.no_grad():
        other.linear.bias += 1
    found = compare(model, other, X)
    assert found.first is not None
    assert found.first.title == "linear linear"
    assert found.first.weights == ("linear.bias: 8 of 8 elements differ",)


def test_inputs_are_not_written() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) + 1

    x = torch.ones(3)
    assert compare(InPlace(), InPlace(), x, tolerance=0).agrees
    assert torch.equal(x, torch.ones(3))


def test_a_forward_that_raises() -> None:
    """For a bad value: what ran before is compared. For anything else: the error is the user's."""

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(x.log() + torch.eye(2))

    class Good(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(x.abs() + torch.eye(2))

    found = compare(Raises(), Good(), -torch.eye(2))
    assert not found.agrees
    assert str(found).splitlines()[3] == "nothing could be compared by elements"
    assert found.batches[0].a.verdict[0].startswith("log made")
    assert compare(Good(), Good(), torch.eye(2)).first is None
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        compare(Good(), Good(), torch.ones(3))


def test_an_instrumented_model() -> None:
    """Is refused with what to do, and left as it is."""
    model = fxguard.instrument(Net())
    with pytest.raises(fxguard.FxguardError, match=r"instrumented already; call fxguard\.remove"):
        compare(Net(), model, X)
    fxguard.guard_of(model)


def test_what_is_no_model() -> None:
    """A function, for one, is refused by its type."""
    with pytest.raises(
        fxguard.FxguardError, match=r"two torch\.nn\.Modules, or folders, got function"
    ):
        compare(Net(), lambda x: x, X)


def test_nothing_is_printed_or_warned(capsys: pytest.CaptureFixture[str]) -> None:
    """Infinities are what the comparison is about."""
    model = Net().eval()
    with torch.no_grad():
        model.linear.weight.fill_(float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compare(model, Net().eval(), X).differs
    assert capsys.readouterr().out == ""
