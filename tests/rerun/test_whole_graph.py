"""``replay=True``: what leaves a graph is measured, and a batch that turned bad runs again."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.capture import _copies
from fxguard.graph.overwritten_inputs import overwritten_inputs
from fxguard.measure import free_memory
from fxguard.plan import reader
from fxguard.rerun import whole_graph
from support import zoo
from support.models import Checkpointed
from support.planting import FAULTS, NOTHING
from support.trials import MODELS, Trial

INF = float("inf")
IN_CI = ("resnet",)
ALIKE_IN_CI = (("cnn", True, "eager"), ("lstm", True, "eager"), ("in_place", False, "aot_eager"))
LARGE = [
    pytest.param(name, marks=() if name in IN_CI else pytest.mark.campaign)
    for name in zoo.TRANSFORMERS
]
X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture
def second_runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each second run, whether it repeated the first one."""
    runs: list[bool] = []
    measure_run = whole_graph.measure_run

    def counted(run: Any) -> None:
        measure_run(run)
        runs.append(not run.not_again)

    monkeypatch.setattr(whole_graph, "measure_run", counted)
    return runs


def reports_of(
    build: Callable[[], nn.Module],
    use: Callable[[Any], None],
    replay: bool,
    backend: str = "eager",
    **options: Any,
) -> list[fxguard.types.Report]:
    """What is reported while a model is used."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(build(), on_detect=reports.append, replay=replay, **options)
    torch.manual_seed(1)
    use(model if backend == "eager" else torch.compile(model, backend=backend))
    return reports


def assert_same_reports(
    build: Callable[[], nn.Module], use: Callable[[Any], None], backend: str = "eager"
) -> fxguard.types.Report:
    """Both modes report the same, in every word and number; the first report.

    But for frames of the batches before: those were well, and were not measured.
    """
    full, again = (reports_of(build, use, replay, backend) for replay in (False, True))
    for one, other in zip(full, again, strict=True):
        assert {frame.batch_number for frame in other.frames} == {other.batch_number}
        own = tuple(frame for frame in one.frames if frame.batch_number == one.batch_number)
        one = replace(one, frames=own)
        assert str(one) == str(other), "another report"
        assert one.to_json() == other.to_json()
    return again[0]


# The same report, wherever the fault is.


ALIKE = [
    pytest.param(
        *(name, train, backend),
        marks=() if (name, train, backend) in ALIKE_IN_CI else pytest.mark.campaign,
    )
    for name in ("cnn", "encoder", "twice", "in_place", "containers", "lstm")
    for backend, train in (("eager", False), ("eager", True), ("aot_eager", False))
]


@pytest.mark.parametrize(("name", "train", "backend"), ALIKE)
def test_a_planted_fault_gives_the_report_of_the_full_mode(
    name: str, train: bool, backend: str
) -> None:
    """At every operation in turn: the same text where an output of a graph is bad, else silence."""
    trials = []
    entry = MODELS[name]
    for replay in (False, True):
        torch.manual_seed(0)
        model = entry.model(torch.float32, train)
        inputs = entry.inputs(torch.float32, entry.has_mask)
        torch._dynamo.reset()
        trials.append(Trial(model, inputs, backend, {"replay": replay}))
    texts: list[list[list[str]]] = []
    visible: list[bool] = []  # to the second mode: bad where it measures
    for trial in trials:
        torch._dynamo.reset()
        texts.append([])
        visible.clear()
        with trial.planter.installed():
            trial.run()
            assert not trial.reports
            for number in range(len(trial.planter.sites)):
                for fault in FAULTS:
                    trial.run(number, fault)
                    texts[-1].append([str(report.frames[-1].title) for report in trial.reports])
                    texts[-1][-1] += [line for r in trial.reports for line in r.verdict]
                    between = number in trial.planter.between
                    visible.append(between or trial.planter.reached_an_output())
            trial.run(NOTHING)
            assert not trial.reports
    full, again = texts
    expected = [text if seen else [] for text, seen in zip(full, visible, strict=True)]
    assert again == expected
    # Most faults are in what a graph returns: silence at every site would not be equal.
    assert sum(map(bool, expected)) > len(expected) / 3


@pytest.mark.campaign  # on each change: `test_a_planted_fault_gives_the_report_of_the_full_mode`
@pytest.mark.parametrize("name", LARGE)
def test_transformers_are_blamed_alike(name: str) -> None:
    """A weight that overflows the first product that it is in: report for report, dropout on."""
    entry = zoo.ZOO[name]

    def use(model: Any) -> None:
        args, kwargs = entry.inputs(torch.float32, entry.has_mask)
        weights = [p for n, p in fxguard.guard_of(model).model.named_parameters() if p.dim() > 1]
        model(*args, **kwargs)
        with torch.no_grad():
            weights[len(weights) // 2].fill_(3e38)
        model(*args, **kwargs)

    report = assert_same_reports(lambda: entry.model(torch.float32, True), use)
    assert report.batch_number == 1


# What a second run could stumble over.


class Normalised(nn.Module):
    """Running statistics and a counter, changed by each forward, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.exp(self.drop(self.norm(x)) * self.calls * 30)


class Cached(nn.Module):
    """A cache that keeps what each forward writes, as StaticCache does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 3, 4))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.cache.index_copy_(0, position, x[None])
        return torch.exp(self.cache.sum(0) * 24)


class Accumulates(nn.Module):
    """Adds to a buffer before it reads it: a second run must begin with what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.total.view(-1).add_(x.view(-1))
        return torch.exp(self.total * 25)


class ChangesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(30)
        return torch.exp(x * 3)


class Follows(nn.Module):
    """Weights that the forward writes: from what they held, and from what overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
            hot = torch.exp(self.slow(x) * 150)
            self.slow.bias.copy_(hot.mean(0).clamp(max=1))
        return hot


class Broken(nn.Module):
    """Two graphs, and an input of the first that is changed between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) * 1000
        torch._dynamo.graph_break()
        return torch.exp(hidden)


def times(count: int) -> Callable[[Any], None]:
    def use(model: Any) -> None:
        for _ in range(count):
            model(X.clone())

    return use


def decode(model: Any) -> None:
    for position in range(4):
        model(X, torch.tensor([position]))


HARD = {
    "running statistics": (lambda: Normalised().train(), times(4)),
    "cache": (Cached, decode),
    "accumulator": (Accumulates, times(6)),
    "changed input": (ChangesItsInput, times(2)),
    "written weights": (Follows, times(3)),
    "graph break": (Broken, times(2)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("build", "use"), HARD.values(), ids=HARD)
def test_state_that_a_forward_changes_does_not_spoil_the_second_run(
    build: Callable[[], nn.Module],
    use: Callable[[Any], None],
    backend: str,
    second_runs: list[bool],
) -> None:
    """Statistics, caches, counters, dropout: repeated, and the model's state is the plain one's."""
    assert_same_reports(build, use, backend)
    assert second_runs
    assert all(second_runs)
    states = []
    for wrap in (lambda m: m, lambda m: fxguard.instrument(m, on_detect=lambda r: 0, replay=True)):
        torch.manual_seed(0)
        model = wrap(build())
        torch.manual_seed(1)
        use(model)
        states.append((model.state_dict(), torch.get_rng_state()))
    (plain, random), (guarded, later) = states
    assert all(torch.equal(plain[name], guarded[name]) for name in plain)
    assert torch.equal(random, later)


@pytest.mark.parametrize("case", ["running statistics", "accumulator", "changed input"])
def test_without_a_copy_the_second_run_is_spoiled(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above protects: without copies the report is another, or says so."""
    monkeypatch.setattr(reader, "overwritten_inputs", lambda graph, calls: ())
    with pytest.raises(AssertionError, match=r"^another report"):
        assert_same_reports(*HARD[case])


def no_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("planted")


NO_ROOM: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "little is free": ((free_memory, "SMALL", 0), (free_memory, "free_bytes", lambda device: 0)),
    "out of memory": ((_copies, "_copy_of", no_memory),),
}


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("reason", NO_ROOM)
def test_without_room_for_copies_the_model_runs_on(
    reason: str, replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation is named without its cause; with replay the report says that it cannot be."""
    for target, name, value in NO_ROOM[reason]:
        monkeypatch.setattr(target, name, value)
    report = reports_of(ChangesItsInput, times(1), replay)[0]
    if replay:
        assert not report.repeated
        assert "no cause: there was no memory for copies of what its graph writes" in str(report)
        assert "not kept input[0]" in str(report)
        return
    assert report.origins[0].message.startswith("exp made inf")
    assert "NaN," not in str(report)


def test_the_state_of_a_model_is_its_own_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second run writes what was not copied."""
    monkeypatch.setattr(free_memory, "SMALL", 0)
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 0)
    plain, guarded = Accumulates(), fxguard.instrument(Accumulates(), on_detect=lambda report: 0)
    for model in (plain, guarded):
        times(6)(model)
    assert torch.equal(plain.total, guarded.total)


def test_free_memory_is_known_where_linux_tells() -> None:
    """More than nothing, and less than there is."""
    free = free_memory.free_bytes(torch.device("cpu"))
    if sys.platform == "linux":
        assert free is not None
    assert free is None or 0 < free < 2**50


def test_a_cache_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large cache into which rows are written is no reason to copy it at each token."""
    copied: list[tuple[int, ...]] = []

    def noted(graph: Any, calls: Any) -> tuple[int, ...]:
        copied.append(overwritten_inputs(graph, calls))
        return copied[-1]

    monkeypatch.setattr(reader, "overwritten_inputs", noted)
    reports_of(Cached, decode, True)
    assert copied == [()]
    copied.clear()
    reports_of(Accumulates, times(1), True)
    assert [len(positions) for positions in copied] == [1]


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
def test_checkpointed_blocks_run_again(second_runs: list[bool]) -> None:
    """Bodies of higher-order operations are checked in the second run, and backward still works."""

    def use(model: Any) -> None:
        model(X)
        with torch.no_grad():
            next(iter(fxguard.guard_of(model).model.parameters())).fill_(INF)
        model(X).sum().backward()

    assert_same_reports(Checkpointed, use)
    assert second_runs == [True]


def test_autocast_and_inference_mode_hold_in_the_second_run(second_runs: list[bool]) -> None:
    """What overflows in float16 under autocast only overflows again."""

    def use(model: Any) -> None:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
            model(X * 300)
            model(X * 3e5)

    report = assert_same_reports(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), use)
    assert report.batch_number == 1
    assert second_runs == [True]


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(x)
        return torch.linalg.cholesky(root.T @ root)


def test_a_forward_that_raises_is_explained(second_runs: list[bool]) -> None:
    """The graph that raised, and those before it, run again with every check."""
    for replay in (False, True):
        torch._dynamo.reset()
        model = fxguard.instrument(Raises(), replay=replay)
        with pytest.raises(fxguard.NonFiniteError) as found:
            model(X)
        assert found.value.report.origins[0].what == "sqrt"
        assert isinstance(found.value.__cause__, torch.linalg.LinAlgError)


def test_a_forward_that_raises_after_healthy_masks_is_explained() -> None:
    """Batches that were well, by what left their graphs, are no hindrance to a full judgment."""

    class MaskThenRaises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            masked, small = x.masked_fill(x > 0.5, -INF), torch.tanh(x * 2)
            torch._dynamo.graph_break()
            root = torch.sqrt(x + small * 0 + 1 - masked.isnan().sum())
            return torch.linalg.cholesky(root.T @ root + torch.eye(4))

    model = fxguard.instrument(MaskThenRaises(), replay=True)
    for _ in range(2):
        model(X)
    for _ in range(2):  # the second time the first graph is known in both forms
        with pytest.raises(fxguard.NonFiniteError) as found:
            model(X - 5)
        assert found.value.report.origins[0].what == "sqrt"
    model(X)


# Not repeated.


def test_what_does_not_repeat_itself_is_said() -> None:
    """A graph whose numbers come from outside: no operation of it is accused."""
    calls = []

    @torch.library.custom_op("fxguard_tests::other_each_time", mutates_args=())
    def other_each_time(x: Tensor) -> Tensor:
        calls.append(x)
        return x / (0 if len(calls) == 2 else 1)

    @other_each_time.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.fxguard_tests.other_each_time(self.linear(x))

    reports = reports_of(Outside, times(3), True)
    (report,) = reports
    assert report.batch_number == 1
    assert not report.repeated
    assert report.origins[0].message.startswith("graph made")
    assert "a second run of its graph did not repeat its numbers" in str(report)
    assert report.frames[0].kind == "graph"
    assert [row.label for row in report.frames[0].rows] == ["input[0]", "output[0]"]


def test_a_healthy_model_lives_though_a_graph_does_not_repeat_itself() -> None:
    """Its NaN ends in the next graph. Nobody can judge it, and nothing is raised."""
    calls = []

    @torch.library.custom_op("fxguard_tests::bad_at_first", mutates_args=())
    def bad_at_first(x: Tensor) -> Tensor:
        calls.append(x)
        return x.clone().masked_fill(torch.arange(len(x)) == 0, torch.nan if len(calls) == 1 else 0)

    @bad_at_first.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Discards(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.ops.fxguard_tests.bad_at_first(x) * 2
            torch._dynamo.graph_break()
            return torch.where(y == y, y, 0.0)

    model = fxguard.instrument(Discards(), replay=True)
    assert model(torch.ones(4)).tolist() == [0, 2, 2, 2]
    (note,) = fxguard.guard_of(model).notes
    assert note.not_judged == "it cannot be measured alone"


def test_what_does_not_repeat_itself_is_counted_by_nobody() -> None:
    """A third run may repeat the first, but for the values: no count of it stands in a report."""
    calls = []

    @torch.library.custom_op("fxguard_tests::bad_at_times", mutates_args=())
    def bad_at_times(x: Tensor) -> Tensor:
        calls.append(x)
        result = x.clone()
        if len(calls) != 2:
            result[: len(calls)] = INF
        return result

    @bad_at_times.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Outside(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.relu(), torch.ops.fxguard_tests.bad_at_times(x).max()

    found: list[fxguard.types.Report] = []
    fxguard.instrument(Outside(), on_detect=found.append, replay=True)(torch.rand(12))
    (report,) = found
    assert not report.repeated
    assert "a second run of its graph did not repeat its numbers" in str(report)
    (origin,) = report.origins
    assert origin.frame.kind == "graph"
    assert origin.problem == "inf"
    assert (origin.numel, origin.posinf_count, origin.needed) == (None, None, None)
    assert "elements" not in "\n".join(report.verdict)


def test_a_bad_weight_is_named_without_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing repeats, weights and inputs that are bad are still the cause."""
    monkeypatch.setattr(whole_graph, "_repeats", lambda *args: False)

    def use(model: Any) -> None:
        with torch.no_grad():
            fxguard.guard_of(model).model[0].weight.fill_(INF)
        model(X)

    (report,) = reports_of(lambda: nn.Sequential(nn.Linear(4, 4)), use, True)
    assert "weight 0.weight holds inf" in report.verdict[0]


# Healthy batches.


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*zoo.PLAIN, *LARGE])
@pytest.mark.parametrize("train", [False, True])
def test_a_healthy_model_runs_once_and_in_the_same_bits(
    name: str, train: bool, second_runs: list[bool]
) -> None:
    """Outputs and gradients are those of the plain model, and nothing runs again."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)
    plain = entry.model(torch.float32, train)
    guarded = fxguard.instrument(copy.deepcopy(plain), replay=True)
    results = []
    for model in (plain, guarded):
        torch.manual_seed(0)
        output = model(*args, **kwargs)
        if train:
            zoo.loss_of(output).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([*zoo.tensors_in(output), *gradients])
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))
    # A graph of the encoder hands a mask of -inf on: that is looked into, once.
    assert second_runs == ([True] if name == "encoder" else [])


def test_inductor_compiles_the_graph_of_the_plain_model() -> None:
    """With replay the compiler sees no check: bit for bit what the plain model computes."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    guarded = fxguard.instrument(copy.deepcopy(plain), replay=True)
    results = []
    for model in (plain, guarded):
        compiled = torch.compile(model)
        output = compiled(X)
        output.sum().backward()
        results.append([output, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))
    with torch.no_grad():
        guarded[0].weight.mul_(1e30)
        guarded[0].bias.mul_(1e30)
        guarded[2].weight.mul_(1e30)
    with pytest.raises(fxguard.NonFiniteError) as found:
        torch.compile(guarded)(X * 1e10)
    assert found.value.report.repeated
    assert found.value.report.origins[0].what in ("linear", "gelu", "layer_norm")


def test_masks_that_are_returned_are_looked_into_once(second_runs: list[bool]) -> None:
    """An output that holds -inf on purpose costs one second run, not one for each batch."""

    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x > 0, -INF)

    assert not reports_of(Masks, times(5), True)
    assert second_runs == [True]


# Options.


def test_traced_batches_show_every_frame(capsys: pytest.CaptureFixture[str]) -> None:
    """Tracing measures the batches that it prints; the others have no frames to show."""
    texts = []
    for replay in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = fxguard.instrument(nn.Linear(4, 4), trace_batch_nums=[1], replay=replay)
        for _ in range(2):
            model(X)
        assert fxguard.guard_of(model).frames()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "Starting batch number=1" in texts[1]
    model(X)
    with pytest.raises(fxguard.FxguardError, match="trace_batch_nums"):
        fxguard.guard_of(model).frames()


def test_coverage_says_when_it_checks() -> None:
    """Nobody may think that every operation is measured in each batch."""
    model = fxguard.instrument(nn.Linear(4, 4), replay=True)
    model(X)
    guard = fxguard.guard_of(model)
    assert guard.coverage() == (
        "checked 1 of 1 operations in 1 graph, when what leaves them has turned bad; "
        "what they absorb is not judged"
    )
    assert guard.selftest()


def test_strict_needs_every_operation() -> None:
    """Values that leave no graph are what strict asks for, and replay does not look at."""
    with pytest.raises(fxguard.FxguardError, match="strict"):
        fxguard.instrument(nn.Linear(4, 4), strict=True, replay=True)


def test_a_backend_replays_too() -> None:
    """``fxguard.backend(..., replay=True)`` names the same operation."""
    found = []
    for replay in (False, True):
        torch._dynamo.reset()
        backend = fxguard.backend("eager", on_detect=found.append, replay=replay)
        torch.compile(lambda x: torch.log(x).sqrt() + 1, backend=backend)(X)
    assert str(found[0]) == str(found[1])
