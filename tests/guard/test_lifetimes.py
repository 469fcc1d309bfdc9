"""How long models live: as long as somebody other than fxguard holds them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as entries_of

import fxguard
import fxguard.testing
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options

X = torch.randn(2, 4)


class Net(nn.Module):
    """Graphs of its forward, and of a function that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = between(self.first(x).relu())
        return self.last(x).sum()


def between(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin() * 2


def flat() -> nn.Module:
    """Its forward is one of torch.nn."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Garbage in cycles stays: what is gone then, was gone at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def instrumented(model: nn.Module) -> None:
    fxguard.instrument(model)(X)
    fxguard.remove(model)


def trained(model: nn.Module) -> None:
    fxguard.instrument(model)(X).sum().backward()
    fxguard.remove(model)


def watched(model: nn.Module) -> None:
    with fxguard.watch(model):
        model(X).square().sum().backward()


def kept_in_float32(model: nn.Module) -> None:
    fxguard.keep_float32(model, ["*:relu"])(X)
    fxguard.remove(model)


def compiled(model: nn.Module) -> None:
    torch.compile(fxguard.instrument(model), backend="aot_eager")(X)
    fxguard.remove(model)


def compared(model: nn.Module) -> None:
    assert fxguard.compare(model, model, X).agrees


def forecast(model: nn.Module) -> None:
    assert fxguard.forecast(model, X, dtype=torch.bfloat16)


def in_a_script(model: nn.Module) -> None:
    with OutermostModules(Options(), follow_losses=True):
        model(X).sum().backward()


def asserted(model: nn.Module) -> None:
    fxguard.testing.assert_finite(model, X)


def plain(model: nn.Module) -> None:
    """The oracle: PyTorch alone."""
    torch.compile(model, backend="eager")(X).sum().backward()


USES = [plain, instrumented, trained, watched, kept_in_float32, compiled, compared, forecast]
USES += [in_a_script, asserted]


@pytest.mark.parametrize("make", [Net, flat])
@pytest.mark.parametrize("use", USES)
def test_a_model_is_freed_when_its_user_lets_go(
    use: Callable[[nn.Module], None], make: Callable[[], nn.Module], no_collector: None
) -> None:
    """At once, as without fxguard; and not before."""
    model = make()
    known = weakref.ref(model)
    use(model)
    assert known() is model
    del model
    assert known() is None


@pytest.mark.parametrize("use", [fxguard.instrument, lambda m: fxguard.keep_float32(m, ["*:relu"])])
def test_a_model_that_is_still_guarded_is_freed(use: Callable[[nn.Module], nn.Module]) -> None:
    """It refers to itself, so it takes the garbage collector."""
    model = Net()
    known = weakref.ref(model)
    use(model)(X)
    del model
    gc.collect()
    assert known() is None


def with_guard(model: nn.Module) -> Any:
    fxguard.instrument(model)(X)
    return fxguard.guard_of(model)


def with_report(model: nn.Module) -> Any:
    reports: list[Any] = []
    fxguard.instrument(model, on_detect=reports.append)(X * torch.inf)
    return reports[0], str(reports[0])


def with_output(model: nn.Module) -> Any:
    return fxguard.instrument(model)(X)


def with_loss(model: nn.Module) -> Any:
    with fxguard.watch(model) as guard:
        return guard, model(X).square().sum()


def with_detection(model: nn.Module) -> Any:
    fxguard.instrument(model)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(X * torch.inf)
    return caught.value.with_traceback(None), caught.value.report


KEPT = [with_guard, with_report, with_output, with_loss, with_detection]


@pytest.mark.parametrize("use", KEPT)
def test_what_came_of_a_model_does_not_keep_it(use: Callable[[nn.Module], Any]) -> None:
    """Guards, reports, outputs and losses; they stay usable."""
    model = Net()
    known = weakref.ref(model)
    kept = use(model)
    del model
    gc.collect()
    assert known() is None
    if use is with_guard:
        assert kept.frames()
        assert kept.coverage().startswith("checked 6 of 6")
        assert "Net" in repr(kept)
        with pytest.raises(fxguard.FxguardError, match="gone"):
            assert kept.model
    if use is with_loss:
        kept[1].backward()
        assert kept[0].last_report is None


def test_a_model_that_holds_its_own_output_is_freed() -> None:
    """Its autograd graph refers to hooks of fxguard, which must not refer to the model."""
    model: Any = Net()
    known = weakref.ref(model)
    model.seen = fxguard.instrument(model)(X)
    del model
    gc.collect()
    assert known() is None


def test_nothing_of_its_graphs_stays_in_the_cache() -> None:
    """Neither entries, which are searched at each call, nor counts of compilations."""
    torch._dynamo.reset()
    of_others = torch.compile(between, backend="eager")
    for _ in range(3):
        trained(Net())
    assert not entries_of(Net.forward.__code__)
    assert not entries_of(between.__code__)
    of_others(X)
    trained(Net())
    assert any(entry.code is not None for entry in entries_of(between.__code__))  # its own


def test_many_models_of_a_class_are_all_checked() -> None:
    """Whatever TorchDynamo's limit for all models together is."""
    limit = "accumulated_recompile_limit"
    models = [Net() for _ in range(4)]
    with torch._dynamo.config.patch({limit: 2}):
        for model in models:
            fxguard.instrument(model)(X)
    said = {fxguard.guard_of(model).coverage() for model in models}
    assert len(said) == 1
    assert said.pop().startswith("checked 6 of 6 operations in 3 graphs")


def test_a_model_comes_in_place_of_one_that_is_gone() -> None:
    """A script's models are known by identity, which a later model may have again."""
    with OutermostModules(Options()) as outermost:
        for _ in range(5):
            Net()(X)
        model = Net()
        model(X)
        assert [guard.model for guard in outermost.guards if guard.reference()] == [model]
        assert sum(guard.batch_number for guard in outermost.guards) == 1
