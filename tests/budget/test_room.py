"""The memory of the float64 run: files where it is short, one sample where that does not do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.budget import _room
from fxguard.budget._room import LEAST, Room
from fxguard.types import ErrorBudget


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Writes(Layers):
    """Values that autograd would have saved are written afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                y = layer(x).sigmoid()
                square = y * y
                y[:2].mul_(0.5)
            x = (layer(x) * square + y).add_(x)
        return x


class TwoGraphs(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).sigmoid()
        torch._dynamo.graph_break()
        return super().forward(x * x)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the memory that is free."""

    def is_free(size: int) -> None:
        monkeypatch.setattr("fxguard.measure.free_memory.free_bytes", lambda device: size)

    monkeypatch.setattr(_room, "STEP", 1)
    monkeypatch.setattr(_room, "SMALL", 0)
    return is_free


def numbers(budget: ErrorBudget) -> dict[Any, float]:
    """Everything that a budget has measured, by name."""
    of_rows = {(x.name, x.kind, str(x.source)): x.share for x in budget.rows}
    return {**of_rows, **dict(budget.gradients), "explained": budget.explained}


@pytest.mark.parametrize("kind", [Layers, Writes, TwoGraphs])
def test_files_hold_what_memory_would(
    kind: type[Layers], free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Tensor] = []
    in_file = _room._in_file
    monkeypatch.setattr(_room, "_in_file", lambda x: written.append(x) or in_file(x))
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 16)
    free(2**40)
    in_memory = fxguard.error_budget(model, x, gradients=True)
    assert not written
    free(LEAST)
    in_files = fxguard.error_budget(model, x, gradients=True)
    assert len(written) > 12
    # Products of what lies elsewhere in memory may be summed in another order.
    assert numbers(in_files) == pytest.approx(numbers(in_memory), rel=1e-9)


def test_without_room_for_a_batch_its_first_sample_has_to_do(free: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    model, x = Writes(), torch.randn(4, 16)
    free(2**40)
    alone = fxguard.error_budget(model, x[:1])
    asked = iter([0, 0])  # files begin, and do not help
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxguard.measure.free_memory.free_bytes", lambda device: next(asked, 2**40))
        budget = fxguard.error_budget(model, x)
    said = "of the first sample alone: a batch of 4 does not fit into memory in float64"
    assert budget.verdict[-1] == said
    assert budget.error == alone.error
    free(0)
    with pytest.raises(fxguard.FxguardError, match="does not fit into memory"):
        fxguard.error_budget(model, x[:1])
    # Nothing of what was given up is left: autograd saves as it did.
    y = torch.ones(2, requires_grad=True).exp()
    z = y * y
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_value_that_is_written_too_early_has_no_gradient() -> None:
    class TooEarly(Layers):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x).exp()
            z = y * y
            return z + y.mul_(0.5)

    budget = fxguard.error_budget(TooEarly(), torch.randn(2, 16), gradients=True)
    assert 0.9 < budget.explained < 1.1
    assert budget.gradients == ()
    assert budget.notes[0].startswith("no gradients: one of the variables needed")


def test_a_full_disk(free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: Tensor) -> Tensor:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_room, "_in_file", full)
    free(LEAST)
    with pytest.raises(fxguard.FxguardError, match="memory and disk are full"):
        fxguard.error_budget(Layers(), torch.randn(1, 16))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7).t(),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.randn(1, 4).expand(3, 4),
        torch.arange(6) > 2,
    ],
    ids=lambda x: f"{x.dtype} {list(x.shape)}",
)
def test_a_file_holds_a_tensor(
    tensor: Tensor, free: Callable[[int], None], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    room = Room()
    room.in_files = True
    kept, expected = room.keep(tensor), tensor.clone()
    assert torch.equal(kept(), expected)
    assert not list(tmp_path.iterdir())  # it is gone from the folder at once


def test_without_files_nothing_is_copied() -> None:
    x = torch.randn(3)
    assert Room().keep(x)().data_ptr() == x.data_ptr()


def test_a_long_budget_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fxguard.report.late_progress.AFTER", 0.0)
    fxguard.error_budget(Layers(), torch.randn(2, 16))
    said = capsys.readouterr().err
    assert len(re.findall("fxguard: error budget of Layers takes some seconds", said)) == 1
