"""Weights that a learning rate has blown up are named before what overflowed because of them."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxguard
from fxguard.report.load import load_report


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv1d(1, 4, 3), nn.Conv1d(4, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x)).square()


def train(model: nn.Module, rate: float, steps: int, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, **options)
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(2, 1, 8)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_weights_that_blew_up_are_named_first(tmp_path: Any) -> None:
    """With their magnitude now and in batch 0; the rest of the verdict and the message stay."""
    model = Net()
    first = {name: float(p.detach().abs().max()) for name, p in model.named_parameters()}
    fxguard.instrument(model)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        train(model, 1e3, 100)
    report = caught.value.report
    worst = report.grown[0]
    now = dict(model.named_parameters())[worst.name].detach().abs().max()
    assert worst.now == pytest.approx(float(now))
    assert worst.before == pytest.approx(first[worst.name])
    said = f"{worst.name} up to {float(now):.2g}, it was {first[worst.name]:.2g} in batch 0"
    assert report.verdict[0].startswith(said)
    assert str(caught.value).splitlines()[0] == f"batch {report.batch_number}: {report.verdict[0]}"
    assert str(caught.value).splitlines()[1] == f"  fix: {report.fix}"
    assert report.message == f"{str(caught.value).splitlines()[0]}; {report.origins[0].message}"
    assert str(report).startswith(said)
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    assert json.loads(path.read_text())["grown"][0]["name"] == worst.name
    assert load_report(path).grown == report.grown


class Classifier(nn.Module):
    """Its loss is made of logits that grow with the weights; the loss turns NaN later than they."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.layers(x.view(2, 8))
        return nn.functional.cross_entropy(logits, torch.arange(2))


OPTIMIZERS = ({"foreach": False}, {"foreach": True}, {"fused": True}, {"momentum": 0.9})


@pytest.mark.parametrize("options", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("kind", [Net, Classifier])
def test_however_the_optimizer_writes_them(
    kind: type[nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    """The first line of report, exception, log and trace; the learning rate is what to change."""
    model = fxguard.instrument(kind(), trace_to=tmp_path)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        train(model, 1e3, 200, **options)
    report = caught.value.report
    line = report.verdict[0]
    assert line.startswith(f"{report.grown[0].name} up to ")
    where = f"batch {report.batch_number}: {line}"
    for text in (str(caught.value), report.message, report.one_line, report.advice):
        assert text.startswith(where)
    assert "learning rate" in report.fix
    assert report.verdict[1] == f"  fix: {report.fix}"
    assert report.to_dict()["fix"] == report.fix
    assert all(origin.cause in ("overflow", "domain", "unknown") for origin in report.origins)
    trace = fxguard.load_trace(next(tmp_path.glob("*.jsonl")))
    assert trace.verdict[0] == where
    trace.to_html(tmp_path / "trace.html")
    assert html.escape(where) in (tmp_path / "trace.html").read_text()


def test_weights_that_only_learned_are_not_named() -> None:
    """The clean twin: after some steps of training an input overflows."""
    model = fxguard.instrument(Net())
    train(model, 1e-3, 5)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(torch.full((1, 1, 8), 1e30))
    assert not caught.value.report.grown
    assert "it was" not in caught.value.report.verdict[0]


class Counts(TorchDispatchMode):
    """Counts how often the magnitude of a weight is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.norms += "vector_norm" in str(func)
        return func(*args, **(kwargs or {}))


def test_weights_are_looked_at_once_and_not_in_evaluation() -> None:
    """One pass over what is trained, at the end of the first batch of training."""
    model = fxguard.instrument(Net().requires_grad_(True))
    x = torch.randn(2, 1, 8)
    with torch.no_grad():
        model(x)
    with Counts() as counts, torch.no_grad():
        model(x)
    assert counts.norms == 0
    with Counts() as counts:
        model(x)
    assert counts.norms == len(list(model.parameters()))
    with Counts() as counts:
        model(x)
    assert counts.norms == 0
    assert fxguard.guard_of(model).recorder.growth.first is not None
    assert fxguard.guard_of(model).recorder.growth.first[0] == 2
