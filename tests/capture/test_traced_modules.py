"""Modules leave the same marks whether TorchDynamo traces hooks or goes on to forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.capture import traced_modules
from fxguard.options import Options


@dataclass
class Output:
    value: Tensor
    count: int
    nothing: Tensor | None = None


class Part(nn.Module):
    """Takes and returns whatever a module may: by position and by name, in containers, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *more: Any, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        x = self.linear(x) * scale
        return x if mask is None else x + mask


class Nested(nn.Module):
    def forward(self, pair: tuple[Tensor, list[Tensor]], names: dict[str, Tensor]) -> Any:
        first, (second,) = pair
        return {"sum": first + second, "all": (names["x"].exp(), None)}


class Data(nn.Module):
    def forward(self, x: Tensor) -> Output:
        return Output(x.relu(), 3)


class Cache:
    """Holds tensors, and is no container that frames enter."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Keeps(nn.Module):
    def forward(self, found: Output, cache: Cache) -> Cache:
        cache.kept.append(found.value + 1)
        return cache


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.nested, self.data, self.keeps = Part(), Nested(), Data(), Keeps()
        self.shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x, 2, mask=x, scale=0.5) + self.part(x)
        found = self.nested((x, [y]), {"x": x})
        data = self.data(found["sum"])
        z = data.value + found["all"][0] + self.keeps(data, Cache()).kept[0]
        return self.shared(self.shared(z))


def frames_of(model: nn.Module, *inputs: Tensor) -> list[Any]:
    guarded = fxguard.instrument(model)
    guarded(*inputs)
    return [
        (frame.name, frame.kind, frame.is_op, frame.rows)
        for frame in fxguard.guard_of(guarded).frames()
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of modules of which TorchDynamo went on to the forward."""
    found: list[str] = []
    original = traced_modules._call_forward

    def call_forward(module: Any, *rest: Any) -> Any:
        found.append(type(module.value).__name__)
        return original(module, *rest)

    monkeypatch.setattr(traced_modules, "_call_forward", call_forward)
    return found


def test_the_frames_are_those_of_traced_hooks(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of every frame: labels, what is no tensor, numbers."""
    torch.manual_seed(0)
    x, model = torch.rand(2, 4), Whole()
    found = frames_of(model, x)
    assert set(calls) == {"Part", "Linear", "Nested", "Data", "Keeps", "Sequential", "Tanh"}
    fxguard.remove(model)
    torch._dynamo.reset()
    calls.clear()
    monkeypatch.setattr(traced_modules, "_has_plain_call", lambda *_: False)
    assert frames_of(model, x) == found
    assert not calls
    assert [name for name, _, is_op, _ in found if not is_op].count("shared") == 2
    rows = next(rows for name, _, _, rows in found if name == "keeps")
    labels = [(row.label, row.note) for row in rows]
    assert ("input[0][count]", "not a tensor") in labels
    assert labels[-2:] == [("input[1]", "not a tensor"), ("output", "not a tensor")]


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def by_hook_of_its_own(model: Whole) -> Iterator[None]:
    handle = model.shared.register_forward_hook(doubled)
    yield
    handle.remove()


def by_hook_on_all(model: Whole) -> Iterator[None]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.Tanh) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    yield
    handle.remove()


def by_forward_of_its_own(model: Whole) -> Iterator[None]:
    original = model.shared.forward
    model.shared.forward = lambda x: original(x) * 2  # type: ignore[method-assign]
    yield


class Doubled(nn.Sequential):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


def by_call_of_its_class(model: Whole) -> Iterator[None]:
    model.shared.__class__ = Doubled
    yield


@pytest.mark.parametrize(
    "change", [by_hook_of_its_own, by_hook_on_all, by_forward_of_its_own, by_call_of_its_class]
)
def test_what_stands_around_a_forward_runs(change: Callable[[Whole], Iterator[None]]) -> None:
    """A module with anything but fxguard's hooks around its forward is called as in Python."""
    torch.manual_seed(0)
    x, model = torch.rand(2, 4), Whole()
    plain = model(x)
    changing = change(model)
    next(changing)
    expected = model(x)
    assert not torch.equal(expected, plain)
    guarded = fxguard.instrument(model)
    torch.testing.assert_close(guarded(x), expected, rtol=0, atol=0)
    names = [f.name for f in fxguard.guard_of(guarded).frames() if not f.is_op]
    assert names.count("shared") == 2
    for _ in changing:
        pass


class AddsHook(nn.Module):
    """Gives a part of itself a hook while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        handle = self.part.register_forward_hook(doubled)
        x = self.part(x)
        handle.remove()
        return x + self.part(x)


def test_a_hook_that_a_forward_adds_runs() -> None:
    """TorchDynamo knows of it before Python does."""
    x = torch.rand(2, 4)
    expected = AddsHook()(x)
    torch.testing.assert_close(fxguard.instrument(AddsHook())(x), expected, rtol=0, atol=0)


def test_a_module_without_weights_yet_is_captured() -> None:
    """TorchDynamo makes them first, and takes away the hook that was to do so."""
    model = fxguard.instrument(nn.Sequential(nn.LazyLinear(3), nn.ReLU()))
    model(torch.rand(2, 4))
    assert fxguard.guard_of(model).coverage() == "checked 2 of 2 operations in 1 graph"


def test_modules_of_a_script_are_passed_through(calls: list[str]) -> None:
    """What stands in for ``Module.__call__`` there is passed through."""
    with OutermostModules(Options()):
        Whole()(torch.rand(2, 4))
    assert calls.count("Sequential") == 2
    assert calls.count("Linear") == 4


def test_without_a_guard_nothing_is_changed(calls: list[str]) -> None:
    """Whoever compiles a model that is not guarded has TorchDynamo as it is."""
    frames_of(nn.Sequential(nn.Tanh()), torch.rand(2))
    assert calls == ["Tanh"]
    counted = torch.compile(Whole(), backend="eager", fullgraph=True)
    counted(torch.rand(2, 4))
    assert calls == ["Tanh"]
    assert UnspecializedNNModuleVariable.call_function.__module__ == traced_modules.__name__
