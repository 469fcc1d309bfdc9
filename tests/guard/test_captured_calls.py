"""Calls that do what an earlier call did: little is written down, and nothing is lost."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch import active
from fxguard.batch.brief import BriefBatch
from fxguard.capture.captured_only import NotCaptured, captured_only
from fxguard.install._hooks import hook_state, hooked_parts
from fxguard.measure import native

CALLS = 4

HOOK_KINDS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


class Policy(nn.Module):
    """A small model; a table gives it a way to raise at a run of its graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.first(x).exp()
        return self.last(hidden if scale is None else hidden * scale)  # type: ignore[no-any-return]


LOW = torch.linspace(-1, 1, 8).view(2, 4)
HIGH = torch.full((2, 4), 1e4)


def guarded(model: nn.Module, *, is_brief: bool = True, **options: Any) -> nn.Module:
    """A guarded model; for comparison, one whose calls are all written down."""
    fxguard.instrument(model, **options)
    if not is_brief:
        fxguard.guard_of(model).may_be_brief = False  # type: ignore[attr-defined]
    return model


def was_brief(model: nn.Module) -> bool:
    """Whether the last call was not written down."""
    return isinstance(fxguard.guard_of(model)._recorder._last, BriefBatch)


def healthy_loss(output: Tensor) -> Tensor:
    return output.square().mean()


def loss_of_log(output: Tensor) -> Tensor:
    return (output - output.max() - 1).log().mean()


def loss_over_zero(output: Tensor) -> Tensor:
    return output.mean() / 0


def gradient_of_root(output: Tensor) -> Tensor:
    return (output - output.detach()).square().sum().sqrt()


@pytest.mark.parametrize("replay", [False, True])
def test_a_repeated_call_is_brief(replay: bool) -> None:
    """It counts as a batch, returns the same bits, and leaves the thread as it was."""
    plain, model = Policy(), guarded(Policy(), replay=replay)
    for _ in range(CALLS):
        assert torch.equal(model(LOW), plain(LOW))
    assert was_brief(model)
    assert fxguard.guard_of(model).batch_number == CALLS
    assert active.here.call is None is active.here.forward


@pytest.mark.parametrize("inputs", [(LOW,), (LOW, torch.tensor(2.0))])
def test_its_frames_are_those_of_a_batch(inputs: tuple[Tensor, ...]) -> None:
    """The batch is made when somebody asks: of the last call, and of those before a report."""
    models = [guarded(Policy(), is_brief=is_brief) for is_brief in (True, False)]
    for model in models:
        for _ in range(CALLS):
            model(*inputs)
    assert was_brief(models[0])
    assert not was_brief(models[1])
    brief, full = (fxguard.guard_of(model).frames() for model in models)
    assert brief == full
    coverages = [fxguard.guard_of(model).coverage() for model in models]
    assert coverages[0] == coverages[1]


def test_a_bad_call_is_reported_as_ever() -> None:
    """The report is that of a model whose calls are all written down, earlier frames included."""
    reports = []
    for is_brief in True, False:
        model = guarded(Policy(), is_brief=is_brief, on_detect=reports.append)
        for x in (*[LOW] * CALLS, HIGH, LOW):
            model(x)
    brief, full = reports
    assert brief.batch_number == CALLS
    assert repr(brief.origins) == repr(full.origins)  # NaN is not equal to itself
    assert repr(brief.frames) == repr(full.frames)


def test_a_bad_gradient_is_reported_as_ever() -> None:
    """The backward of a brief call runs again for a cause."""
    reports = []
    for is_brief in True, False:
        model = guarded(Policy(), is_brief=is_brief, on_detect=reports.append)
        for factor in (*[1.0] * CALLS, torch.inf):
            (model(LOW) * factor).sum().backward()
        assert was_brief(model) is is_brief
    brief, full = reports
    assert repr(brief.origins) == repr(full.origins)  # NaN is not equal to itself
    assert brief.batch_number == full.batch_number == CALLS


@pytest.mark.parametrize("bad", [loss_of_log, loss_over_zero, gradient_of_root])
def test_a_bad_step_is_reported_as_ever(bad: Callable[[Tensor], Tensor]) -> None:
    """A watched model's call is brief where no loss is followed; its loss and steps are judged."""
    reports: list[fxguard.types.Report] = []
    for is_brief in True, False:
        torch.manual_seed(0)
        model, was = Policy(), []
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with fxguard.watch(model, on_detect=reports.append):
            if not is_brief:
                fxguard.guard_of(model).may_be_brief = False  # type: ignore[attr-defined]
            for loss_of in (*[healthy_loss] * CALLS, bad):
                optimizer.zero_grad()
                output = model(LOW)
                was.append(was_brief(model))
                loss_of(output).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        assert was == [False, False, *[is_brief] * (CALLS - 1)]
    brief, full = reports
    assert repr(brief.origins) == repr(full.origins)  # NaN is not equal to itself
    assert repr(brief.frames) == repr(full.frames)


def test_a_call_that_reads_a_loss_is_written_down() -> None:
    """It may read what the outputs of another call led to: its report says so."""
    model = Policy()
    with fxguard.watch(model):
        for _ in range(CALLS):
            model(LOW).sum().backward()
        output = model(LOW)
        assert was_brief(model)
        model(LOW + output.mean())
        assert not was_brief(model)


def test_a_layer_of_torch_is_brief_too() -> None:
    """Torch puts a function of its own around its layers before it captures them."""
    cell = guarded(nn.LSTMCell(4, 8))
    state: tuple[Tensor, Tensor] | None = None
    for _ in range(CALLS):
        state = cell(LOW, state)
    assert was_brief(cell)


def test_other_structures_and_sizes_are_written_down_once() -> None:
    """What enters is compared: a new argument, a new size, or a view of the other argument."""
    model = guarded(Policy())
    square = torch.ones(8, 8)
    for inputs in ((LOW,), (LOW[:1],), (LOW, square[0]), (square[:, :4], square[0])):
        for _ in range(CALLS):
            model(*inputs)
        shares_memory = inputs[0] is not LOW and len(inputs) == 2
        assert was_brief(model) is not shares_memory, [x.shape for x in inputs]


class Sometimes(nn.Module):
    """Leaves TorchDynamo's graph where its input has more than two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Policy()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(halved(x) if x.shape[0] > 2 else x)  # type: ignore[no-any-return]


@torch.compiler.disable
def halved(x: Tensor) -> Tensor:
    return x / 2


def test_operations_between_graphs_are_seen_after_brief_calls() -> None:
    """A call that is more than one graph is written down, and so are those that follow."""
    reports: list[fxguard.types.Report] = []
    model = guarded(Sometimes(), on_detect=reports.append)
    for _ in range(CALLS):
        model(LOW)
    assert was_brief(model)
    model(torch.cat([LOW, LOW]))
    assert "1 between graphs" in fxguard.guard_of(model).coverage()
    model(torch.cat([LOW, torch.full((2, 4), torch.inf)]))
    assert [report.batch_number for report in reports] == [CALLS + 1]
    model(LOW)
    assert not was_brief(model)


class Picks(nn.Module):
    """Raises in its graph where an index is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 4)

    def forward(self, indices: Tensor) -> Tensor:
        return self.rows(indices).exp()  # type: ignore[no-any-return]


def test_an_exception_is_the_models_own() -> None:
    """It leaves nothing behind, and the next call is brief again."""
    model = guarded(Picks())
    for _ in range(CALLS):
        model(torch.tensor([1, 2]))
    with pytest.raises(IndexError, match="out of range"):
        model(torch.tensor([1, 7]))
    assert active.here.call is None is active.here.forward
    assert fxguard.guard_of(model).batch_number == CALLS + 1
    model(torch.tensor([2, 1]))
    assert was_brief(model)


def test_a_hook_that_comes_later_is_heard() -> None:
    """TorchDynamo reads hooks when it captures: with a new one the model is captured again."""
    model = guarded(Policy())
    for _ in range(CALLS):
        model(LOW)
    calls: list[int] = []
    handle = model.first.register_forward_hook(lambda *_: calls.append(1))
    model(LOW)
    handle.remove()
    model(LOW)
    assert calls == [1]


def test_hooks_in_a_new_dictionary_are_heard() -> None:
    """A script may clear hooks by replacing what holds them."""
    model = guarded(Policy())
    for _ in range(CALLS):
        model(LOW)
    calls: list[int] = []
    model.first._forward_hooks = OrderedDict()
    model.first.register_forward_hook(lambda *_: calls.append(1))
    model(LOW)
    assert calls == [1]


@pytest.mark.parametrize("kind", HOOK_KINDS)
@pytest.mark.parametrize("is_built", [True, False])
def test_every_kind_of_hook_is_noticed(
    kind: str, is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the C extension and without it, on a module and on all of them."""
    if not is_built:
        monkeypatch.setattr(native, "any_filled", None)
    model = Policy()
    references = list(map(weakref.ref, hooked_parts(model)))
    assert hook_state(references, 0) == ()
    handle = getattr(model.last, f"register_{kind}")(lambda *_: None)
    assert hook_state(references, 0) == ((1, (handle.id,)),)
    handle.remove()
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        assert [keys for _, keys in hook_state(references, 0)] == [(handle.id,)]
    finally:
        handle.remove()


def brief_and_full(*calls: Callable[[nn.Module], Any]) -> list[tuple[Any, ...]]:
    """What a brief model and one whose calls are all written down show after some calls."""
    shown = []
    for is_brief in True, False:
        reports: list[fxguard.types.Report] = []
        model = guarded(Policy(), is_brief=is_brief, on_detect=reports.append)
        for call in (*[lambda model: model(LOW)] * CALLS, *calls):
            call(model)
        guard = fxguard.guard_of(model)
        numbers = [(each.batch_number, repr(each.frames), repr(each.origins)) for each in reports]
        shown.append((repr(guard.frames()), str(guard.coverage()), numbers))
    return shown


def with_other_module(model: nn.Module) -> None:
    model.first = nn.Linear(4, 8)
    model(LOW)


def with_other_weight(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.full((8, 4), torch.nan))
    model(LOW)


def without_weights(model: nn.Module) -> None:
    model.requires_grad_(False)
    model(LOW)
    model.requires_grad_(True)
    (model(LOW) * torch.inf).sum().backward()


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        model(LOW)
    (model(LOW) * torch.inf).sum().backward()


def by_keyword(model: nn.Module) -> None:
    for _ in range(CALLS):
        model(x=LOW)
    model(LOW, scale=torch.ones(()))
    model(scale=torch.ones(()), x=LOW)


def in_double(model: nn.Module) -> None:
    model.double()
    model(LOW.double() * 1e308)


CHANGES = [
    *(with_other_module, with_other_weight, without_weights, without_gradients, by_keyword),
    in_double,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_model_is_noticed(change: Callable[[nn.Module], Any]) -> None:
    """Frames, coverage and reports are those of a model whose calls are all written down."""
    torch.manual_seed(0)
    brief, full = brief_and_full(change, lambda model: model(LOW.to(model.last.weight)))
    assert brief == full


def test_weights_in_a_new_place_have_their_gradients_heard() -> None:
    """Also one that has the hooks of nobody, in a form of the model that was called before."""
    reports: list[fxguard.types.Report] = []
    model = guarded(Policy(), on_detect=reports.append)
    for _ in range(CALLS):
        model(LOW).sum().backward()
    model.last.bias = nn.Parameter(torch.zeros(2))
    model.requires_grad_(False)
    model.last.bias.requires_grad_()
    (model(LOW) * torch.inf).sum().backward()
    assert len(reports) == 1


def test_the_line_of_a_call_is_the_users() -> None:
    """However the model is called: by its class, or by the method."""
    model = guarded(Policy())
    for call in (model, model.forward):
        for _ in range(CALLS):
            call(LOW)
        assert was_brief(model)
        file, _ = fxguard.guard_of(model)._recorder._last.caller
        assert file == __file__


def test_a_brief_call_keeps_no_tensor() -> None:
    """Inputs and outputs die when the script lets go of them."""
    model = guarded(Policy())
    for _ in range(CALLS):
        model(LOW)
    x = LOW.clone()
    output = model(x)
    assert was_brief(model)
    kept = weakref.ref(x), weakref.ref(output)
    del x, output
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_a_tool_that_hears_of_all_batches_hears_of_each(tmp_path: Any) -> None:
    """A trace has all batches that were asked for."""
    model = guarded(Policy(), trace_batch_nums=[2, 3], trace_to=tmp_path / "trace.jsonl")
    for _ in range(CALLS):
        model(LOW)
    assert not was_brief(model)


def test_without_code_nothing_runs() -> None:
    """What TorchDynamo has not captured is refused before it begins, and captured by others."""
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    only = captured_only(compiled)
    assert only is not None
    with pytest.raises(NotCaptured):
        only(LOW)
    compiled(LOW)
    assert torch.equal(only(LOW), LOW + 1)
    with pytest.raises(NotCaptured):
        only(LOW.double())
    with torch.compiler.set_stance("force_eager"), pytest.raises(NotCaptured):
        only(LOW)


def test_what_follows_a_break_is_captured_for_each_size() -> None:
    """A call is one graph, but the method has code of its own: it calls a function with a graph."""

    class Breaks(Policy):
        def forward(self, x: Any, scale: Any = None) -> Any:
            torch._dynamo.graph_break()
            return super().forward(x, scale)

    plain, model = Breaks(), guarded(Breaks())
    for size in (2, 2, 2, 3, 3):
        x = LOW[:1].expand(size, 4).contiguous()
        assert torch.equal(model(x), plain(x))
        assert "between" not in str(fxguard.guard_of(model).coverage())
