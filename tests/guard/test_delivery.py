"""What a detection says and where: the exception, stderr, the warning and the logger."""

from __future__ import annotations

import _thread
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.source.lines import warn_user

ROOT = Path(__file__).resolve().parents[2]


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


BIG = torch.full((2,), 300.0, dtype=torch.float16)


def detected(model: nn.Module, *inputs: Tensor) -> fxguard.NonFiniteError:
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(*inputs)
    return caught.value


def test_an_uncaught_exception_says_what_happened() -> None:
    """The traceback, which is all that a cluster's log keeps, has the verdict and its numbers."""
    error = detected(fxguard.instrument(Square()), BIG)
    shown = "".join(traceback.format_exception(error))
    assert "NonFiniteError: batch 0: mul made inf (test_delivery.py:" in shown
    assert "it read input[0] up to 3.00e+02" in shown
    assert "1.37 times what float16 holds (65504)" in shown  # 300 * 300 / 65504
    assert str(error).splitlines()[0].startswith(error.report.message)


def test_an_exception_survives_pickling_with_its_verdict() -> None:
    """A worker's exception says the same in the process that it is handed to."""
    error = detected(fxguard.instrument(Square()), BIG)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.report == error.report


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def test_a_warning_without_a_line_of_the_script_names_its_caller(
    caught: list[warnings.WarningMessage],
) -> None:
    """As in a thread of torch's own, where no frame is the script's."""
    done = threading.Event()
    source = "def of_torch():\n    warn_user('out of nowhere')\n    done.set()"
    scope: dict[str, Any] = {"warn_user": warn_user, "done": done}
    exec(compile(source, torch.__file__, "exec"), scope)
    _thread.start_new_thread(scope["of_torch"], ())
    assert done.wait(60)
    assert [(each.filename, each.lineno) for each in caught] == [(torch.__file__, 2)]


def test_a_warning_points_at_the_line_that_called_the_model(
    caught: list[warnings.WarningMessage],
) -> None:
    """Eager and compiled, the warning's file and line are the caller's, as for any function."""
    model = fxguard.instrument(Square(), on_detect="warn")
    model(BIG)
    line = sys._getframe().f_lineno - 1
    [found] = caught
    assert (found.filename, found.lineno) == (__file__, line)
    compiled = torch.compile(fxguard.instrument(Square(), on_detect="warn"), backend="eager")
    caught.clear()
    compiled(BIG)
    assert [w.filename for w in caught] == [__file__]


def test_each_origin_is_warned_of_once(caught: list[warnings.WarningMessage]) -> None:
    """Whatever the batch and its numbers; another origin is news, and a callable hears of all."""
    model = fxguard.instrument(Square(), on_detect="warn")
    for factor in (1, 2, 3):
        model(BIG * factor)
    assert len(caught) == 1
    model(BIG * float("nan"))
    assert len(caught) == 2
    reports: list[fxguard.types.Report] = []
    listening = fxguard.instrument(Square(), on_detect=reports.append)
    for _ in range(3):
        listening(BIG)
    assert [report.batch_number for report in reports] == [0, 1, 2]


@pytest.mark.parametrize(("on_detect", "level"), [("raise", "ERROR"), ("warn", "WARNING")])
def test_the_logger_gets_the_message_and_the_report(
    on_detect: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`logging.getLogger("fxguard")` has one record for each report; a healthy batch has none."""
    model = fxguard.instrument(Square(), on_detect=on_detect)
    model(torch.ones(2))
    assert not caplog.records
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model(BIG)
        except fxguard.NonFiniteError:
            assert on_detect == "raise"
    [record] = caplog.records
    report = fxguard.guard_of(model).last_report
    assert report is not None
    assert (record.name, record.levelname) == ("fxguard", level)
    assert record.getMessage() == report.one_line
    assert record.report is report  # type: ignore[attr-defined]


def test_without_logging_set_up_nothing_is_said_twice() -> None:
    """Python prints records that no handler takes; fxguard's have one that drops them."""
    program = (
        "import torch, fxguard, contextlib\n"
        "m = fxguard.instrument(torch.nn.Linear(2, 2))\n"
        "with contextlib.suppress(fxguard.NonFiniteError): m(torch.full((1, 2), torch.inf))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.stderr.count("Detected inf/nan") == 1
    assert not [line for line in ended.stderr.splitlines() if line.startswith("batch 0")]
    assert isinstance(logging.getLogger("fxguard").handlers[0], logging.NullHandler)


class Grown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e30 * 1e30  # grüße


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS: dict[str, Callable[[], object]] = {
    "ascii": lambda: io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True),
    "closed": closed,
    "none": lambda: None,
    "a pipe without a reader": Gone,
    "no stream": object,
}


@pytest.mark.parametrize("name", STREAMS)
def test_what_cannot_be_written_hides_no_exception(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an encoding without the letters of the source, nor a stream that is closed or missing."""
    model = fxguard.instrument(Grown())
    traced = fxguard.instrument(Grown(), trace_batch_nums=[1])
    model(torch.zeros(2)), traced(torch.zeros(2))  # torch itself needs a stream while it captures
    out, err = STREAMS[name](), STREAMS[name]()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    error = detected(model, torch.ones(2))
    traced(torch.ones(2))
    monkeypatch.undo()
    assert "grüße" in str(error)
    if isinstance(out, io.TextIOWrapper) and isinstance(err, io.TextIOWrapper):
        for stream in (out, err):
            assert "gr\\xfc\\xdfe" in stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def test_text_that_a_stream_takes_is_written_as_it_is() -> None:
    """The clean twin: letters stay letters where the encoding has them."""
    from fxguard.report import terminal

    for encoding, written in (("utf-8", "grüße"), ("ascii", r"gr\xfc\xdfe")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding)
        terminal.write("grüße", stream, flush=True)
        assert stream.buffer.getvalue().decode() == f"{written}\n"  # type: ignore[attr-defined]
