"""``full_every=N``: each N-th batch is measured in full, and of the others what leaves graphs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.options import Options
from support.threads import in_threads

X = torch.linspace(-1, 1, 12).view(3, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2))


class Absorbs(nn.Module):
    """A NaN that ``where`` discards reaches no output."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.log(x), x)


class Cut(nn.Module):
    """Two graphs, and the same between them."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(x > 0, torch.log(x), x) * 2
        torch._dynamo.graph_break()
        return torch.where(x > 0, torch.sqrt(x), x)


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self, inner: Callable[..., Any] | None = None) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.inner = inner

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward if self.inner is None else self.inner(graph, examples)


def is_full(model: Any) -> bool:
    """Whether the last batch was measured in full."""
    batch = fxguard.guard_of(model).recorder.last_batch  # type: ignore[attr-defined]
    return not batch.postponed


# Which batches.


@pytest.mark.parametrize(
    ("options", "full"),
    [
        ({"full_every": 3}, [2, 5, 8]),
        ({"full_every": 1}, [*range(10)]),
        ({"full_every": 4, "trace_batch_nums": [0, 7]}, [0, 3, 7]),
        ({"full_every": 100}, []),
        ({"replay": True, "trace_batch_nums": [1]}, [1]),
        ({}, [*range(10)]),
    ],
)
def test_the_last_batch_of_each_n_is_full(options: dict[str, Any], full: list[int]) -> None:
    """The first one is not, unless it is traced: it would wait for two compilations."""
    chosen = Options(**options)
    assert [number for number in range(10) if chosen.is_full(number)] == full


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True])
def test_the_number_of_batches_is_a_number(value: Any) -> None:
    """The message has the value."""
    with pytest.raises(fxguard.FxguardError, match=f"full_every has to be .* got {value!r}"):
        fxguard.instrument(net(), full_every=value)


def test_replay_is_something_else() -> None:
    """Two answers to one question."""
    with pytest.raises(fxguard.FxguardError, match="replay=True is for no full batch"):
        fxguard.instrument(net(), full_every=2, replay=True)


# Compilations.


def test_the_graph_with_checks_is_compiled_when_it_is_needed() -> None:
    """The first call compiles the plain graph, the first full batch the other one, once."""
    backend, counts = Counting(), []
    model = torch.compile(fxguard.instrument(net(), full_every=3), backend=backend)
    for _ in range(7):
        model(X)
        counts.append(len(backend.graphs))
    assert counts == [1, 1, 2, 2, 2, 2, 2]
    plain, checked = (len(graph.graph.nodes) for graph in backend.graphs)
    torch._dynamo.reset()
    unguarded = Counting()
    torch.compile(net(), backend=unguarded)(X)
    assert plain == len(unguarded.graphs[0].graph.nodes)
    assert checked > plain


def test_threads_compile_it_once() -> None:
    """Each thread runs a full batch; one of them compiles."""
    backend = Counting()
    model = torch.compile(fxguard.instrument(net(), full_every=2), backend=backend)
    model(X)
    found = in_threads(lambda _: [model(X).shape for _ in range(4)], count=3)
    assert all(isinstance(each, list) for each in found), found
    assert len(backend.graphs) == 2


def test_sizes_that_change_are_compiled_in_both_forms_at_once() -> None:
    """TorchDynamo asks for guards while it captures, and no later. No batch is captured again."""
    backend, plain = Counting(), Counting()
    model = net().eval()
    guarded = fxguard.instrument(copy.deepcopy(model), full_every=3)
    one, other = torch.compile(model, backend=plain), torch.compile(guarded, backend=backend)
    fulls = []
    for rows in range(3, 10):
        x = torch.randn(rows, 4)
        assert torch.equal(one(x), other(x))
        fulls.append(is_full(guarded))
    assert fulls == [False, False, True, False, False, True, False]
    assert len(plain.graphs) == 2  # one size, and any
    assert len(backend.graphs) == 3  # the latter with checks as well


def test_compiling_in_the_middle_draws_no_random_numbers() -> None:
    """A compiler may draw some to try its kernels; dropout must not see it."""

    def draws(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        torch.rand(3)
        return graph.forward

    states = []
    for options in (None, {"full_every": 2}):
        torch._dynamo.reset()
        model = net() if options is None else fxguard.instrument(net(), **options)
        compiled = torch.compile(model, backend=Counting(draws))
        torch.manual_seed(1)
        states.append([*(compiled(X) for _ in range(4)), torch.get_rng_state()])
    assert all(map(torch.equal, *states))


def test_a_graph_that_cannot_be_compiled_with_checks_runs_again() -> None:
    """The model lives, and the full batch is measured by a second run, in Python."""
    failed = []

    def once(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        if len(backend.graphs) > 1:
            failed.append(graph)
            raise RuntimeError("planted")
        return graph.forward

    backend = Counting(once)
    model = fxguard.instrument(Absorbs(), full_every=2)
    compiled = torch.compile(model, backend=backend)
    for _ in range(4):
        assert torch.equal(compiled(X), Absorbs()(X))
    assert len(failed) > 0
    guard = fxguard.guard_of(model)
    assert [note.what for note in guard.notes] == ["log"]
    assert "in 2 of 4 batches (full_every=2)" in guard.coverage()


# The same bits.


def trained(model: nn.Module, backend: str, batches: int) -> list[Tensor]:
    """Outputs, gradients and random state of some steps."""
    torch._dynamo.reset()
    found: list[Tensor] = []
    called = model if backend == "" else torch.compile(model, backend=backend)
    torch.manual_seed(1)
    for _ in range(batches):
        output = called(X)
        output.square().sum().backward()
        found += [output.detach(), torch.get_rng_state()]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
def test_both_forms_compute_what_the_plain_model_does(backend: str) -> None:
    """Outputs, gradients and random state, with dropout, through plain and full batches."""
    guarded = fxguard.instrument(net(), full_every=2)
    plain, found = trained(net(), backend, 4), trained(guarded, backend, 4)
    for one, other in zip(plain, found, strict=True):
        if backend == "inductor" and one.is_floating_point():
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)
    assert is_full(guarded)
    assert fxguard.guard_of(guarded).frames()


class Attention(nn.Module):
    """A block whose two forms save different tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.read, self.write = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.read(self.norm(x)).chunk(3, -1)
        attended = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + self.mlp(self.norm(x + self.write(attended)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around_the_model_saves_the_same_twice(
    backend: str, use_reentrant: bool
) -> None:
    """With several forwards before a backward, some in full batches."""
    states = []
    for options in (None, {"full_every": 3}):
        torch._dynamo.reset()
        model: Any = Attention()
        if options is not None:
            fxguard.instrument(model, **options)
        called = torch.compile(model, backend=backend)
        torch.manual_seed(1)
        for _ in range(2):
            given = [(X * scale).requires_grad_() for scale in range(1, 5)]
            sum(checkpoint(called, x, use_reentrant=use_reentrant).sum() for x in given).backward()
        states.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *states))
    assert "in 2 of 8 batches" in fxguard.guard_of(model).coverage()


# What is found.


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_a_bad_batch_has_the_report_of_the_full_mode(backend: str) -> None:
    """In a full batch and between full ones: in every word."""
    texts: list[list[str]] = []
    for options in ({}, {"full_every": 2}):
        torch._dynamo.reset()
        reports: list[fxguard.types.Report] = []
        model = fxguard.instrument(net(), on_detect=reports.append, **options)
        called: Any = torch.compile(model, backend=backend) if backend else model
        for scale in (1, 1, 1e38, 1e38):
            called(X * scale * 1e3 if scale > 1 else X)
        assert [report.batch_number for report in reports] == [2, 3]
        texts.append(["\n".join(report.verdict) for report in reports])
    assert texts[0] == texts[1]


def test_what_a_graph_absorbs_is_noted_in_full_batches() -> None:
    """In the others nobody looks there, and coverage says so."""
    model = fxguard.instrument(Absorbs(), full_every=3)
    guard = fxguard.guard_of(model)
    for notes in ([], [], ["log"], ["log"]):
        model(X)
        assert [note.what for note in guard.notes] == notes
    model = fxguard.instrument(Absorbs(), full_every=3, strict=True)
    model(X), model(X)
    with pytest.raises(fxguard.NonFiniteError):
        model(X)


def test_coverage_says_what_is_looked_at_when() -> None:
    """The counts of batches, and the graphs that no full batch had."""
    model = fxguard.instrument(net(), full_every=3)
    guard = fxguard.guard_of(model)
    line = (
        "checked 4 of 4 operations in 1 graph, in {} of {} batches (full_every=3); in the others "
        "when what leaves them has turned bad, and what they absorb there is not judged"
    )
    model(X), model(X)
    assert guard.coverage() == line.format(0, 2) + "; 1 graph was in no full batch yet"
    model(X), model(X)
    assert guard.coverage() == line.format(1, 4)
    model.eval()(X)
    assert guard.coverage().endswith("; 1 graph was in no full batch yet")
    model(X)
    assert "in 2 of 6 batches" in guard.coverage()
    assert "no full batch" not in guard.coverage()
    assert str(guard.selftest()).startswith("found 10 of 10 planted NaN in 2 graphs")


def test_all_graphs_of_a_batch_run_in_one_form() -> None:
    """A graph break does not begin another batch."""
    model = fxguard.instrument(Cut(), full_every=2)
    for number in range(4):
        model(X)
        batch = fxguard.guard_of(model).recorder.last_batch  # type: ignore[attr-defined]
        assert len(batch.runs) == 2
        assert len(batch.postponed) == (0 if number % 2 else 2)


def test_frames_are_those_of_a_full_batch() -> None:
    """There are none of the others, and a report does not mix frames of batches far apart."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(net(), full_every=2, on_detect=reports.append)
    model(X), model(X)
    assert fxguard.guard_of(model).frames()
    model(X)
    with pytest.raises(fxguard.FxguardError, match="of batch 2 only what left its graphs"):
        fxguard.guard_of(model).frames()
    model(X), model(X), model(X * torch.inf)
    assert {frame.batch_number for frame in reports[0].frames} == {5}
    model(X), model(X), model(X * torch.inf)
    assert {frame.batch_number for frame in reports[1].frames} == {7, 8}


def test_a_traced_batch_is_a_full_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The trace is that of the full mode."""
    texts = []
    for options in ({}, {"full_every": 3}):
        torch._dynamo.reset()
        model = fxguard.instrument(net(), trace_batch_nums=[0, 2], **options)
        torch.manual_seed(1)
        for _ in range(3):
            model(X)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "Starting batch number=2" in texts[1]


def test_underflow_is_looked_for_as_ever() -> None:
    """In batch 0, which is no full one."""

    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x + 1

    model = fxguard.instrument(Squares(), underflow=0.5, full_every=5)
    with pytest.raises(fxguard.NonFiniteError) as found:
        model(torch.full((4,), 1e-4, dtype=torch.float16))
    assert found.value.report.origins[0].problem == "underflow"


def test_a_bad_gradient_is_explained_in_any_batch() -> None:
    """The backward runs again, whichever form ran."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(self.weight * x).sum()

    for bad in range(2):
        torch._dynamo.reset()
        model = fxguard.instrument(Root(), full_every=2)
        for number in range(bad + 1):
            output = model(X.abs() * (0 if number == bad else 1) + (number != bad))
            if number == bad:
                with pytest.raises(fxguard.NonFiniteError) as found:
                    output.backward()
                assert found.value.report.origins[0].what == "sqrt"
                assert found.value.report.batch_number == bad
            else:
                output.backward()


# In company.


def test_a_function_around_the_model_chooses_too() -> None:
    """With ``fullgraph=True`` one graph holds the model and what is around it."""
    backend = Counting()
    model = fxguard.instrument(Absorbs(), full_every=3)
    around = torch.compile(lambda x: model(x) + 1, backend=backend, fullgraph=True)
    counts = []
    for _ in range(4):
        around(X)
        counts.append((len(backend.graphs), len(fxguard.guard_of(model).notes)))
    assert counts == [(1, 0), (1, 0), (2, 1), (2, 1)]


def test_a_backend_chooses_too() -> None:
    """Its batches are counted by its first graph, and coverage counts them once."""
    backend = fxguard.backend("eager", full_every=2)
    compiled = torch.compile(Cut(), backend=backend)
    counts = []
    for _ in range(4):
        compiled(X)
        counts.append(len(backend.recorder.notes))
    assert counts == [0, 2, 2, 2]
    assert "2 graphs, in 2 of 4 batches (full_every=2)" in backend.coverage()


def test_operations_in_float32_stay_there_in_both_forms() -> None:
    """The graph with checks is made of the graph that computes them there."""

    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).mean().sqrt()

    x = torch.full((4,), 300.0, dtype=torch.float16)
    model = fxguard.instrument(Squares(), full_every=2)
    fxguard.keep_float32(model, ["*:mul", "*:mean", "*:sqrt"])
    assert [float(model(x)) for _ in range(4)] == [300.0] * 4
    assert is_full(model)


def test_a_copy_counts_batches_of_its_own() -> None:
    """Two calls of the original are none of the copy. A pickle holds the plain model."""
    model = fxguard.instrument(net(), full_every=2)
    model(X), model(X)
    copied = copy.deepcopy(model)
    assert fxguard.guard_of(copied).options.full_every == 2
    for full in (False, True):
        copied(X)
        assert is_full(copied) == full
    assert type(pickle.loads(pickle.dumps(model))) is nn.Sequential


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_nothing_is_kept_longer(backend: str) -> None:
    """What the graph with checks was compiled for goes with its batch; the model when removed."""
    model = fxguard.instrument(net(), full_every=2)
    compiled = torch.compile(model, backend=backend)
    given = [X.clone() for _ in range(2)]
    for x in given:
        compiled(x)
    last = weakref.ref(given[1])
    del given, x
    gc.collect()
    assert last() is None
    fxguard.remove(model)
    gone = weakref.ref(model)
    del model, compiled
    gc.collect()
    assert gone() is None
