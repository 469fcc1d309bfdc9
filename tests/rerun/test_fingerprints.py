"""Fingerprints in the files of traced batches: of the tensors that ran, or none and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard import load_trace
from fxguard.measure import fingerprints
from fxguard.measure.fingerprints import fingerprint_of
from fxguard.records import Fingerprint
from fxguard.types import Row
from support import exp_net, traced_net

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))


def trace(
    folder: Path, model: nn.Module, *args: Any, backend: str | None = None, **options: Any
) -> fxguard.types.Trace:
    """The trace of one call."""
    fxguard.instrument(model, trace_to=folder, **({"trace_batch_nums": [0]} | options))
    torch.manual_seed(5)
    called = model if backend is None else torch.compile(model, backend=backend)
    called(*args)
    [path] = folder.glob("*.jsonl")
    fxguard.remove(model)
    torch._dynamo.reset()
    return load_trace(path)


def rows(trace: fxguard.types.Trace) -> dict[tuple[str, str], Row]:
    """By title of the frame and label."""
    [batch] = trace.batches
    return {(frame.title, row.label): row for frame in batch.frames for row in frame.rows}


def print_of(trace: fxguard.types.Trace, title: str, label: str = "output") -> Fingerprint:
    found = rows(trace)[title, label].fingerprint
    assert found is not None
    return found


def same(found: Fingerprint | None, value: Tensor) -> bool:
    """Whether it is the fingerprint of a tensor that a hook of ours has seen, as files round it."""
    assert found is not None
    expected = fingerprint_of(value)
    assert (found.count, found.left_out, found.note) == (value.numel(), expected.left_out, "")
    numbers = found.mean, found.norm, *found.projections
    wanted = expected.mean, expected.norm, *expected.projections
    return all(
        a == pytest.approx(b, rel=1e-5, abs=1e-6) for a, b in zip(numbers, wanted, strict=True)
    )


def seen_by_hooks(model: nn.Module, *args: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """What each module received and returned in a plain run, cloned when it did."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda m, given, made, name=name: seen.__setitem__(
                name, (given[0].detach().clone(), made.detach().clone())
            )
        )
        for name, module in model.named_modules()
    ]
    torch.manual_seed(5)
    model(*args)
    for handle in handles:
        handle.remove()
    return seen


BACKENDS = [None, "aot_eager"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_modules_have_those_of_what_hooks_see(backend: str | None, tmp_path: Path) -> None:
    """Inputs, weights and outputs, across a graph break; compiled, of the eager graph."""
    seen = seen_by_hooks(traced_net.make(), traced_net.IDS)
    model = traced_net.make()
    found = rows(trace(tmp_path, model, traced_net.IDS, backend=backend))
    titles = {"embed": "embed Embedding", "linear": "linear Linear", "norm": "norm BatchNorm1d"}
    for name, title in titles.items():
        given, made = seen[name]
        assert same(found[title, "input[0]"].fingerprint, given), title
        assert same(found[title, "output"].fingerprint, made), title
        weight = getattr(model, name).weight
        assert same(found[title, "weight"].fingerprint, weight.detach())
        output = found[title, "output"].fingerprint
        assert output is not None
        assert output.of_eager_run is (backend is not None)
    assert same(found["Net", "output"].fingerprint, seen[""][1])
    assert all(row.fingerprint is not None for row in found.values() if row.abs_max is not None)


@torch.compiler.disable
def negate(x: Tensor) -> None:
    torch.neg_(x)


class Between(nn.Module):
    """Writes into what its first graph has read, between two graphs: ranges do not see it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x).sum() + x
        negate(x)
        return y + x


class Writes(nn.Module):
    """Writes its input in its graph, after it was read."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        x.neg_()
        return y + 1


class WritesFirst(nn.Module):
    """Writes over its input, which nobody has read before."""

    def forward(self, x: Tensor) -> Tensor:
        x.fill_(0.25)
        return x + 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [Between, Writes, WritesFirst])
def test_none_is_of_another_time(kind: Any, backend: str | None, tmp_path: Path) -> None:
    """Where an input was written since, values have those of what they were, or none, and why."""
    before, after = X.clone(), X.clone()
    output = kind()(after)
    found = rows(trace(tmp_path, kind(), before.clone(), backend=backend))
    prints = {place: row.fingerprint for place, row in found.items() if row.abs_max is not None}
    assert None not in prints.values()
    # A module's row of an input shows what stands there when it returns.
    root = kind.__name__
    assert same(prints[root, "input[0]"], after)
    assert same(prints[root, "output"], output)
    why = {each.note for each in prints.values() if each is not None} - {""}
    if kind is WritesFirst:
        assert ("tanh", "input[0]") not in prints
        assert not why
        return
    assert same(prints["tanh", "input[0]"], before)
    tanh = prints["tanh", "output"]
    assert same(prints["neg_", "output"], -before)
    if kind is Between:
        assert why == {"an input of its graph was written since"}
        assert tanh is not None
        assert tanh.note in why
    else:
        assert not why
        assert same(tanh, torch.tanh(before))


def test_nobody_counts_writes_in_inference_mode(tmp_path: Path) -> None:
    """What was read before something else ran may be another by now; what ran last is not."""
    with torch.inference_mode():
        between = rows(trace(tmp_path / "between", Between(), X.clone()))
        last = rows(trace(tmp_path / "last", Writes(), X.clone()))
        assert same(last["tanh", "output"].fingerprint, torch.tanh(X))
    tanh = between["tanh", "output"].fingerprint
    assert tanh is not None
    assert tanh.note == "an input of its graph may have been written since"


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(x), 0.5, self.training) * 2


def test_random_numbers(tmp_path: Path) -> None:
    """Eager: those that were drawn. Under a compiler, which may draw others: none, and why."""
    model = Drops().train()
    torch.manual_seed(5)
    expected = model(X)
    eager = trace(tmp_path / "eager", model, X)
    assert same(print_of(eager, "Drops"), expected)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    model(X)
    assert torch.equal(torch.get_rng_state(), after)  # the second run is not missed
    compiled = trace(tmp_path / "compiled", model, X, backend="aot_eager")
    assert print_of(compiled, "Drops").note == "its graph draws random numbers under a compiler"
    quiet = trace(tmp_path / "quiet", model.eval(), X, backend="aot_eager")
    assert same(print_of(quiet, "Drops"), torch.tanh(X) * 2)


def test_the_same_model_twice_and_on_two_threads(tmp_path: Path) -> None:
    """No difference, in eager mode and under aot_eager; and what was compared is said."""
    before = torch.get_num_threads()
    plain = trace(tmp_path / "a", traced_net.make(), traced_net.IDS)
    try:
        torch.set_num_threads(before % 2 + 1)
        threads = trace(tmp_path / "b", traced_net.make(), traced_net.IDS)
    finally:
        torch.set_num_threads(before)
    compiled = trace(tmp_path / "c", traced_net.make(), traced_net.IDS, backend="aot_eager")
    for other in (threads, compiled):
        found = fxguard.diff(plain, other)
        assert found.agrees
        assert found.verdict[0].startswith("ranges and fingerprints agree: 0 of ")
    assert (
        "fingerprints of B: its graphs once more in eager mode, not what a compiler made of them"
        in fxguard.diff(plain, compiled).verdict
    )


class Turned(nn.Module):
    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        return torch.roll(x, self.turns, 0) * 2


def test_a_permuted_tensor_is_seen(tmp_path: Path) -> None:
    """From end to end: two files, of which only fingerprints differ."""
    a = trace(tmp_path / "a", Turned(0), X)
    b = trace(tmp_path / "b", Turned(1), X)
    found = fxguard.diff(a, b)
    assert found.first is not None
    assert found.first.frame.title == "mul"  # what only moves elements has no range
    assert "the ranges and fingerprints of what it read agree" in str(found)
    assert "or another order or sign" in str(found)


def test_only_traced_batches_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary batches, printed traces and live frames take no fingerprint."""
    taken = []

    def spy(value: Any) -> Fingerprint:
        taken.append(value)
        return Fingerprint(note="spied")

    for module in (
        "fxguard.batch.fingerprints",
        "fxguard.tracing.fingerprints",
    ):
        monkeypatch.setattr(f"{module}.fingerprint_of", spy)
    model = fxguard.instrument(traced_net.make(), trace_batch_nums=[1], trace_to=tmp_path)
    model(traced_net.IDS)
    assert not taken
    model(traced_net.IDS)
    assert len(taken) > 5
    taken.clear()
    model(traced_net.IDS)
    fxguard.guard_of(model).frames()
    assert not taken
    printed = fxguard.instrument(traced_net.make(), trace_batch_nums=[0])
    printed(traced_net.IDS)
    watched = fxguard.instrument(traced_net.make(), trace_to=tmp_path / "none")
    watched(traced_net.IDS)
    assert not taken


def test_a_detection_has_them(tmp_path: Path) -> None:
    """Its batch is written whole; what is not finite is counted."""
    model = fxguard.instrument(exp_net.Net(), trace_to=tmp_path, on_detect=lambda report: None)
    model(exp_net.X, scale=1e4)
    [path] = tmp_path.glob("*.jsonl")
    [batch] = load_trace(path).batches
    found = [row.fingerprint for frame in batch.frames for row in frame.rows]
    assert any(each is not None and each.left_out for each in found)
    assert all(
        row.fingerprint is not None
        for frame in batch.frames
        for row in frame.rows
        if row.abs_max is not None
    )


class Loops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            made = torch.tanh(carry + row)
            return made, made.clone()

        from torch._higher_order_ops.scan import scan

        return scan(step, torch.zeros(8), x)[1]


def test_what_a_loop_makes_many_times_has_none(tmp_path: Path) -> None:
    found = trace(tmp_path, Loops(), X)
    notes = {row.fingerprint.note for row in rows(found).values() if row.fingerprint is not None}
    assert notes == {"", "made many times, in a loop"}


def test_signs_are_fair() -> None:
    """As many +1 as -1, and those of two projections have nothing to do with each other."""
    signs = [fingerprints.sign(0, i) for i in range(2**12)]
    assert set(signs) == {1, -1}
    assert abs(sum(signs)) < 5 * 2**6  # five standard deviations of a fair coin
    other = [fingerprints.sign(1, i) for i in range(2**12)]
    assert abs(sum(a * b for a, b in zip(signs, other, strict=True))) < 5 * 2**6
