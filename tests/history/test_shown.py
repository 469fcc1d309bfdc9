"""What ``fxguard history`` shows of a training run: events, the series that tell them, JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import fxguard
from fxguard.history._series import Row, Series
from fxguard.history._telling import telling
from fxguard.history._writer import Writer
from fxguard.report.event import Event
from support.command_line import status
from support.histories import CAUSE, LOSS, write_history
from support.needs import needs
from support.schema import told

needs("pyarrow")

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def jump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_history(tmp_path_factory.mktemp("histories") / "jump", 300, jump=200)


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_history(tmp_path_factory.mktemp("histories") / "well", 300)


def test_an_event_and_the_series_that_tell_it(jump: Path, capsys: Printed) -> None:
    """What it names first, then what left its band, and the loss; the step is marked."""
    assert status("history", str(jump)) == 3
    headline, *lines = capsys.readouterr().out.splitlines()
    assert headline == (
        f"step 200: {CAUSE} (train.py:40) was written by something else than the optimizer; the "
        "loss moved 1 step later"
    )
    assert lines[:2] == [
        f"  {CAUSE} is 30 times as large as in the step before",
        "  the batch before gives 11.3 with these weights: it is not the batch",
    ]
    assert lines[2].split() == (
        ["series", "before", "after", "steps", "168", "to", "215,", "│", "begins", "step", "200"]
    )
    shown = {line[: line.index("   ", 2)].strip(): line for line in lines[3:]}
    assert list(shown)[:2] == [f"drift {CAUSE}", f"weight {CAUSE}"]
    assert LOSS in shown
    assert len(shown) <= 6
    before, after, drawn = shown[f"weight {CAUSE}"].split()[-3:]
    assert 8 < float(before) < 9
    assert 200 < float(after) < 300
    assert drawn.partition("│")[0] == "▁" * 32
    assert drawn.partition("│")[2][0] == "█"


def test_a_healthy_run_shows_its_loss(well: Path, capsys: Printed) -> None:
    assert status("history", str(well)) == 0
    first, heads, loss = capsys.readouterr().out.splitlines()
    assert first == f"no event in 300 steps of {len(fxguard.load_history(well).series)} series"
    assert heads.split() == ["series", "first", "median", "last", "all", "steps"]
    assert loss.strip().startswith(LOSS)
    assert loss.split()[-1].startswith("█")
    assert loss.endswith("▁")


def test_series_by_a_glob(well: Path, capsys: Printed) -> None:
    """First, median and last number; a part of a name is enough, and nothing at all is said."""
    assert status("history", str(well), "--series", "weight *") == 0
    *_, heads, one, two, three, four, five, six = capsys.readouterr().out.splitlines()
    assert heads.split()[0] == "series"
    for line in (one, two, three, four, five, six):
        first, middle, last = map(float, line.split()[2:5])
        assert first == 8.0
        assert first < middle < last < 9
    assert status("history", str(well), "--series", "blocks.2 softmax") == 0
    assert capsys.readouterr().out.count("\n") == 6
    assert status("history", str(well), "--series", "nothing like this") == 2
    assert "has no series that matches 'nothing like this'" in capsys.readouterr().err


def test_records(jump: Path, well: Path, tmp_path: Path, capsys: Printed) -> None:
    """Strict JSON that the schema describes; ``-`` is stdout, in place of the text."""
    for folder, events in ((jump, 1), (well, 0)):
        assert status("history", str(folder), "--json", "-", "--series", "loss*") == 3 * events
        record = json.loads(capsys.readouterr().out)
        assert told("History", record) == told("", record) == []
        assert len(record["events"]) == events
        assert [each["name"] for each in record["series"]] == [LOSS]
        assert (record["first_step"], record["last_step"]) == (0, 299)
        history = fxguard.load_history(folder)
        assert record["verdict"] == history.verdict
        assert told("History", json.loads(history.to_json())) == []
    assert status("history", str(jump), "--json", str(tmp_path / "record.json")) == 3
    record = json.loads((tmp_path / "record.json").read_text())
    [event] = record["events"]
    [weight] = [each for each in event["series"] if each["series"] == f"weight {CAUSE}"]
    assert weight["after_step"] == 200
    assert weight["deviations"] > 40
    assert weight["steps"][weight["high"].index(weight["after"])] == 200


def event_of(cause: str, step: int, what: str) -> Event:
    return Event(step, cause, what)  # type: ignore[arg-type]


def test_several_events_stand_below_each_other(tmp_path: Path, capsys: Printed) -> None:
    writer = Writer(tmp_path, about={})
    writer.register(Series("loss loss a.py:1", "loss", "loss", "a.py:1"))
    for step in range(100):
        writer.add(Row(step, [1.0], [9.0 if step in (40, 80) else 1.0]))
    for step in (40, 80):
        writer.event(event_of("data", step, "input x"))
    writer.close()
    assert status("history", str(tmp_path)) == 3
    printed = capsys.readouterr().out
    assert printed.startswith("2 events in 100 steps of 1 series; the first at step 40\n\nstep 40:")
    assert "\n\nstep 80: the data changed: input x\n" in printed
    assert printed.count("│█") == 2


@pytest.mark.parametrize("after", [math.inf, 0.0, math.nan])
def test_numbers_that_have_no_logarithm(tmp_path: Path, capsys: Printed, after: float) -> None:
    """An infinity, a zero, nothing measured: each is shown as it is, in text and as JSON."""
    writer = Writer(tmp_path, about={})
    writer.register(Series("loss loss a.py:1", "loss", "loss", "a.py:1"))
    for step in range(100):
        number = after if step >= 80 else 2.0 + step % 2
        writer.add(Row(step, [number], [number]))
    writer.event(event_of("unknown", 80, "the loss"))
    writer.close()
    assert status("history", str(tmp_path)) == 3
    line = capsys.readouterr().out.splitlines()[-1]
    if not math.isnan(after):
        assert f" {after:.3g}  ".replace("inf", "inf or NaN") in line
    assert status("history", str(tmp_path), "--json", "-") == 3
    assert told("", json.loads(capsys.readouterr().out)) == []


def test_a_climb_is_shown_from_far_before(tmp_path: Path) -> None:
    """A jump is seen in 32 steps; a series that doubles every 400 steps is not."""
    name = "operation blocks.0 matmul a.py:1"
    writer = Writer(tmp_path, about={})
    writer.register(Series(name, "operation", "blocks.0 matmul", "a.py:1"))
    for step in range(1500):
        number = 2 ** (step / 400)
        writer.add(Row(step, [number], [number]))
    writer.close()
    tracks = [fxguard.load_history(tmp_path).get(name)]
    [climb] = telling(event_of("growth", 1400, "blocks.0 matmul"), tracks)
    [other] = telling(event_of("operation", 1400, "blocks.0 matmul"), tracks)
    assert (climb.steps[0], other.steps[0]) == (0, 1400 - 32)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "no such file: nowhere"),
        (["."], "holds no history of fxguard"),
        (["FILE"], "it is no folder"),
        (["JUMP", "FILE"], "it is no folder"),
        (["JUMP", "--tolerance", "0.1"], "--tolerance is for two histories"),
        (["JUMP", "--open"], "--html FILE.html says where"),
        (["JUMP", "JUMP", "--html", "x.html"], "--html shows one history"),
        (["JUMP", "--html", "nowhere/x.html"], "the page could not be written"),
        (["JUMP", "--json", "nowhere/x.json"], "the record could not be written"),
    ],
)
def test_wrong_use(
    jump: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Printed,
    words: list[str],
    problem: str,
) -> None:
    """One line, and status 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    assert status("history", *(str(jump) if word == "JUMP" else word for word in words)) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def test_names_of_others_command_no_terminal(tmp_path: Path, capsys: Printed) -> None:
    """A name is in the folder of somebody else."""
    writer = Writer(tmp_path, about={})
    writer.register(Series("loss \x1b]0;owned\x07", "loss", "loss"))
    for step in range(40):
        writer.add(Row(step, [1.0], [1.0]))
    writer.event(Event(30, "data", "\x1b[2Jinput x"))
    writer.close()
    assert status("history", str(tmp_path), "--series", "*") == 3
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b]0;owned\\x07" in printed


def test_the_text_needs_no_torch(jump: Path) -> None:
    program = (
        "import sys\nfrom fxguard.cli.main import main\n"
        f"main(['history', {str(jump)!r}])\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "False"


def test_a_notebook_shows_the_page(jump: Path, tmp_path: Path) -> None:
    history = fxguard.load_history(jump)
    shown = history._repr_html_()
    assert history.verdict[0] in shown
    assert "<iframe" in shown
    history.to_html(tmp_path / "page.html")
    assert "<!doctype html>" in (tmp_path / "page.html").read_text("utf-8")


def test_a_rank_by_its_number(tmp_path: Path, capsys: Printed) -> None:
    """Without it, the series of an event are those of a rank that saw it."""
    for rank in range(2):
        writer = Writer(tmp_path, rank=rank, about={})
        writer.register(Series("loss loss a.py:1", "loss", "loss", "a.py:1"))
        for step in range(80):
            number = 50.0 if (rank, step) == (1, 70) else 2.0 + rank
            writer.add(Row(writer.next_step, [number], [number]))
        if rank:
            writer.event(event_of("data", 150, "loss"))
        writer.close()
    folder = str(tmp_path)

    def row(*words: str) -> list[str]:
        assert status("history", folder, *words) == 3
        found = capsys.readouterr().out.splitlines()
        assert found[0] == "step 150: the data changed: loss"
        assert found[-1] == "2 ranks, resumed at step 80"
        return found[2].split() if found[1].startswith("  series") else []

    assert row()[3:5] == ["3", "50"]
    assert row("--rank", "1")[3:5] == ["3", "50"]
    assert row("--rank", "0") == []
    assert status("history", folder, "--rank", "0", "--series", "loss") == 3
    assert capsys.readouterr().out.splitlines()[-1].split()[3:6] == ["2", "2", "2"]
    assert status("history", folder, "--rank", "2") == 2
    assert "has no rank 2" in capsys.readouterr().err
    assert status("history", folder, folder, "--rank", "0") == 2
    assert "--rank shows one history" in capsys.readouterr().err
    assert status("history", folder, "--json", "-") == 3
    record = json.loads(capsys.readouterr().out)
    assert told("History", record) == []
    assert (record["ranks"], record["resumed"]) == ([0, 1], [80])
    assert record["events"][0]["ranks"] == []  # rank 0 had no such step
