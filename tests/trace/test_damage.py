"""Traces that cannot be written whole, and files that somebody else has made or damaged."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxguard
from fxguard import load_trace
from fxguard.cli import main
from fxguard.report.load import load_report
from fxguard.trace.writer import TraceWriter
from fxguard.types import Frame, Row, Source, TracedBatch
from support.exp_net import Net, X
from support.needs import OF_PYTHON_3_13_0


def numbers(path: Path) -> list[int]:
    return [batch.number for batch in load_trace(path).batches]


# Writing.


def batches(names: str) -> list[TracedBatch]:
    """A batch for each letter: those of one letter have one plan."""
    return [
        TracedBatch(number, (Frame(name, "mul", True, (Row("output", 0.5, 2.0),) * 9),))
        for number, name in enumerate(names)
    ]


class FullDisk:
    """Lets only so many bytes through, as a quota does: what fits is written, then it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        opened = Path.open

        def limited(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = opened(path, mode, *args, **kwargs)
            if "+" not in mode or self.left is None:
                return file
            write, left = file.write, self.left

            class Limited:
                def __enter__(self) -> Any:
                    return self

                def __exit__(self, *error: object) -> None:
                    file.close()

                def __getattr__(self, name: str) -> Any:
                    return getattr(file, name)

                def write(self, data: bytes) -> None:
                    write(data[:left])
                    file.flush()
                    if left < len(data):
                        raise OSError(28, "No space left on device")

            return Limited()

        monkeypatch.setattr(Path, "open", limited)


@pytest.mark.parametrize("fits", [0, 1, 40, 100])
@pytest.mark.parametrize("names", ["aaa", "aba", "abb", "abc"])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_line_that_was_not_written_whole_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, fails: int, fits: int
) -> None:
    """Wherever a disk is full, batches before and after are readable, with their own frames."""
    disk = FullDisk(monkeypatch)
    writer = TraceWriter(tmp_path, "Net", "2.13.0")
    for batch in batches(names):
        disk.left = fits if batch.number == fails else None
        if batch.number == fails:
            with pytest.raises(OSError, match="No space"):
                writer.write(batch, None)
        else:
            writer.write(batch, None)
        if writer.path is not None:
            assert not load_trace(writer.path).cut
    (path,) = tmp_path.iterdir()
    found = load_trace(path).batches
    assert [(b.number, b.frames[0].name) for b in found] == [
        (number, name) for number, name in enumerate(names) if number != fails
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of the operating system there")
def test_a_limit_of_the_operating_system(tmp_path: Path) -> None:
    """The same, with a limit that Linux itself enforces."""
    program = f"""
import resource, signal, warnings, torch, fxguard
model = torch.nn.Linear(4, 4)
fxguard.instrument(model, trace_to={str(tmp_path)!r}, trace_batch_nums=range(9))
model(torch.ones(1, 4))
path = fxguard.guard_of(model).trace_path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model(torch.ones(1, 4))
assert "could not be written" in str(caught[-1].message)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
model(torch.ones(1, 4))
print([batch.number for batch in fxguard.load_trace(path).batches])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "[0, 2]\n", ran.stderr


def test_a_file_that_somebody_took_away_is_begun_again(tmp_path: Path) -> None:
    """A new file has a head and plans of its own; one that was cut is left alone."""
    one, two, three = batches("aaa")
    writer = TraceWriter(tmp_path, "Net", "2.13.0")
    writer.write(one, None)
    (tmp_path / "Net-0.jsonl").unlink()
    writer.write(two, None)
    assert numbers(tmp_path / "Net-0.jsonl") == [1]
    (tmp_path / "Net-0.jsonl").write_text("cut")
    writer.write(three, None)
    assert numbers(tmp_path / "Net-1.jsonl") == [2]
    assert (tmp_path / "Net-0.jsonl").read_text() == "cut"


NAMES = [
    "../../escaped",
    "/root/x",
    "a\\b",
    "nul\0",
    "..",
    "",
    "n" * 300,
    "ü" * 300,
    "a:b*?",
    "\ud800",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_no_class_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Whatever a class is called: one file, in its folder; the trace itself has the name."""
    folder = tmp_path / "a" / "b"
    TraceWriter(folder, name, "2.13.0").write(batches("a")[0], 3)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert path.parent == folder
    assert path.name.endswith("-0-rank3.jsonl")
    assert not set(path.name) & set('<>:"/\\|?*\0')
    assert not path.name.startswith(".")
    assert load_trace(path).model == name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Also where another thread was writing when the process was forked."""
    writer = TraceWriter(tmp_path, "Net", "2.13.0")
    one, two, three = batches("aaa")
    writer.write(one, None)
    with writer.lock:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                writer.write(two, None)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    writer.write(three, None)
    assert numbers(tmp_path / "Net-0.jsonl") == [0, 2]
    assert numbers(tmp_path / "Net-1.jsonl") == [1]


@pytest.mark.filterwarnings("error", f"ignore:{OF_PYTHON_3_13_0}")
def test_a_warning_that_is_an_error_hides_no_report(tmp_path: Path) -> None:
    """Under `python -W error`, a trace that cannot be written leaves the detection what it is."""
    for on_detect in ("raise", "call"):
        reports: list[fxguard.types.Report] = []
        folder = tmp_path / on_detect
        folder.mkdir()
        model = fxguard.instrument(
            Net(), trace_to=folder, on_detect="raise" if on_detect == "raise" else reports.append
        )
        folder.rmdir()
        folder.write_text("now a file")
        if on_detect == "raise":
            with pytest.raises(fxguard.NonFiniteError, match="exp made inf") as caught:
                model(X, scale=1e4)
            assert "could not be written" in str(caught.value.__cause__)
        else:
            with pytest.raises(RuntimeWarning, match="could not be written"):
                model(X, scale=1e4)
            assert len(reports) == 1


# Reading.


def test_what_is_no_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder, a circle of links, and a file that is not there: one line, and status 2."""
    for ending in (".jsonl", ".json"):
        circle, folder = tmp_path / f"circle{ending}", tmp_path / f"folder{ending}"
        circle.symlink_to(circle.name)
        folder.mkdir()
        for path in (circle, folder):
            with pytest.raises(fxguard.FxguardError, match="cannot be read"):
                load_report(path) if ending == ".json" else load_trace(path)
            assert main.main(["diff", str(path), str(path)]) == 2
        assert main.main(["report", str(circle)]) == 2
    capsys.readouterr()
    assert main.main(["diff", str(tmp_path / "missing.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err


HOSTILE: list[Any] = [
    *(None, True, -1, 0, 7, 10**400, -0.5, 1e308, math.nan, math.inf),
    *("", "nan", "x", "</script>", "\ud800", "\x1b[2J"),
    *([], [1], [None], [[]], ["a", "b", "c"], {}, {"a": 1}),
]


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in JSON."""
    yield at
    if isinstance(data, (dict, list)):
        for key, item in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(item, (*at, key))


def changed(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    result = copy.copy(data)
    result[at[0]] = changed(data[at[0]], at[1:], value)
    return result


def a_trace() -> list[Any]:
    rows = (Row("weight", 0.1, 2.0, dtype="float32"), Row("output", 0.0, math.inf, dtype="float16"))
    frames = (
        Frame("a", "mul", True, rows, Source("/x/model.py", 3, "x * y"), 0, 0),
        Frame("", "Net", False, (Row("output", note="not a tensor"),), None, 0, 1),
    )
    lines: list[Any] = []

    class Kept(TraceWriter):
        def _append(self, text: bytes, rank: int | None) -> None:
            self.path = Path("unwritten")
            lines.extend(json.loads(line) for line in text.decode().splitlines())

        def _is_gone(self) -> bool:
            return False

    writer = Kept(Path(), "Net", "2.13.0")
    writer.write(TracedBatch(0, frames, 3, ("mul in a made inf", "  more"), (0,)), None)
    writer.write(TracedBatch(1, frames[::-1]), None)
    return lines


TRACE = a_trace()
PLACES = [at for at in places(TRACE) if at]


def look_at(path: Path, folder: Path, other: Path) -> bool:
    """Everything that reads a trace; whether it was one."""
    try:
        trace = load_trace(path)
        trace.to_html(folder / "page.html")
        assert isinstance("\n".join([*trace.verdict, trace._repr_html_()]), str)
    except fxguard.FxguardError:
        assert main.main(["report", str(path)]) == 2
        assert main.main(["diff", str(path), str(other)]) == 2
        return False
    assert main.main(["report", str(path), "-o", str(folder / "page.html")]) == 0
    for a, b in ((path, other), (other, path), (path, path)):
        for form in (["--format", "text"], ["--format", "table"], ["--json", "-"]):
            more = [*form, "--html", str(folder / "diff.html")]
            assert main.main(["diff", str(a), str(b), *more]) in (0, 1, 2)
    return True


@pytest.mark.parametrize(
    "count", [150, pytest.param(None, marks=pytest.mark.campaign)], ids=["sample", "campaign"]
)
def test_every_place_of_a_trace_with_something_else_in_it(
    tmp_path: Path, count: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong type, an absurd number: an error with status 2, or a page; never a traceback."""
    other, path = tmp_path / "other.jsonl", tmp_path / "trace.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    assert look_at(other, tmp_path, other)
    cases = [(at, value) for at in PLACES for value in HOSTILE]
    if count is not None:
        cases = random.Random(0).sample(cases, count)
    well = 0
    for at, value in cases:
        lines = changed(TRACE, at, value)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            well += look_at(path, tmp_path, other)
        except Exception as error:
            raise AssertionError(f"{value!r} at {at}: {error!r}") from error
        capsys.readouterr()
    assert 0 < well < len(cases)


@settings(max_examples=200, database=None, deadline=None)
@given(where=st.integers(0, 10**6), bits=st.integers(1, 255), what=st.sampled_from("xdi"))
def test_every_byte_of_a_trace_with_another_one_in_it(
    tmp_path_factory: pytest.TempPathFactory, where: int, bits: int, what: str
) -> None:
    """A byte that was flipped, lost or doubled."""
    data = bytearray("".join(json.dumps(line) + "\n" for line in TRACE).encode())
    where %= len(data)
    if what == "x":
        data[where] ^= bits
    elif what == "d":
        del data[where]
    else:
        data.insert(where, bits)
    folder = tmp_path_factory.getbasetemp()
    path = folder / "bytes.jsonl"
    path.write_bytes(data)
    said = str(path)
    try:
        load_trace(path).to_html(folder / "bytes.html")
    except fxguard.FxguardError as error:
        said = str(error)
    assert str(path) in said or "without a batch" in said


def test_every_place_of_a_report_with_something_else_in_it(tmp_path: Path) -> None:
    """Reports in JSON likewise."""
    found: list[fxguard.types.Report] = []
    fxguard.instrument(Net(), on_detect=found.append)(X, scale=1e4)
    data = json.loads(found[0].to_json())
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    assert load_report(path) == found[0]
    cases = [(at, value) for at in places(data) for value in HOSTILE]
    for at, value in random.Random(0).sample(cases, 300):
        path.write_text(json.dumps(changed(data, at, value)))
        try:
            load_report(path).to_html(tmp_path / "page.html")
        except fxguard.FxguardError:
            pass
        except Exception as error:
            raise AssertionError(f"{value!r} at {at}: {error!r}") from error
