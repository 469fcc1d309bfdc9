"""Whatever TorchDynamo does with a model, every forward of it is checked, as one whole batch.

The table holds models that TorchDynamo cuts into graphs, leaves to Python or compiles again. Each
runs three ways, as in ``test_odd_tensors``: a healthy input gives the bits of the plain model and
no report, a faulty one gives its bits and one report that blames the operation by its full name.
What protects from a forward that nobody checks is taken away once, to show that the check fails.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch import active, module_hooks, observer
from fxguard.capture import dynamo
from fxguard.guard import recorder
from fxguard.guard._names import Names
from fxguard.guard.guard import Guard
from support.ways import AOT, EAGER, PYTHON, WAYS, assert_same_bits, prepared, the_way


@pytest.fixture(autouse=True)
def modes_as_they_were() -> Iterator[None]:
    """A test that leaves a mode switched on fails itself, and no other."""
    yield
    left = modes()
    torch.set_autocast_enabled("cpu", False)
    assert left == modes()


def modes() -> tuple[bool, ...]:
    """Whether autocast, inference_mode and gradients are on."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    )


LOW, HIGH = torch.full((2, 4), 0.5), torch.full((2, 4), 1e3)


class Block(nn.Module):
    """Overflows in exp where its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(4))
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x)) * 0.1


# Structure.


class Bare(nn.Module):
    """Has no parameter of its own."""

    def __init__(self, inner: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inner = inner()

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def functions() -> nn.Module:
    return nn.Sequential(Function(torch.square), Function(torch.exp), Function(torch.tanh))


def half_frozen() -> nn.Module:
    model = nn.Sequential(Block(), Block())
    model[0].requires_grad_(False)
    return model


class BesideMeta(nn.Module):
    """One part has no data and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.unused = nn.Linear(4, 4, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Shared(nn.Module):
    """One module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * 2)


# Control flow.


class ReturnsEarly(nn.Module):
    """By shape, which TorchDynamo guards."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(x)
        if x.shape[0] == 1:
            return hidden
        return self.last(hidden)


class ReturnsEarlyByValue(ReturnsEarly):
    """By a number, at which TorchDynamo ends the graph."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max().item() > 5:
            return self.block(x)
        return self.last(x)


class CallsItself(nn.Module):
    """The root is called again, inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self(x * 2, depth - 1) if depth else self.block(x)


class Recursive(nn.Module):
    """A part calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = CallsItself()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + 1


# Graph breaks, three modules deep.


class BreaksBefore(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return torch.exp(x) * 0.1


class BreaksAfter(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(self.linear(x))
        torch._dynamo.graph_break()
        return x * 0.1


@torch.compiler.disable
def left_to_python(x: Tensor) -> Tensor:
    return torch.exp(x) * 0.1


class ComputesBetween(Block):
    def forward(self, x: Tensor) -> Tensor:
        return left_to_python(self.linear(x)) + 1


@torch.compiler.disable
def through_data(x: Tensor) -> Tensor:
    return torch.exp(x).data * 0.1


@torch.compiler.disable
def through_transpose(x: Tensor) -> Tensor:
    return torch.exp(x).T * 0.1


class AliasesBetween(Block):
    """What overflowed is gone, its memory is not."""

    def forward(self, x: Tensor) -> Tensor:
        return through_data(self.linear(x)) + 1


class TransposesBetween(Block):
    def forward(self, x: Tensor) -> Tensor:
        return through_transpose(self.linear(x)) + 1


def deep(block: Callable[[], nn.Module]) -> nn.Module:
    model = Outer()
    model.outer = Outer()
    model.outer.inner = Outer()
    model.outer.inner.block = block()
    return model


class Outer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        (child,) = self.children()
        return child(x) * 2


# Modes inside.


class Inside(nn.Module):
    """A mode around one part of the forward."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.mode = mode
        self.block, self.last = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            hidden = self.block(x)
        return self.last(hidden.float().clone())


def bfloat16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


MODES: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": bfloat16,
}


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    where: str  # full name of the module to blame
    what: str = "exp"
    faulty: Tensor = field(default_factory=lambda: HIGH)


DEEP = "outer.inner.block"
CASES = {
    "no parameters of its own": Case(Bare, "inner"),
    "twice no parameters": Case(lambda: Bare(Bare), "inner.inner"),
    "functions": Case(functions, "1"),
    "half frozen": Case(half_frozen, "0"),
    "a part on meta": Case(BesideMeta, "block"),
    "shared": Case(Shared, "first", faulty=torch.full((2, 4), 8.0)),
    "returns early": Case(ReturnsEarly, "block", faulty=HIGH[:1]),
    "returns early by value": Case(ReturnsEarlyByValue, "block"),
    "calls itself": Case(CallsItself, "block"),
    "recursive": Case(Recursive, "block.block"),
    "breaks before": Case(lambda: deep(BreaksBefore), DEEP),
    "breaks after": Case(lambda: deep(BreaksAfter), DEEP),
    "computes between": Case(lambda: deep(ComputesBetween), DEEP),
    "aliases between": Case(lambda: deep(AliasesBetween), DEEP),
    "transposes between": Case(lambda: deep(TransposesBetween), DEEP),
    **{f"{name} inside": Case(lambda m=mode: Inside(m), "block") for name, mode in MODES.items()},
}
CUT = [name for name, case in CASES.items() if case.where == DEEP]


def check(case: Case, way: str, mode: str = "nothing") -> fxguard.Guard:
    """Both twins of one case, each twice: four batches, of which the last two are bad."""
    calls = [LOW, LOW, case.faulty, case.faulty]
    with the_way(way), MODES[mode]():
        plain = prepared(case.make(), way)
        expected = [plain(x) for x in calls]
        torch._dynamo.reset()
        reports: list[fxguard.Report] = []
        model = fxguard.instrument(case.make(), on_detect=reports.append)
        guarded = prepared(model, way)
        for x, output in zip(calls, expected, strict=True):
            before = modes()
            assert_same_bits(guarded(x), output)
            assert modes() == before
    guard = fxguard.guard_of(model)
    assert guard.batch_number == len(calls)  # however many graphs there are
    assert [report.batch_number for report in reports] == [2, 3]
    for report in reports:
        origin = report.origins[0]
        blamed = (origin.what, origin.frame.name, origin.problem)
        assert blamed == (case.what, case.where, "inf"), origin.message
    names = {name for name, _ in model.named_modules()}
    assert {frame.name for frame in guard.frames()} <= names
    assert [frame.title for frame in guard.frames()].count(type(model).__name__) == 1
    return guard


SAMPLE = ["shared", "returns early by value", "recursive", "aliases between", "autocast inside"]


def runs(rows: Iterable[tuple[str, ...]]) -> list[Any]:
    """Test parameters; what is out of the sample waits for the campaign."""
    return [
        pytest.param(
            *row,
            id="-".join(row),
            marks=[pytest.mark.campaign] if AOT in row and row[0] not in SAMPLE else [],
        )
        for row in rows
    ]


@pytest.mark.parametrize(("name", "way"), runs(itertools.product(CASES, WAYS)))
def test_every_forward_is_one_checked_batch(name: str, way: str) -> None:
    """Bits are kept, each call is one batch, the operation is blamed by its full name."""
    check(CASES[name], way)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "nothing"])
@pytest.mark.parametrize("way", [PYTHON, EAGER])
@pytest.mark.parametrize("name", ["calls itself", "half frozen", *CUT[1:]])
def test_modes_around_the_model_change_nothing(name: str, way: str, mode: str) -> None:
    """The same under no_grad, inference_mode and autocast."""
    check(CASES[name], way, mode)


# Compiled again and again.


class Flattens(nn.Module):
    """Makes TorchDynamo compile for each size: a Python number is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).view(int(x.shape[0]), -1) * int(x.shape[0])


def pairs(sizes: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """A healthy and a faulty input of each size, that is to be compiled for by itself."""
    for size in sizes:
        pair = torch.full((size, 4), 0.5), torch.full((size, 4), 1e3)
        for x in pair:
            torch._dynamo.mark_static(x)
        yield pair


def check_many_sizes(sizes: Any, way: str = EAGER) -> str:
    """Every size, healthy and faulty; what `coverage` says in the end."""
    reports: list[fxguard.Report] = []
    model = fxguard.instrument(Flattens(), on_detect=reports.append)
    guarded, plain = prepared(model, way), Flattens()
    bad = []
    for clean, faulty in pairs(sizes):
        assert_same_bits(guarded(clean), plain(clean))
        bad.append(fxguard.guard_of(model).batch_number)
        assert_same_bits(guarded(faulty), plain(faulty))
    assert [report.batch_number for report in reports] == bad
    blamed = {r.origins[0].message.partition(" (")[0] for r in reports}
    assert blamed == {"exp in block made inf"}, blamed
    return fxguard.guard_of(model).coverage()


@pytest.mark.parametrize("limit", [1, 2])
def test_past_the_recompile_limit_every_forward_is_checked(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When TorchDynamo gives up, the observer sees what it leaves to Python."""
    monkeypatch.setattr(dynamo, "RECOMPILE_LIMIT", limit)
    coverage = check_many_sizes(range(2, 7))
    assert f"in {limit} graph" in coverage
    assert "between graphs" in coverage


def test_below_the_recompile_limit_nothing_is_left_to_the_observer() -> None:
    """The clean twin: with room for all sizes each is a graph."""
    coverage = check_many_sizes(range(2, 7))
    assert "in 5 graphs" in coverage
    assert "between" not in coverage


@pytest.mark.parametrize("way", [EAGER, AOT])
def test_changing_shapes(way: str) -> None:
    """Sizes that TorchDynamo turns into symbols are checked like the first one."""
    reports: list[fxguard.Report] = []
    model = fxguard.instrument(Bare(), on_detect=reports.append)
    guarded = prepared(model, way)
    for size in (3, 5, 1, 7, 0, 4):
        clean, faulty = torch.full((size, 4), 0.5), torch.full((size, 4), 1e3)
        assert_same_bits(guarded(clean), Bare()(clean))
        assert_same_bits(guarded(faulty), Bare()(faulty))
    assert [report.batch_number for report in reports] == [1, 3, 5, 7, 11]  # none of no elements


def check_changing_dtypes(way: str) -> None:
    reports: list[fxguard.Report] = []
    with the_way(way):
        plain = Bare()
        model = fxguard.instrument(copy.deepcopy(plain), on_detect=reports.append)
        guarded = prepared(model, way)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
            plain.to(dtype)
            model.to(dtype)
            reports.clear()
            assert_same_bits(guarded(LOW.to(dtype)), plain(LOW.to(dtype)))
            assert not reports
            assert_same_bits(guarded(HIGH.to(dtype)), plain(HIGH.to(dtype)))
            assert [(o.what, o.frame.name) for r in reports for o in r.origins] == [
                ("exp", "inner")
            ]
        with torch.no_grad():
            model.inner.linear.weight[0, 0] = torch.nan
        guarded(LOW.to(torch.float16))
    assert reports[-1].origins[0].what == "weight inner.linear.weight"


@pytest.mark.parametrize("way", WAYS)
def test_changing_dtypes(way: str) -> None:
    """One model, moved to another dtype with `to`, is checked in that one."""
    check_changing_dtypes(way)


@pytest.mark.parametrize("way", WAYS)
def test_train_and_eval_in_turns(way: str) -> None:
    """Both modes of one model are checked; the running statistics stay those of the plain model."""

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), Block())

    reports: list[fxguard.Report] = []
    x = torch.arange(8.0).view(2, 4)
    with the_way(way):
        plain, model = make(), fxguard.instrument(make(), on_detect=reports.append)
        guarded = prepared(model, way)
        for mode in (True, False, True, False):
            outputs = []
            for one, called in ((plain, plain), (model, guarded)):
                torch.manual_seed(3)
                outputs.append(called(x) if one.train(mode) is one else None)
            assert_same_bits(outputs[1], outputs[0])
        assert_same_bits(model[0].running_var, plain[0].running_var)
        assert not reports
        for mode in (True, False):
            model.train(mode)
            with torch.no_grad():
                model[0].weight.fill_(1e4)
                model[0].bias.fill_(1e4)
            guarded(x)
    assert [report.batch_number for report in reports] == [4, 5]
    assert {report.origins[0].what for report in reports} == {"exp"}


# Many forwards of one call.


class Poison:
    """A logits processor: it spoils a weight when so many tokens have been chosen."""

    def __init__(self, weight: Tensor, after: int) -> None:
        self.weight, self.after, self.calls = weight, after, 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.after:
            with torch.no_grad():
                self.weight[0, 0] = torch.nan
        return scores


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def test_every_token_is_a_batch() -> None:
    """With a growing cache the forward that is bad first is the one reported, with its number.

    Once the weight is healed the same model goes on, and chooses the tokens of the plain one.
    """
    model, plain = fxguard.instrument(llama()), llama()
    weight = model.model.layers[0].mlp.down_proj.weight
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    ids = torch.arange(1, 7).view(1, 6)
    poison = Poison(weight, after=2)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model.generate(ids, logits_processor=[poison], **options)
    report = caught.value.report
    assert report.batch_number == poison.calls == 2
    assert report.origins[0].what == "weight model.layers.0.mlp.down_proj.weight"
    model.load_state_dict(plain.state_dict())
    expected = plain.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert expected.shape[1] == 6 + 5
    assert fxguard.guard_of(model).batch_number == 3 + 5


# Changes after `instrument`.


class Growing(nn.Module):
    """Calls whatever blocks it has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Tame()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + 1e3


def swapped(model: Growing) -> str:
    model.blocks[0] = Block()
    return "blocks.0"


def added(model: Growing) -> str:
    model.blocks.append(Block())
    return "blocks.1"


def inserted(model: Growing) -> str:
    model.blocks.insert(0, Tame())
    model.blocks.append(Block())
    return "blocks.2"


def added_with_a_break(model: Growing) -> str:
    model.blocks.append(BreaksBefore())
    return "blocks.1"


CHANGES = {change.__name__: change for change in (swapped, added, inserted, added_with_a_break)}


def check_change(change: Callable[[Growing], str], way: str) -> None:
    reports: list[fxguard.Report] = []
    with the_way(way):
        model = fxguard.instrument(Growing(), on_detect=reports.append)
        guarded = prepared(model, way)
        plain = Growing()
        plain.load_state_dict(model.state_dict())
        assert_same_bits(guarded(HIGH), plain(HIGH))
        assert not reports
        name = change(model)
        change(plain)
        plain.load_state_dict(model.state_dict())
        assert_same_bits(guarded(HIGH), plain(HIGH))
        blamed = reports[-1].origins[0]
        assert (blamed.what, blamed.frame.name) == ("exp", name), blamed.message
        modules = [f.name for f in fxguard.guard_of(model).frames() if not f.is_op]
        assert f"{name}.linear" in modules
        with torch.no_grad():
            model.get_submodule(name).linear.weight[0, 0] = torch.nan
        guarded(LOW)
        assert reports[-1].origins[-1].what == f"weight {name}.linear.weight"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_came_later_have_names(change: str, way: str) -> None:
    """A part that was swapped or added after `instrument` is checked under its own name."""
    check_change(CHANGES[change], way)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_came_later_have_names(way: str) -> None:
    """A weight that was replaced after the first forward is blamed as that weight."""
    reports: list[fxguard.Report] = []
    with the_way(way):
        model = fxguard.instrument(Bare(), on_detect=reports.append)
        guarded = prepared(model, way)
        guarded(LOW)
        model.inner.linear.weight = nn.Parameter(torch.full((4, 4), torch.nan))
        guarded(LOW)
    assert [o.what for o in reports[0].origins[:1]] == ["weight inner.linear.weight"]


# Threads.


class Meeting(nn.Module):
    """Both threads are inside the forward at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.barrier: threading.Barrier | None = None
        # In turns, thread 0 begins when the other is inside, and goes on when the other has ended.
        self.other: dict[str, threading.Event] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.meet()
        return self.last(hidden)

    @torch.compiler.disable
    def meet(self) -> None:
        first = threading.current_thread().name == "0"
        if self.other is not None and not first:
            self.other["inside"].set()
        if self.barrier is not None:
            self.barrier.wait(timeout=60)
        if self.other is not None and first:
            self.other["ended"].wait(timeout=60)


def in_threads(work: Callable[[int], Any], count: int = 2) -> list[Any]:
    """What each call returned, or the exception that it raised."""
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return results


def check_threads(way: str, rounds: int = 4, in_turns: bool = False) -> None:
    """Two threads inside one model, in an order that is chance or that of ``Meeting.other``."""
    reports: list[tuple[str, fxguard.Report]] = []
    model = fxguard.instrument(
        Meeting(),
        on_detect=lambda report: reports.append((threading.current_thread().name, report)),
    )
    # One overflows in the last block, where both have met.
    plain, inputs = Meeting(), (torch.full((2, 4), 8.0), LOW)
    with the_way(way):
        model(LOW)
        model.barrier = threading.Barrier(2)

        def work(index: int) -> Tensor:
            if in_turns and index == 0:
                model.other["inside"].wait(timeout=60)
            output = model(inputs[index])
            if in_turns and index == 1:
                model.other["ended"].set()
            return output

        for _ in range(rounds):
            if in_turns:
                model.other = {"inside": threading.Event(), "ended": threading.Event()}
            outputs = in_threads(work)
            for x, output in zip(inputs, outputs, strict=True):
                assert_same_bits(output, plain(x))
    origins = [(name, report.origins[0]) for name, report in reports]
    blamed = [(name, origin.what, origin.frame.name) for name, origin in origins]
    assert blamed == [("0", "exp", "last")] * rounds, "other reports"
    assert fxguard.guard_of(model).batch_number == 1 + 2 * rounds


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("way", [PYTHON, EAGER])
def test_two_threads_have_a_batch_each(way: str, in_turns: bool) -> None:
    """Two forwards at once are two batches: the faulty one is reported, the other is not."""
    check_threads(way, in_turns=in_turns)


def test_two_forwards_at_once_have_two_numbers() -> None:
    """A report says which batch is bad; two that run at once are told apart."""
    numbers: list[int] = []
    model = fxguard.instrument(Meeting(), on_detect=lambda r: numbers.append(r.batch_number))
    model.barrier = threading.Barrier(2)
    with the_way(PYTHON):
        in_threads(lambda index: model(HIGH))
    assert sorted(numbers) == [0, 1]


def chain() -> nn.Module:
    """Enough operations that threads overtake each other between them; the last can overflow."""
    return nn.Sequential(*[Block().linear for _ in range(11)], Block())


@pytest.mark.parametrize("way", [PYTHON, EAGER])
@pytest.mark.parametrize("calls", [25, pytest.param(400, marks=pytest.mark.campaign)])
def test_four_threads_call_one_model(calls: int, way: str) -> None:
    """Hundreds of calls at once: each has its own output, and only the faulty ones are reported.

    No two batches have one number, and every report blames the operation.
    """
    reports: list[tuple[str, fxguard.Report]] = []
    model = fxguard.instrument(
        chain(),
        on_detect=lambda report: reports.append((threading.current_thread().name, report)),
    )
    plain = chain()
    # The second call of every thread overflows, the others are healthy and differ.
    inputs = [[torch.full((2, 4), i + j / calls) for j in range(calls)] for i in range(4)]
    for mine in inputs:
        mine[1] = HIGH
    with the_way(way):
        model(LOW)
        outputs = in_threads(lambda index: [model(x) for x in inputs[index]], 4)
        for mine, given in zip(outputs, inputs, strict=True):
            assert isinstance(mine, list), f"a thread ended with {mine!r}"
            for output, x in zip(mine, given, strict=True):
                assert_same_bits(output, plain(x))
    assert sorted(name for name, _ in reports) == ["0", "1", "2", "3"]
    assert {r.origins[0].message.partition(" (")[0] for _, r in reports} == {"exp in 11 made inf"}
    assert len({report.batch_number for _, report in reports}) == 4
    assert fxguard.guard_of(model).batch_number == 1 + 4 * calls


# Every protection taken away once.


def unobserved(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def nothing(*args: Any) -> None:
    return None


def only_once(self: Names, read: Callable[[Names], None] = Names.read) -> None:
    if not self.modules:
        read(self)


def no_batch(self: Any) -> None:
    return None


def checking(name: str, way: str) -> Callable[[], object]:
    return lambda: check(CASES[name], way)


PROTECTIONS = [  # where it stands, what is put in its place, the check that then fails, and how
    (observer, "observe", unobserved, checking("computes between", EAGER), r"^input.*: \d+ \+inf"),
    (observer, "observe", unobserved, checking("half frozen", PYTHON), r"^input.*: \d+ \+inf"),
    (
        dynamo,
        "RECOMPILE_LIMIT",
        1,
        lambda: check_many_sizes(range(2, 7)),
        "input `output` holds inf",
    ),
    (module_hooks, "enter_module", nothing, checking("computes between", EAGER), "^exp made inf"),
    (module_hooks, "enter_module", nothing, checking("breaks before", PYTHON), "^exp made inf"),
    (Names, "read", only_once, lambda: check_change(added_with_a_break, EAGER), "^exp made"),
    # An assertion of fxguard itself: a batch that is not there cannot end. pytest gives it words
    # where it has rewritten the package, which is a plugin.
    (
        recorder.Recorder,
        "batch",
        property(no_batch),
        checking("calls itself", EAGER),
        "^(assert None is not None)?$",
    ),
]


@pytest.mark.parametrize(
    ("place", "name", "instead", "check_again", "failure"),
    [pytest.param(*row, id=f"{row[1]}-{index}") for index, row in enumerate(PROTECTIONS)],
)
def test_without_its_protection_the_check_fails(
    place: Any,
    name: str,
    instead: Any,
    check_again: Any,
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each line of the table above is what its check is a test of, and fails as it says."""
    monkeypatch.setattr(place, name, instead)
    if name == "RECOMPILE_LIMIT":
        monkeypatch.setattr(observer, "observe", unobserved)
    with pytest.raises(AssertionError, match=failure):
        check_again()


def test_without_a_batch_for_each_thread_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch belongs to is kept for each thread."""

    class OneForAll:
        forward: Any = None

    monkeypatch.setattr(active, "here", OneForAll())
    with pytest.raises(AssertionError, match=r"^other reports\s+assert \[\('0', 'input"):
        check_threads(PYTHON, rounds=1, in_turns=True)


@torch.library.custom_op("fxguard_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def twice_of_fake(x: Tensor) -> Tensor:
    raise RuntimeError("no fake tensor here")


class OnlyReal(nn.Module):
    """TorchDynamo fails on an operation, as 2.13 does on ``grouped_mm`` in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return twice(x) * x


def test_what_torchdynamo_fails_on_is_left_to_the_observer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model runs, and every operation is checked; without the fallback it would not run."""
    plain = OnlyReal()
    guarded = fxguard.instrument(copy.deepcopy(plain))
    x = torch.randn(2, 16)
    with pytest.raises(Exception, match="fake tensor"):
        guarded(x)
    fxguard.remove(guarded)
    torch._dynamo.reset()
    monkeypatch.setattr(Guard, "fallback", True)
    fxguard.instrument(guarded)
    assert torch.equal(guarded(x), plain(x))
    assert fxguard.guard_of(guarded).coverage() == (
        "checked 2 of 2 operations in 0 graphs and 2 between graphs"
    )
    with pytest.raises(fxguard.NonFiniteError, match="mul made inf"):
        guarded(torch.full((2, 16), 1e20))
