"""A history is kept whatever happens: crashes, full disks, several ranks, runs that go on."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fxguard.errors import UsageError
from fxguard.history import _open_stretch, _stream
from fxguard.history._files import Stretch, listed
from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer, need_pyarrow
from fxguard.history.history import History, load_history
from fxguard.report.event import Event
from support.needs import needs

needs("pyarrow")

NAN = math.nan
LOSS = Series("loss train.py:31", "loss", "loss", "train.py:31")


def named(position: int) -> Series:
    return Series(f"operation blocks.{position} matmul", "operation", "matmul", order=position)


def value(step: int, position: int = 0) -> float:
    """What the tests write: any number, but the same each time."""
    return random.Random(f"{step} {position}").lognormvariate(0, 2)


def row(step: int, count: int = 1) -> Row:
    high = [value(step, position) for position in range(count)]
    return Row(step, [number / 2 for number in high], high)


def write(
    folder: Path, steps: range, *, rank: int = 0, count: int = 1, close: bool = True
) -> Writer:
    writer = Writer(folder, rank=rank, about={"script": "train.py"})
    for position in range(count):
        assert writer.register(named(position)) == position
    for step in steps:
        writer.add(row(step, count))
    writer.close() if close else writer.flush()
    return writer


def highs(history: History, position: int = 0, rank: int | None = None) -> dict[int, float]:
    """Of rows that are one step each."""
    track = history.get(named(position).name, rank)
    assert list(track.steps) == list(track.last_steps)
    assert len(set(track.steps)) == len(track)
    return dict(zip(track.steps, track.high, strict=True))


def expected(steps: range, position: int = 0) -> dict[int, float]:
    return {step: value(step, position) for step in steps}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """A warning is an error, but where a test expects it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """Stretches of 64 steps, so that thinning needs no hour."""
    for module in ("_open_stretch", "_closing"):
        monkeypatch.setattr(f"fxguard.history.{module}.STRETCH", 64)
    return 64


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Every number of every step, from the open stretch and from the closed one."""
    writer = write(tmp_path, range(100), count=3, close=False)
    while_open = load_history(tmp_path)
    writer.close()
    for history in (while_open, load_history(tmp_path)):
        assert history.steps == range(100)
        assert history.series == tuple(named(position).name for position in range(3))
        for position in range(3):
            assert highs(history, position) == expected(range(100), position)
            low = history.get(named(position).name).low
            assert list(low) == [value(step, position) / 2 for step in range(100)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "meta.json",
        "run0-rank0-000000000000-000000000099.parquet",
    ]


def test_a_stretch_is_closed_at_multiples_of_its_length(tmp_path: Path, short: int) -> None:
    """The stream of the open one begins where the file of the closed one ends."""
    write(tmp_path, range(130), close=False)
    found, covered = listed(tmp_path)
    assert found == [Stretch(0, 0, 0, 63), Stretch(0, 0, 64, 127), Stretch(0, 0, 128)]
    assert covered == []


def test_a_series_may_begin_late_and_miss_steps(tmp_path: Path) -> None:
    """NaN in both is left out; a row may end before the last series."""
    writer = Writer(tmp_path, about={})
    assert writer.register(named(0)) == 0
    writer.add(Row(0, [1.0], [2.0]))
    assert writer.register(named(1)) == 1
    assert writer.register(named(0)) == 0
    writer.add(Row(1, [1.0, NAN], [2.0, NAN]))
    writer.add(Row(2, [1.0, NAN], [2.0, math.inf]))
    writer.add(Row(3, [5.0], [6.0]))
    for _ in range(2):
        history = load_history(tmp_path) if writer.flush() is None else None
        assert history is not None
        assert list(history.get(named(0).name).steps) == [0, 1, 2, 3]
        late = history.get(named(1).name)
        assert list(late.steps) == [2]
        assert math.isnan(late.low[0])
        assert late.high[0] == math.inf
        writer.close()


def test_a_run_that_is_resumed_goes_on(tmp_path: Path) -> None:
    """With the next step and the next run; series continue under their names."""
    first = write(tmp_path, range(10), count=2)
    assert first.next_step == 10
    again = Writer(tmp_path, about={"script": "other.py"})
    assert (again.next_step, again.run) == (10, 1)
    assert again.register(named(1)) == 0  # in another order
    for step in range(10, 20):
        again.add(Row(step, [0.0], [value(step, 1)]))
    again.close()
    history = load_history(tmp_path)
    assert history.runs == (0, 1)
    assert history.about[1] == {"script": "other.py"}
    assert highs(history, 1) == expected(range(20), 1)
    assert highs(history, 0) == expected(range(10), 0)
    assert list(history.get(named(1).name).runs) == [0] * 10 + [1] * 10


def test_two_ranks_write_into_one_folder(tmp_path: Path) -> None:
    """In one run, and in one again when it is resumed; both begin at the same step."""
    for run, first in enumerate((0, 7)):
        writers = [Writer(tmp_path, rank=rank, about={}) for rank in (0, 1)]
        assert {(each.run, each.next_step) for each in writers} == {(run, first)}
        for rank, each in enumerate(writers):
            each.register(named(0))
            for step in range(first, first + 6 + rank):  # rank 0 is killed a step earlier
                each.add(Row(step, [0.0], [100.0 * rank + step]))
        for each in writers:
            each.close()
    history = load_history(tmp_path)
    assert history.ranks == (0, 1)
    assert sorted(highs(history, rank=0).values()) == [*range(6), *range(7, 13)]
    assert sorted(highs(history, rank=1).values()) == [100 + step for step in range(14)]
    assert history.get(named(0).name).rank == 0


def test_two_programs_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    """A second training with the same folder is a run of its own, and disturbs nothing."""
    one = write(tmp_path, range(5), close=False)
    other = write(tmp_path, range(5, 8), close=False)
    one.add(row(8))
    one.close()
    other.close()
    assert (one.run, other.run) == (0, 1)
    assert highs(load_history(tmp_path)) == expected(range(9))


def test_a_stream_may_end_at_any_byte(tmp_path: Path) -> None:
    """What stands before the cut is read, and the next run closes it and goes on behind it."""
    write(tmp_path / "whole", range(3), count=2, close=False).forked()
    [stream] = [file for file in (tmp_path / "whole").iterdir() if file.suffix == ".stream"]
    data = stream.read_bytes()
    seen = set()
    for size in range(len(data) + 1):
        folder = tmp_path / "cut"
        folder.mkdir()
        shutil.copy(tmp_path / "whole" / "meta.json", folder)
        (folder / stream.name).write_bytes(data[:size])
        history = load_history(folder)
        steps = history.steps
        assert steps == range(len(steps))
        for position in range(2):
            if steps:
                assert highs(history, position) == expected(steps, position)
        writer = Writer(folder, about={})
        assert writer.next_step == len(steps)
        writer.close()
        assert not list(folder.glob("*.stream"))
        assert load_history(folder).steps == steps
        if steps:
            assert highs(load_history(folder)) == expected(steps)
        seen.add(len(steps))
        shutil.rmtree(folder)
    assert seen == {0, 1, 2, 3}


def test_a_damaged_record_ends_a_stream(tmp_path: Path) -> None:
    """A checksum tells; what stands before it is kept."""
    write(tmp_path, range(3), close=False).forked()
    [stream] = tmp_path.glob("*.stream")
    data = bytearray(stream.read_bytes())
    data[-1] ^= 1
    stream.write_bytes(data)
    assert highs(load_history(tmp_path)) == expected(range(2))


def check_thinned(history: History, position: int, count: int, stretch: int) -> None:
    """Each row holds the smallest and largest of its steps; the last ones are in full."""
    track = history.get(named(position).name)
    lengths = []
    at = 0
    for first, last, low, high in zip(
        track.steps, track.last_steps, track.low, track.high, strict=True
    ):
        assert first == at
        numbers = [value(step, position) for step in range(first, last + 1)]
        assert high == max(numbers)
        assert low == min(numbers) / 2
        length = last + 1 - first
        assert length in (1, 16, 256, 4096)
        assert first % length == 0
        assert length == 1 or first < count - stretch * length // 16
        lengths.append(length)
        at = last + 1
    assert at == count
    assert lengths == sorted(lengths, reverse=True)
    for length in (1, 16, 256):  # of each the newest `stretch` rows, and up to that many more
        if count > 4 * stretch * length:
            assert stretch <= lengths.count(length) <= 2 * stretch


@pytest.mark.parametrize("count", [100, 640, 6_400])
def test_old_steps_are_thinned(tmp_path: Path, short: int, count: int) -> None:
    """The smallest and largest of every 16, then 256 steps, while it runs and after it."""
    writer = write(tmp_path, range(count), count=2, close=False)
    for _ in range(2):
        history = load_history(tmp_path)
        for position in range(2):
            check_thinned(history, position, count, short)
        writer.close()
    assert len(list(tmp_path.iterdir())) < 80


def test_old_runs_are_thinned_by_later_ones(tmp_path: Path, short: int) -> None:
    """A run that was resumed many times takes no more room."""
    for first in range(0, 2_000, 100):
        assert write(tmp_path, range(first, first + 100)).next_step == first + 100
    track = load_history(tmp_path).get(named(0).name)
    assert len(track) < 400
    steps = [
        step
        for first, last in zip(track.steps, track.last_steps, strict=True)
        for step in range(first, last + 1)
    ]
    assert steps == list(range(2_000))


def test_a_file_that_others_cover_counts_no_more(tmp_path: Path, short: int) -> None:
    """A crash between a new file and the removal of what it replaces shows no step twice."""
    write(tmp_path, range(64 * 34), close=False).forked()
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.parquet")}
    whole = load_history(tmp_path).get(named(0).name)
    writer = Writer(tmp_path, about={})
    writer.register(named(0))
    for step in range(64 * 34, 64 * 40):
        writer.add(row(step))
    merged = load_history(tmp_path).get(named(0).name)
    assert len(merged) < len(whole) + 6 * 64
    for name, data in before.items():
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes(data)
    assert load_history(tmp_path).get(named(0).name).steps == merged.steps
    for step in range(64 * 40, 64 * 42):
        writer.add(row(step))
    writer.close()
    _, covered = listed(tmp_path)
    assert covered == []


@pytest.mark.parametrize("data", [b"", b"PAR1" * 40])
def test_a_damaged_file_of_an_earlier_run_does_not_end_a_history(
    tmp_path: Path, short: int, data: bytes
) -> None:
    """It stays as it is; what comes later is kept and thinned."""
    write(tmp_path, range(64))
    [damaged] = tmp_path.glob("*.parquet")
    damaged.write_bytes(data)
    write(tmp_path, range(64, 640))
    assert damaged.read_bytes() == data
    damaged.unlink()
    track = load_history(tmp_path).get(named(0).name)
    assert (track.steps[0], track.last_steps[0], track.last_steps[-1]) == (64, 79, 639)


def test_events_are_kept_at_once(tmp_path: Path) -> None:
    """In order of their steps, also where the program ends without a word."""
    writer = write(tmp_path, range(5), close=False)
    late = Event(4, "data", "input 0", "train.py:3", 2, ("mean 0.1, usually 0.5",))
    early = Event(1, "step", "learning rate of AdamW's step")
    for event in (late, early):
        writer.event(event)
    writer.add(row(5))
    writer.forked()
    history = load_history(tmp_path)
    assert history.events == (early, late)
    assert str(history).splitlines() == [
        "steps 0 to 4, 1 series, 2 events",
        "step 1: learning rate of AdamW's step changed",
        "step 4: the data changed: input 0 (train.py:3); the loss moved 2 steps later",
    ]


def test_an_event_is_told_again_with_what_was_tried(tmp_path: Path) -> None:
    """The later one replaces the earlier; a line that a crash has cut off is left out."""
    writer = Writer(tmp_path, about={})
    event = Event(4, "data", "input 0")
    writer.event(event)
    file = tmp_path / "events-rank0.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 5, "cau')
    tried = Event(4, "data", "input 0", tried=("without sample 3 this one gives 2.4",))
    writer.event(tried)
    writer.close()
    assert load_history(tmp_path).events == (tried,)


def test_what_killed_programs_were_writing_is_removed(tmp_path: Path) -> None:
    """Once it is old: another program may be writing now."""
    left = [tmp_path / f".run0-rank{rank}-000000000000.stream.ab.part" for rank in (0, 0, 1, 10)]
    left[1] = tmp_path / ".run1-rank0-000000000000-000000000009.parquet.part"
    for file in left:
        file.write_bytes(b"")
    for file in left[1:]:
        os.utime(file, (0, 0))
    write(tmp_path, range(3))
    assert [file.exists() for file in left] == [True, False, True, True]


def full(*args: object, **kwargs: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_history_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, and what was written stays readable."""
    writer = write(tmp_path, range(5), close=False)
    write_some = os.write

    def nearly_full(descriptor: int, data: memoryview) -> int:
        if len(data) > 10:
            return write_some(descriptor, data[:10])
        return full()

    monkeypatch.setattr(_open_stretch.os, "write", nearly_full)
    writer.add(row(5))
    with pytest.warns(RuntimeWarning, match="the history in .* ends here: .*No space left") as told:
        writer.flush()
    for step in range(6, 9):
        writer.add(row(step))
    writer.event(Event(6, "data", "input 0"))
    writer.flush()
    writer.close()
    assert len(told) == 1
    monkeypatch.undo()
    assert highs(load_history(tmp_path)) == expected(range(5))
    assert Writer(tmp_path, about={}).next_step == 5


def test_a_disk_that_is_full_when_a_stretch_closes_loses_nothing(
    tmp_path: Path, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream stays, and no half of a Parquet file."""
    writer = write(tmp_path, range(63), close=False)
    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        writer.add(row(63))
    writer.add(row(64))
    monkeypatch.undo()
    assert highs(load_history(tmp_path)) == expected(range(64))
    assert len(list(tmp_path.iterdir())) == 2


def break_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def replace_stream(folder: Path) -> None:
    [stream] = folder.glob("*.stream")
    stream.rename(folder / "elsewhere")
    stream.write_bytes(b"")


@pytest.mark.parametrize("harm", [break_folder, replace_stream])
def test_a_folder_that_is_gone_ends_the_history_alone(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """One warning; the folder is not made again."""
    folder = tmp_path / "history"
    writer = write(folder, range(5), close=False)
    harm(folder)
    writer.add(row(5))
    with pytest.warns(RuntimeWarning, match="ends here"):
        writer.flush()
    for step in range(6, 9):
        writer.add(row(step))
        writer.flush()
    writer.close()
    assert writer.broke_off
    assert [file for file in folder.glob("*") if file.suffix == ".parquet"] == []


@pytest.mark.parametrize("text", ["{", "[]", '{"fxguard_history": 2}'])
def test_a_folder_of_another_version_is_left_alone(tmp_path: Path, text: str) -> None:
    """One warning when it begins, and no more; to read it is an error."""
    (tmp_path / "meta.json").write_text(text)
    with pytest.warns(RuntimeWarning, match=r"meta.json: not a history of fxguard"):
        writer = Writer(tmp_path, about={})
    assert writer.next_step == 0
    assert writer.register(LOSS) == 0
    writer.add(Row(0, [1.0], [1.0]))
    writer.close()
    assert (tmp_path / "meta.json").read_text() == text
    with pytest.raises(UsageError, match=r"meta.json: not a history of fxguard"):
        load_history(tmp_path)


def test_a_folder_that_cannot_be_made_ends_the_history_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="ends here"):
        writer = Writer(tmp_path / "file" / "history", about={})
    writer.add(Row(0, [], []))
    writer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    """Workers that load data leave the files to the training."""
    writer = write(tmp_path, range(5), close=False)
    writer.add(row(5))
    child = os.fork()
    if not child:
        writer.add(row(6))
        writer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.add(row(6))
    writer.close()
    assert highs(load_history(tmp_path)) == expected(range(7))


def test_threads_write_one_after_the_other(tmp_path: Path) -> None:
    """No row is lost or torn."""
    writer = Writer(tmp_path, about={})
    writer.register(named(0))
    steps = iter(range(400))
    lock = threading.Lock()

    def work() -> None:
        for _ in range(100):
            with lock:
                writer.add(row(next(steps)))
            writer.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert highs(load_history(tmp_path)) == expected(range(400))


def test_without_pyarrow_the_command_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'fxguard\[history\]'"):
        need_pyarrow()


def test_no_pyarrow_before_a_stretch_closes(tmp_path: Path) -> None:
    """Importing and writing leave it alone."""
    program = (
        "import sys; from fxguard.history._writer import Writer;"
        "from fxguard.history._series import Row;"
        f"writer = Writer({str(tmp_path)!r}, about={{}}); writer.add(Row(0, [], []));"
        "writer.flush(); assert 'pyarrow' not in sys.modules"
    )
    root = str(Path(_stream.__file__).parents[2])
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=60)


def test_a_row_of_300_series_is_cheap(tmp_path: Path) -> None:
    """At most 60 microseconds on average; four times that here, on a busy machine."""
    writer = write(tmp_path, range(0), count=300, close=False)
    rows = [row(step, 300) for step in range(100)]
    taken = []
    for turn in range(5):
        begun = time.perf_counter()
        for step, each in enumerate(rows, 100 * turn):
            writer.add(Row(step, each.low, each.high))
        taken.append((time.perf_counter() - begun) / len(rows))
    writer.close()
    assert min(taken) < 240e-6


@pytest.mark.parametrize("odd", ["\ud800", "caf\u00e9 \U0001f600", "a\x00b", "\u2028\r\n", "'\"\\"])
def test_odd_names_of_series(odd: str, tmp_path: Path) -> None:
    """A lone surrogate is written out, and all else stays as it is."""
    name = f"loss {odd}"
    writer = Writer(tmp_path, about={"script": odd})
    writer.register(Series(name, "loss", odd, odd))
    for step in range(5):
        writer.add(Row(step, [1.0], [2.0]))
    writer.flush()
    for _ in range(2):  # while it is written, and afterwards
        history = load_history(tmp_path)
        (found,) = history.series
        assert found == ("loss \\ud800" if odd == "\ud800" else name)
        assert len(history.get(found)) == 5
        assert history.described[found].what == found.removeprefix("loss ")
        history.to_html(tmp_path / "page.html")
        assert history.lines()
        writer.close()
    assert [path.suffix for path in tmp_path.glob("run0*")] == [".parquet"]
