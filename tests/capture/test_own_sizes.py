"""A size that another module's weights ask for is not taken for one that changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.capture import backend

Shape = tuple[Any, ...]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes of the first input of each captured graph that is no weight; a symbol is None."""
    found: list[Shape] = []
    leave = backend.leave_try_blocks

    def note(graph_module: Any) -> None:
        leave(graph_module)
        examples = (node.meta.get("example_value") for node in graph_module.graph.nodes)
        tensors = (x for x in examples if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))
        sizes = next(tensors).shape
        found.append(tuple(size if isinstance(size, int) else None for size in sizes))

    monkeypatch.setattr(backend, "leave_try_blocks", note)
    return found


class Layer(nn.Module):
    """A layer, perhaps of weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Its output."""
        output: Tensor = self.inner(x) * 2
        return output


class InTry(nn.Module):
    """Runs each of its layers in a try block, so that each has a graph of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, layers))

    def forward(self, x: Tensor) -> Tensor:
        """From layer to layer."""
        for layer in self.layers:
            try:
                x = layer(x)
            except RuntimeError as error:
                raise ValueError("a layer has failed") from error
        return x


def convolutions() -> InTry:
    """Two, whose weights differ. The second one's input is shorter."""
    return InTry(nn.Conv1d(1, 2, 3), nn.Conv1d(2, 4, 3))


def test_sizes_beside_other_weights_are_no_change(captured: list[Shape]) -> None:
    """Two layers share their function, and each has a graph without symbols."""
    model, x = convolutions(), torch.ones(2, 1, 9)
    expected = model(x)
    guarded = fxguard.instrument(model)
    assert torch.equal(guarded(x), expected)
    assert captured == [(2, 1, 9), (2, 2, 7)]
    assert "checked 4 of 4 operations" in fxguard.guard_of(guarded).coverage()


def test_a_size_that_changes_is_taken_for_one(captured: list[Shape]) -> None:
    """A third batch of another size needs no third capture of either layer."""
    guarded = fxguard.instrument(convolutions())
    for size in (2, 3, 4):
        guarded(torch.ones(size, 1, 9))
    assert captured == [(2, 1, 9), (2, 2, 7), (None, 1, 9), (None, 2, 7)]


def test_modules_of_the_same_weights_share_a_graph_for_all_sizes(captured: list[Shape]) -> None:
    """They are captured twice at most, however many there are: here each pads."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ConstantPad1d((0, 0, 0, 1), 0.0)) for _ in range(5)]
    guarded = fxguard.instrument(InTry(*layers))
    guarded(torch.ones(2, 4))
    assert captured == [(2, 4), (None, 4)]


def test_modules_without_weights_share_one_too(captured: list[Shape]) -> None:
    """Nothing tells them apart."""
    layers = [nn.ConstantPad1d((0, 1), 0.0) for _ in range(5)]
    fxguard.instrument(InTry(*layers))(torch.ones(2, 4))
    assert captured == [(2, 4), (2, None)]


def test_a_capture_that_somebody_asked_for_is_as_torch_makes_it() -> None:
    """Under the user's compiler sizes are remembered by function."""
    seen: list[Any] = []

    def compiler(graph_module: Any, inputs: list[Any]) -> Any:
        seen.extend(x for x in inputs if isinstance(x, torch.SymInt))
        return graph_module

    fxguard.instrument(nn.Linear(2, 2))(torch.ones(1, 2))  # TorchDynamo has been taught
    for layer, shape in zip(convolutions().layers, ((2, 1, 9), (2, 2, 7)), strict=True):
        torch.compile(layer, backend=compiler)(torch.ones(shape))
    assert seen
