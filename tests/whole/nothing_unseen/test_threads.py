"""Threads that call one model at once have a batch each."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch import active
from support.cut_models import (
    HIGH,
    LOW,
    Block,
)
from support.threads import in_threads
from support.ways import EAGER, PYTHON, assert_same_bits, the_way


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


def check_threads(way: str, rounds: int = 4, in_turns: bool = False) -> None:
    """Two threads inside one model, in an order that is chance or that of ``Meeting.other``."""
    reports: list[tuple[str, fxguard.types.Report]] = []
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
    reports: list[tuple[str, fxguard.types.Report]] = []
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


def test_without_a_batch_for_each_thread_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch belongs to is kept for each thread."""

    class OneForAll:
        forward: Any = None
        layers: Any = None
        call: Any = None

    monkeypatch.setattr(active, "here", OneForAll())
    with pytest.raises(AssertionError, match=r"^other reports\s+assert \[\('0', 'input"):
        check_threads(PYTHON, rounds=1, in_turns=True)
