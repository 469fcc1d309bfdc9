"""Traces in files: what was printed before, to keep."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import fxguard
from fxguard import load_trace
from fxguard.cli import main
from fxguard.trace.writer import TraceWriter
from fxguard.types import Frame, Row, Source, TracedBatch
from support import zoo
from support.exp_net import Net, X


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rounded(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"


def comparable(frames: Any) -> list[Any]:
    """Frames, with the numbers as they stand in a file."""

    def as_written(row: Row) -> tuple[str, ...]:
        return row.label, rounded(row.abs_min), rounded(row.abs_max), row.note, row.dtype

    return [(dataclasses.replace(f, rows=()), [as_written(row) for row in f.rows]) for f in frames]


def test_traced_batches_are_written_and_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every frame of each, with the numbers that were measured."""
    entry = zoo.ZOO["bert"]
    model = fxguard.instrument(entry.model(), trace_batch_nums=[0, 2], trace_to=tmp_path / "deep")
    args, kwargs = entry.inputs(torch.float32, True)
    wanted = []
    for number in range(4):
        model(*args, **kwargs)
        if number in (0, 2):
            wanted.append(comparable(fxguard.guard_of(model).frames()))
    assert capsys.readouterr().out == ""
    [name] = files(tmp_path / "deep")
    trace = load_trace(tmp_path / "deep" / name)
    assert (trace.model, trace.rank, trace.torch) == (type(model).__name__, None, torch.__version__)
    assert [batch.number for batch in trace.batches] == [0, 2]
    assert [comparable(batch.frames) for batch in trace.batches] == wanted
    assert not trace.cut
    text = (tmp_path / "deep" / name).read_text()
    assert text.count('"plan"') == 1  # the frames are listed once


def test_a_detection_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its whole batch, with the verdict; the report is printed as without a trace."""
    model = fxguard.instrument(Net(), trace_to=str(tmp_path))
    guard = fxguard.guard_of(model)
    guard.optimizer_step = 7
    model(X)
    assert not list(tmp_path.iterdir())
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(X, scale=1e4)
    assert "Detected inf/nan during batch_number=1" in capsys.readouterr().err
    [batch] = load_trace(tmp_path / "Net-0.jsonl").batches
    assert (batch.number, batch.optimizer_step) == (1, 7)
    assert list(batch.verdict) == caught.value.report.verdict
    assert [frame.title for frame in batch.frames] == ["linear Linear", "mul", "exp", "Net"]
    assert batch.frames[2].rows[-1].abs_max == math.inf


class InScores(nn.Module):
    """The operation to blame is measured in a second run only."""

    def forward(self, x: Tensor) -> Tensor:
        q = (x * 30).expand(1, 1, 16, 16)

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            weight = torch.exp(value * 20)
            return weight - weight * 2

        return flex_attention(q, q, q, score_mod=score) + 1


class Weight(Net):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.linear.weight[0, 0] = math.nan


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("model", [InScores, Weight])
def test_the_frames_to_blame(tmp_path: Path, model: type[nn.Module], replay: bool) -> None:
    """Are those of the report, also where a second run had to look into an operation."""
    options = {"on_detect": lambda report: None, "trace_to": tmp_path, "replay": replay}
    guarded = fxguard.instrument(model(), **options)
    guarded(torch.ones(16) if model is InScores else X)
    guard = fxguard.guard_of(guarded)
    report = guard.last_report
    assert report is not None
    [batch] = load_trace(tmp_path / f"{model.__name__}-0.jsonl").batches
    blamed = [batch.frames[index] for index in batch.blamed]
    assert comparable(blamed) == comparable(origin.frame for origin in report.origins)
    assert comparable(batch.frames) == comparable(guard.frames())


def test_the_same_fault_is_written_once(tmp_path: Path) -> None:
    """A loop that goes on after each detection does not fill the disk."""
    model = fxguard.instrument(Net(), on_detect=lambda report: None, trace_to=tmp_path)
    for _ in range(5):
        model(X, scale=1e4)
    model(X * math.nan)
    assert [batch.number for batch in load_trace(tmp_path / "Net-0.jsonl").batches] == [0, 5]


def test_other_frames_are_another_plan(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, squared: bool) -> Tensor:
            return x * x if squared else x + 1

    model = fxguard.instrument(Two(), trace_batch_nums=range(4), trace_to=tmp_path)
    for squared in (True, False, True, False):
        model(X, squared)
    trace = load_trace(tmp_path / "Two-0.jsonl")
    assert [batch.frames[0].kind for batch in trace.batches] == ["mul", "add", "mul", "add"]
    assert (tmp_path / "Two-0.jsonl").read_text().count('"plan"') == 2


@pytest.mark.parametrize("replay", [False, True])
def test_a_forward_that_raises(tmp_path: Path, replay: bool) -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(x.log())

    model = fxguard.instrument(Raises(), trace_to=tmp_path, replay=replay)
    with pytest.raises(fxguard.NonFiniteError):
        model(-torch.eye(2))
    [batch] = load_trace(tmp_path / "Raises-0.jsonl").batches
    assert batch.verdict[0].startswith("log made")
    assert batch.frames[0].kind == "log"


def test_what_a_trace_says(tmp_path: Path) -> None:
    """What was found; whether results are finite; what came nearest to the limit of its dtype."""

    class Root(nn.Module):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            kept = torch.where(x > 0, x.log(), x)  # the infinity is thrown away
            return (kept + 2) * scale

    x = torch.tensor([0.0, 1.0], dtype=torch.float16)
    model = fxguard.instrument(Root(), trace_batch_nums=[0, 1], trace_to=tmp_path)
    model(x, 4094.0)
    trace = load_trace(tmp_path / "Root-0.jsonl")
    assert trace.is_healthy
    assert trace.verdict[0] == "the model returned finite numbers"
    assert trace.verdict[1].startswith("1 frame holds inf or NaN, the first is log, batch 0 (")
    assert trace.verdict[2].startswith("nearest to its limit: mul, batch 0 (")
    assert trace.verdict[3] == "  it made 8188; float16 holds 8 times that, 3.0 bits of headroom"
    model(x, 1e5)
    trace = load_trace(tmp_path / "Root-0.jsonl")
    assert not trace.is_healthy
    assert trace.verdict[0] == "batch 1: the model returned inf or NaN"
    found = fxguard.instrument(Root(), on_detect=lambda report: None, trace_to=tmp_path)
    found(x, 1e5)
    trace = load_trace(tmp_path / "Root-1.jsonl")
    assert not trace.is_healthy
    assert trace.verdict[0].startswith("batch 0: mul made inf (")


def test_several_threads(tmp_path: Path) -> None:
    """Each batch is in one piece, whoever else writes."""
    writer = TraceWriter(tmp_path, "Net", "2.13.0")
    row = Row("output", 0.0, 1.0)

    def work(thread: int) -> None:
        for number in range(20):
            names = (f"{thread}.{number % 3}.{i}" for i in range(300))
            frames = tuple(Frame(name, "mul", True, (row,)) for name in names)
            writer.write(TracedBatch(100 * thread + number, frames), None)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batches = load_trace(tmp_path / "Net-0.jsonl").batches
    assert len(batches) == 80
    for batch in batches:
        thread, number = divmod(batch.number, 100)
        assert batch.frames[7].name == f"{thread}.{number % 3}.7"


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """Each guarded model has a file of its own, and so has the next run."""
    for _ in range(3):
        fxguard.instrument(Net(), trace_batch_nums=[0], trace_to=tmp_path)(X)
    assert files(tmp_path) == ["Net-0.jsonl", "Net-1.jsonl", "Net-2.jsonl"]
    TraceWriter(tmp_path, "Net", "2.13.0").write(TracedBatch(0, ()), 3)
    assert load_trace(tmp_path / "Net-0-rank3.jsonl").rank == 3


def test_a_disk_that_is_full_ends_no_training(tmp_path: Path) -> None:
    """The report comes all the same."""
    (tmp_path / "traces").mkdir()
    model = fxguard.instrument(Net(), trace_to=tmp_path / "traces")
    (tmp_path / "traces").rmdir()
    (tmp_path / "traces").write_text("now a file")
    with (
        pytest.warns(RuntimeWarning, match="the trace could not be written"),
        pytest.raises(fxguard.NonFiniteError, match="exp made inf"),
    ):
        model(X, scale=1e4)


@pytest.mark.parametrize("trace_to", [3, __file__])
def test_what_is_no_folder(trace_to: Any) -> None:
    with pytest.raises(fxguard.FxguardError, match="trace_to has to be a folder"):
        fxguard.instrument(Net(), trace_to=trace_to)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfor _ in range(3): torch.nn.Linear(2, 2)(torch.ones(2, 2))\n")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    options = ["--trace-to", str(tmp_path / "traces"), "--trace-batch-nums", "0"]
    assert main.main(["run", *options, str(script)]) == 0
    assert files(tmp_path / "traces") == ["Linear-0.jsonl", "Linear-1.jsonl", "Linear-2.jsonl"]
    assert main.main(["run", "--trace-to", str(script), str(script)]) == 2


# The file itself.

numbers = st.floats(min_value=0) | st.just(math.nan)
rows = st.one_of(
    st.builds(Row, st.text(), numbers, numbers, dtype=st.text()),
    st.builds(Row, st.text(), note=st.text(min_size=1), dtype=st.text()),
)
sources = st.none() | st.builds(Source, st.text(), st.integers(0, 10**6), st.text())
frames = st.builds(
    Frame, st.text(), st.text(), st.booleans(), st.lists(rows, max_size=4).map(tuple), sources
)


@settings(max_examples=60, database=None, deadline=None)
@given(batches=st.lists(st.lists(frames, max_size=4), min_size=1, max_size=3), verdict=st.text())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Frame]], verdict: str
) -> None:
    """Any names, code, notes and numbers: quotes, line breaks, NaN and all of Unicode."""
    folder = tmp_path_factory.mktemp("traces")
    writer = TraceWriter(folder, "Net", "2.13.0")
    for number, listed in enumerate(batches):
        writer.write(TracedBatch(number, tuple(listed), None, (verdict,)), None)
    trace = load_trace(folder / "Net-0.jsonl")
    for number, (batch, listed) in enumerate(zip(trace.batches, batches, strict=True)):
        numbered = [
            dataclasses.replace(frame, batch_number=number, index=index)
            for index, frame in enumerate(listed)
        ]
        assert comparable(batch.frames) == comparable(numbered)
        assert batch.verdict == (verdict,)


def written(folder: Path) -> Path:
    model = fxguard.instrument(Net(), trace_batch_nums=[0, 1, 2], trace_to=folder)
    for _ in range(3):
        model(X)
    return folder / "Net-0.jsonl"


def test_a_crash_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """What stands before it is read, wherever the file ends."""
    path = written(tmp_path)
    data = path.read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    for end in range(last + 1, len(data), 7):
        path.write_bytes(data[:end])
        trace = load_trace(path)
        assert [batch.number for batch in trace.batches] == [0, 1]
        assert trace.cut
    path.write_bytes(data)
    assert not load_trace(path).cut


def test_read_without_torch(tmp_path: Path) -> None:
    path = written(tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None; import fxguard\n"
        f"print(len(fxguard.load_trace({str(path)!r}).batches))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "3\n", ran.stderr


HEAD = '{"fxguard_trace":1,"model":"Net","rank":null,"torch":"2.13.0"}\n'
PLAN = (
    '{"plan":0,"sources":[["a.py",1,"x"]],"dtypes":["float16"],'
    '"frames":[["","mul",1,0,["output"],[0]]]}\n'
)


def test_the_parts_of_the_next_test_are_well(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(HEAD + PLAN + '{"batch":5,"of_plan":0,"rows":[[0,"inf"]]}\n')
    [batch] = load_trace(path).batches
    assert batch.frames[0].rows == (Row("output", 0.0, math.inf, dtype="float16"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("\n", ":1: not a trace"),
        ("\x00\xff\n", ":1: not a trace"),
        ("[1]\n", "is not of type dict"),
        ('{"a": 1}\n', "the first line does not say that it is one"),
        (HEAD.replace(":1,", ":9,"), "schema 9, and this version of fxguard reads 1"),
        ('{"fxguard_trace":1}\n', "lacks 'rank'"),
        (HEAD.replace('"Net"', "3"), "'3' is not of type str"),
        (HEAD + "{\n", ":2: not a trace"),
        (HEAD + "[" * 100_000 + "\n", ":2: not a trace"),
        (HEAD + '{"batch":0,"of_plan":0,"rows":[]}\n', ":2: not a trace of fxguard: lacks 0"),
        (HEAD + PLAN.replace("1,0,[", "1,7,["), "there is no source 7"),
        (HEAD + PLAN.replace("1,0,[", "1,-1,["), "there is no source -1"),
        (HEAD + PLAN.replace("[0]]]", "[1]]]"), "there is no dtype 1"),
        (HEAD + PLAN.replace("[0]]]", "[]]]"), ":2: not a trace"),
        (HEAD + PLAN.replace('["output"]', '"output"'), "is not of type list"),
        (HEAD + PLAN.replace('"mul"', '{"$eval": "exit()"}'), "is not of type str"),
        (HEAD + PLAN + '{"batch":0,"of_plan":0,"rows":[]}\n', "other rows than its plan"),
        (HEAD + PLAN + '{"batch":0,"of_plan":0,"rows":[[1]]}\n', ":3: not a trace"),
        (HEAD + PLAN + '{"batch":0,"of_plan":0,"rows":[[1,"huge"]]}\n', "lacks 'huge'"),
        (HEAD + PLAN + '{"batch":0,"of_plan":0,"rows":[[-1,1]]}\n', "cannot be negative, got -1"),
        (HEAD + PLAN + '{"batch":0,"of_plan":0,"rows":[[1,true]]}\n', "is not of type float"),
        (HEAD + PLAN + '{"batch":"0","of_plan":0,"rows":[[1,1]]}\n', "is not of type int"),
    ],
)
def test_damaged_and_hostile_files(tmp_path: Path, text: str, message: str) -> None:
    """A clear error that names file and line."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(fxguard.FxguardError) as caught:
        load_trace(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "none.jsonl")


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    """Other programs read it: no NaN and no Infinity, which JSON does not have."""
    model = fxguard.instrument(Net(), on_detect=lambda report: None, trace_to=tmp_path)
    model(X * math.nan)
    model(X, scale=1e4)

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    lines = (tmp_path / "Net-0.jsonl").read_text().splitlines()
    numbers = [json.loads(line, parse_constant=refuse) for line in lines]
    assert {"nan", "inf"} <= set(re.findall("nan|inf", str(numbers).lower()))


@pytest.mark.campaign
def test_a_deep_model_stays_under_a_megabyte(tmp_path: Path) -> None:
    """48 layers, with the list of frames."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=48,
        num_attention_heads=4,
    )
    model = fxguard.instrument(LlamaForCausalLM(config), trace_batch_nums=[0, 1], trace_to=tmp_path)
    ids = torch.arange(16).view(1, 16)
    model(ids, labels=ids)
    [path] = tmp_path.iterdir()
    first = path.stat().st_size
    model(ids, labels=ids)
    second = path.stat().st_size - first
    print(f"{len(load_trace(path).batches[0].frames)} frames: {first} bytes, then {second}")
    assert first < 1_000_000
    assert second < first
