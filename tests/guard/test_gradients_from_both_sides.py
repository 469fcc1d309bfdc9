"""An output that another output is made of gets gradients from inside and outside of its graph.

Each number in a frame of the backward is that of the step that ran, and each operation has one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch.kept_run import KeptRun
from fxguard.batch.samples import is_sample_of, sample_of
from fxguard.records import Frame


class Both(nn.Module):
    """Returns a loss and what it was made of, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def made(self, x: Tensor) -> Tensor:
        return self.a(x).exp()

    def used(self, z: Tensor) -> Tensor:
        return self.b(z).tanh()  # type: ignore[no-any-return]

    def loss(self, used: Tensor, z: Tensor) -> Tensor:
        return (used * z).square().sum()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.made(x)
        return self.loss(self.used(z), z), z


class Broken(Both):
    """Three graphs; each hands on what it was given."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.made(x)
        torch._dynamo.graph_break()
        used = self.used(z)
        torch._dynamo.graph_break()
        return self.loss(used, z), z


class Between(Both):
    """Nothing is captured."""

    @torch._dynamo.disable
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x)


class GraphBetween(Both):
    """Python, a graph, and Python again, which reads what the first part made."""

    @torch._dynamo.disable
    def made(self, x: Tensor) -> Tensor:
        return super().made(x)

    @torch._dynamo.disable
    def loss(self, used: Tensor, z: Tensor) -> Tensor:
        return super().loss(used, z)


def of_loss(loss: Tensor, z: Tensor) -> Tensor:
    return loss


def of_both(loss: Tensor, z: Tensor) -> Tensor:
    return loss + z.sin().mean()


def of_one(loss: Tensor, z: Tensor) -> Tensor:
    return z.sin().mean()


def shown(frame: Frame, label: str) -> float | None:
    return next((row.abs_max for row in frame.rows if row.label == label), None)


@pytest.mark.parametrize("what", [of_loss, of_both, of_one])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("kind", [Both, Broken, Between, GraphBetween])
def test_numbers_are_those_of_the_step(
    kind: type[Both], backend: str | None, what: type, tmp_path: Path
) -> None:
    model, x = kind(), torch.linspace(-1, 1, 8).view(2, 4)
    run = torch.compile(model, backend=backend) if backend else model
    with fxguard.watch(model, trace_to=tmp_path, trace_batch_nums=[0]):
        what(*run(x)).backward()
    (path,) = tmp_path.iterdir()
    frames = [f for f in fxguard.load_trace(path).batches[0].frames if f.phase == "backward"]

    plain = Both()
    loss, z = plain(x)
    z.retain_grad()
    what(loss, z).backward()
    assert z.grad is not None
    (exp,) = (frame for frame in frames if frame.kind == "exp")
    assert shown(exp, "grad of output") == pytest.approx(float(z.grad.abs().max()), rel=1e-5)
    for name in ("a", "b") if what is not of_one else ("a",):
        (linear,) = (frame for frame in frames if frame.name == name)
        for weight in ("weight", "bias"):
            gradient = getattr(plain, name).get_parameter(weight).grad
            found = shown(linear, f"grad of {weight}")
            assert found == pytest.approx(float(gradient.abs().max()), rel=1e-5)
    assert max(Counter(frame.title for frame in frames).values()) == 1
    order = [frame.kind for frame in frames]
    assert order[-2:] == ["exp", "linear"]


class Large(nn.Module):
    """Its second output is large; what that is made of has an infinite gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x)
        z = (y * 0).square().sum(-1, keepdim=True).sqrt() + y
        return z.sin().sum(), z


def test_a_large_gradient_from_inside_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of it tells whether the second run made the same."""
    kept: list[tuple[set[int], set[int]]] = []
    let_go = KeptRun.let_go

    def noted(self: KeptRun) -> None:
        kept.append((set(self.incoming), set(self.samples)))
        let_go(self)

    monkeypatch.setattr(KeptRun, "let_go", noted)
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Large(), on_detect=found.append)
    loss, z = model(torch.ones(256, 256))
    loss.backward(retain_graph=True)
    z.sum().backward()  # and alone
    assert kept == [({0}, {1}), ({1}, set())]
    (report,) = found  # of a batch there is one
    assert report.message.startswith("batch 0: backward of sqrt made inf (test_gradients_from")


def test_a_large_output_with_gradients_from_both_sides() -> None:
    """What came from outside is not known then, and nobody is accused."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Large(), on_detect=found.append)
    loss, z = model(torch.ones(256, 256))
    (loss + z.cos().sum()).backward()
    (report,) = found
    assert report.message.startswith("batch 0: gradient of weight a.bias and of 1 more is NaN")
    assert "an output got gradients from inside and from outside of its graph" in report.summary


@pytest.mark.parametrize("shape", [(3,), (1, 70), (2, 3, 5)])
def test_samples(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape)
    sample = sample_of(gradient)
    assert is_sample_of(sample, gradient)
    assert is_sample_of(sample, gradient * (1 + 1e-5))
    assert not is_sample_of(sample, gradient * 1.1 + 1)
    gradient.view(-1)[0] = torch.nan
    assert not is_sample_of(sample, gradient)
    assert is_sample_of(sample_of(gradient), gradient)
    for bad in (torch.nan, torch.inf, -torch.inf):  # it tells nothing of how large the others are
        gradient.view(-1)[0] = bad
        assert not is_sample_of(sample_of(gradient * 1e-6), gradient * 2e-6)
