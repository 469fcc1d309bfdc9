"""A history is read by fxguard, and by pandas, polars and DuckDB as it is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import fxguard
from fxguard.errors import UsageError
from fxguard.history._series import Row, Series
from fxguard.history._stretches import COLUMNS
from fxguard.history._writer import Writer
from fxguard.report.event import Event
from fxguard.types import History, Track
from support.needs import needs

needs("pyarrow")

ROOT = Path(__file__).resolve().parents[2]
LOSS = Series("loss train.py:31", "loss", "loss", "train.py:31", 1)
MATMUL = Series("operation blocks.0 matmul gpt.py:31 #2", "operation", "blocks.0 matmul")
SPIKE = 5_000  # the step at which the loss is 8


def write(folder: Path, steps: int, ranks: int = 1) -> None:
    """A run whose loss falls from 4 towards 2, and whose largest product grows."""
    writers = [Writer(folder, rank=rank, about={"script": "train.py"}) for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        for series in (LOSS, MATMUL):
            writer.register(series)
        for step in range(writer.next_step, steps):
            loss = 8.0 if step == SPIKE else 2 + 2 / (1 + step)
            writer.add(Row(step, [loss, 1e-3], [loss, 1.0 + step + rank]))
        if not rank:
            writer.event(Event(SPIKE - 1, "data", "input 0", "train.py:20", lead=1))
        writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with_queries") / "history"
    write(folder, 9_000, ranks=2)
    return folder


def test_it_says_what_it_holds(folder: Path) -> None:
    history = fxguard.load_history(folder)
    assert isinstance(history, History)
    assert str(history) == (
        "steps 0 to 8999, 2 series, 2 ranks, 1 event\n"
        "step 4999 on rank 0: the data changed: input 0 (train.py:20); the loss moved 1 step later"
    )
    assert (history.ranks, history.runs) == ((0, 1), (0,))
    assert history.series == (MATMUL.name, LOSS.name)  # in the order of execution
    assert history.described[LOSS.name] == LOSS
    assert history.about == {0: {"script": "train.py"}}
    assert len(history.steps) == 9_000


def test_a_track_has_equally_long_columns(folder: Path) -> None:
    track = fxguard.load_history(folder).get(MATMUL.name)
    assert isinstance(track, Track)
    columns = [track.steps, track.last_steps, track.low, track.high, track.runs]
    assert {len(column) for column in columns} == {len(track)}
    assert (track.steps[-1], track.last_steps[-1], track.high[-1]) == (8_999, 8_999, 9_000.0)
    assert str(track) == f"{MATMUL.name}: {len(track)} rows of steps 0 to 8999, last 9000"
    assert fxguard.load_history(folder).get(MATMUL.name, 1).high[-1] == 9_001.0


def test_a_spike_of_one_step_outlives_thinning(folder: Path) -> None:
    """The largest of 16 steps is kept."""
    write(folder.with_name("long"), 20_000)
    track = fxguard.load_history(folder.with_name("long")).get(LOSS.name)
    [place] = [place for place, high in enumerate(track.high) if high == 8.0]
    assert track.last_steps[place] - track.steps[place] == 15
    assert track.steps[place] <= SPIKE <= track.last_steps[place]


def test_what_is_asked_for_must_be_there(folder: Path, tmp_path: Path) -> None:
    history = fxguard.load_history(folder)
    with pytest.raises(UsageError, match="has no series 'lost'"):
        history.get("lost")
    with pytest.raises(UsageError, match="has no rank 5"):
        history.get(LOSS.name, 5)
    with pytest.raises(UsageError, match="it holds no history of fxguard"):
        fxguard.load_history(tmp_path)
    with pytest.raises(FileNotFoundError):
        fxguard.load_history(tmp_path / "nowhere")


@pytest.mark.parametrize("data", [b"", b"PAR1" * 40])
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes) -> None:
    write(tmp_path, 10)
    [file] = tmp_path.glob("*.parquet")
    file.write_bytes(data)
    with pytest.raises(UsageError, match=rf"{file.name}: not a history of fxguard"):
        fxguard.load_history(tmp_path).get(LOSS.name)


def test_a_parquet_file_of_something_else_is_named(tmp_path: Path) -> None:
    pyarrow, parquet = needs("pyarrow"), needs("pyarrow.parquet")
    write(tmp_path, 10)
    [file] = tmp_path.glob("*.parquet")
    parquet.write_table(pyarrow.table({"step": [1, None]}), file)
    with pytest.raises(UsageError, match=rf"{file.name}: not a history of fxguard"):
        fxguard.load_history(tmp_path).get(LOSS.name)


def test_a_data_frame_has_all_rows(folder: Path) -> None:
    """Of both ranks, also those of an open stretch."""
    needs("pandas")
    frame = fxguard.load_history(folder).to_dataframe()
    columns = ["run", "rank", "step", "last_step", "series", "low", "high"]
    assert list(frame) == list(COLUMNS) == columns
    per_rank = frame[frame["series"] == MATMUL.name].groupby("rank")["high"].max()
    assert list(per_rank) == [9_000.0, 9_001.0]


def test_without_pandas_the_command_that_installs_it_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = fxguard.load_history(folder)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install pandas"):
        history.to_dataframe()


def test_it_is_read_without_torch(folder: Path) -> None:

    program = (
        f"import sys, fxguard; history = fxguard.load_history({str(folder)!r});"
        f"history.get({LOSS.name!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


THREADS = """
import os, sys
import pyarrow.parquet, pandas
def threads():
    return len(os.listdir("/proc/self/task"))
pyarrow.set_cpu_count(4)
before = threads()
import fxguard
history = fxguard.load_history(sys.argv[1])
history.get(sys.argv[2])
history.to_dataframe()
assert threads() == before, (before, threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads of Linux")
def test_no_thread_is_left_that_could_abort_the_process_at_its_end(folder: Path) -> None:
    """As pyarrow's threads do now and then: a training with a history would end with status -6."""
    needs("pandas")
    words = [sys.executable, "-c", THREADS, str(folder), LOSS.name]
    subprocess.run(words, cwd=ROOT, check=True, timeout=60)


def test_it_is_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are closed, thinned and removed meanwhile: each reading has each step once."""
    for module in ("_open_stretch", "_closing"):
        monkeypatch.setattr(f"fxguard.history.{module}.STRETCH", 16)
    ended = threading.Event()

    def train() -> None:
        writer = Writer(tmp_path, about={})
        writer.register(LOSS)
        for step in range(600):
            writer.add(Row(step, [1.0], [float(step)]))
            if not step % 8:
                writer.flush()
                time.sleep(0.03)
        writer.close()
        ended.set()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        before, readings = -1, 0
        while not ended.is_set() or not readings:
            if not any(tmp_path.glob("run*")):
                continue
            history = fxguard.load_history(tmp_path)
            if history.series:
                track = history.get(LOSS.name)
                pairs = zip(track.steps, track.last_steps, strict=True)
                steps = [step for first, last in pairs for step in range(first, last + 1)]
                assert steps == list(range(len(steps)))
                assert len(steps) > before
                before, readings = len(steps) - 1, readings + 1
    finally:
        thread.join()
    assert fxguard.load_history(tmp_path).steps == range(600)


def test_a_run_without_a_step_is_a_history(tmp_path: Path) -> None:
    """Its series have no rows, and its DataFrame has the columns alone."""
    needs("pandas")
    writer = Writer(tmp_path, about={})
    writer.register(LOSS)
    writer.flush()
    history = fxguard.load_history(tmp_path)
    assert str(history) == "no steps, 1 series, no events"
    assert len(history.get(LOSS.name)) == 0
    assert str(history.get(LOSS.name)) == f"{LOSS.name}: 0 rows"
    assert list(history.to_dataframe()) == list(COLUMNS)
    writer.close()
    assert str(fxguard.load_history(tmp_path)) == "no steps, 0 series, no events"
