"""Who may change what: threads that share a model, interrupts, and fxguard's own books."""

from __future__ import annotations

import copy
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.modules.module as module_hooks
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import fxguard
from fxguard.batch import active, batch
from fxguard.guard.last_frames import LastFrames

PACKAGE = str(Path(fxguard.__file__).parent)
INTERRUPTED = (PACKAGE, torch.overrides.__file__)  # the latter puts modes on the stack and off it
X = torch.ones(2, 8)


class Branches(nn.Module):
    """Graphs, operations between them, and a module with a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(self.between(x).relu())

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        x = x[None] * 2
        return self.attention(x, x, x)[0][0]


# Threads.


def in_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.fixture
def often_switching() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "calls", [60, pytest.param(400, marks=pytest.mark.campaign)], ids=["sample", "campaign"]
)
def test_threads_that_share_a_healthy_model_disturb_nobody(
    calls: int, often_switching: None
) -> None:
    """Four threads call one model: the outputs are right, and each call is a batch."""
    plain = nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)])
    model = fxguard.instrument(copy.deepcopy(plain), max_frames_to_save=21)
    inputs = [torch.full((1, 2), float(index)) for index in range(4)]
    expected = [plain(x) for x in inputs]
    model(inputs[0])

    def work(index: int) -> None:
        for _ in range(calls):
            assert torch.equal(model(inputs[index]), expected[index])

    assert not in_threads(4, work)
    guard = fxguard.guard_of(model)
    assert guard.batch_number == 1 + 4 * calls
    # TorchDynamo now and then compiles once more: "Unexpected recompilation: runtime guards failed
    # even though they passed during recompilation-reason analysis."
    assert re.fullmatch(r"checked (\d+) of \1 operations in \d graphs?", guard.coverage())
    assert guard.frames()


def test_threads_find_what_each_of_them_does(often_switching: None) -> None:
    """Healthy and broken calls at the same time: every broken one is reported, no other one."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), on_detect=reports.append)
    inputs = [torch.full((1, 2), float(value)) for value in (1.0, torch.nan, 2.0, torch.nan)]
    model(inputs[0])

    def work(index: int) -> None:
        for _ in range(40):
            model(inputs[index])

    assert not in_threads(4, work)
    assert len(reports) == 80
    assert len({report.batch_number for report in reports}) == 80


def test_one_origin_is_printed_once_by_all_threads(
    capsys: pytest.CaptureFixture[str], often_switching: None
) -> None:
    """`on_detect="warn"` prints a report for each origin, however many threads find it."""
    model = fxguard.instrument(nn.Linear(2, 2), on_detect="warn")
    model(torch.ones(1, 2))
    barrier = threading.Barrier(4)

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(10):
            model(torch.full((1, 2), torch.inf))

    with pytest.warns(RuntimeWarning, match="inf"):
        assert not in_threads(4, work)
    said = capsys.readouterr()
    assert (said.out + said.err).count("Detected inf/nan") == 1


def test_the_ring_keeps_as_many_batches_as_a_report_needs() -> None:
    """Without the last one there would be too few frames; a report empties it."""
    ring = LastFrames(10)
    made = [batch.Batch(number) for number in range(6)]
    for each in made:
        ring.add(each, 4)
    assert ring.batches() == made[:2:-1]  # 12 frames; of two there would be 8
    ring.add(made[0], 100)
    assert ring.batches() == [made[0]]
    ring.clear()
    assert not ring.batches()
    assert len(ring) == 0


# Interrupts.


class Interrupt:
    """Raises KeyboardInterrupt where Python would act on a signal, at the n-th place there.

    CPython looks for signals when a function begins or goes on, and when one that is written in C
    has returned. A profile function is called at the same places.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0
        self.place = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(INTERRUPTED):
            return
        self.count += 1
        if self.count - 1 == self.at:
            self.place = f"{code.co_filename}:{frame.f_lineno} {event} {arg}"
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def assert_nothing_is_left() -> None:
    assert active.current() is None
    assert not _get_current_function_mode_stack()
    assert torch._C._is_torch_function_enabled()
    assert not torch._C._len_torch_dispatch_stack()
    for hooks in ("pre_hooks", "hooks", "hooks_with_kwargs"):
        assert not getattr(module_hooks, f"_global_forward_{hooks}")


def interrupted_everywhere(
    model: nn.Module, x: Tensor, sample: int | None, error: type[BaseException] | None = None
) -> None:
    """Interrupt a call at each place, or at some: every next call is checked as usual."""
    with Interrupt() as count:
        try:
            model(x)
        except fxguard.NonFiniteError:
            assert error is fxguard.NonFiniteError
    places: list[int] = list(range(count.count))
    assert len(places) > 50
    if sample is not None:
        places = random.Random(0).sample(places, sample)
    for at in places:
        interrupt = Interrupt(at)
        with interrupt:
            try:
                model(x)
            except KeyboardInterrupt:
                pass
            except fxguard.NonFiniteError:
                assert error is not None
        try:
            assert_nothing_is_left()
            number = fxguard.guard_of(model).batch_number
            model(X)
            assert fxguard.guard_of(model).batch_number == number + 1
            with pytest.raises(fxguard.NonFiniteError):
                model(X * torch.nan)
            assert_nothing_is_left()
        except BaseException as problem:
            raise AssertionError(
                f"after an interrupt at {interrupt.place}: {problem!r}"
            ) from problem


# An interrupt in what Python runs while it frees an object is printed, and lost.
LOST = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
HOW_MANY = pytest.mark.parametrize(
    "sample", [40, pytest.param(None, marks=pytest.mark.campaign)], ids=["sample", "campaign"]
)


@LOST
@HOW_MANY
@pytest.mark.parametrize("value", [1.0, torch.nan], ids=["healthy", "broken"])
@pytest.mark.parametrize("options", [{}, {"replay": True}], ids=["plain", "replay"])
def test_an_interrupt_leaves_the_next_batch_checked(
    options: dict[str, Any], value: float, sample: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """KeyboardInterrupt at any moment: the next call is a new batch, and its NaN is found."""
    model = fxguard.instrument(Branches().eval(), **options).requires_grad_(False)
    model(X)
    with pytest.raises(fxguard.NonFiniteError):
        model(X * torch.nan)
    error = fxguard.NonFiniteError if value != 1.0 else None
    interrupted_everywhere(model, X * value, sample, error)


def test_the_interrupts_of_the_test_are_those_of_a_signal() -> None:
    """A KeyboardInterrupt of the model's own code ends the batch likewise."""

    class Stops(nn.Module):
        stop = True

        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            if self.stop:
                raise KeyboardInterrupt
            return x

    model = fxguard.instrument(Stops())
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert_nothing_is_left()
    model.stop = False
    with pytest.raises(fxguard.NonFiniteError):
        model(X * torch.nan)


# The books.


def test_numbers_that_do_not_fit_their_plan_are_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number too many or too few is an error of fxguard, never the number of another tensor."""
    model = fxguard.instrument(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model(torch.ones(1, 2))
    read = batch.Batch.read

    def one_short(self: batch.Batch) -> None:
        for run in self.runs:
            run.statistics = run.statistics[1:]
        read(self)

    monkeypatch.setattr(batch.Batch, "read", one_short)
    with pytest.raises(fxguard.FxguardError, match="numbers were measured for 3 values"):
        model(torch.full((1, 2), torch.nan))
    monkeypatch.undo()
    with pytest.raises(fxguard.NonFiniteError):
        model(torch.full((1, 2), torch.nan))


def test_a_callback_may_call_the_model() -> None:
    """While a report is handed over its batch has ended: another call is another batch."""
    reports: list[fxguard.types.Report] = []

    def again(report: fxguard.types.Report) -> None:
        reports.append(report)
        if len(reports) == 1:
            model(X * torch.nan)

    model = fxguard.instrument(nn.Linear(8, 8), on_detect=again)
    model(X * torch.nan)
    assert [report.batch_number for report in reports] == [0, 1]
