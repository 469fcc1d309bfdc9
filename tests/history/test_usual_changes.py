"""Two batches, each operation beside what usually changes from step to step of its history."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxguard
from fxguard.history._operations import MOST
from fxguard.history._places import Place, detail_of, place_of, placed
from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from fxguard.types import Frame, Source
from support.command_line import status
from support.needs import needs
from support.schema import told

needs("pyarrow")

Printed = pytest.CaptureFixture[str]
VOCABULARY = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Beside the blocks it makes something that is often ten times as large as before."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        with torch.no_grad():
            self.tokens.weight[VOCABULARY // 2 :] *= 6
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, volume: Tensor) -> Tensor:
        x = self.tokens(ids)
        loud = x * volume
        for block in self.blocks:
            x = block(x)
        return self.head(x) + 0 * loud.mean()


def batch(step: int, foreign: bool = False, volume: float | None = None) -> tuple[Tensor, Tensor]:
    """Tokens of one half of the vocabulary, or foreign ones of the other half."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY // 2, (4, 16), generator=generator)
    drawn = 10 ** torch.randn((), generator=generator)
    return ids + foreign * VOCABULARY // 2, drawn if volume is None else torch.tensor(volume)


def train(model: nn.Module, called: Callable[..., Tensor], steps: int = 40) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids, volume = batch(step)
        logits = called(ids, volume)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def frames_of(model: nn.Module, called: Callable[..., Tensor], *args: Any) -> Sequence[Frame]:
    with torch.no_grad():
        called(*args)
    return fxguard.guard_of(model).frames()


@pytest.mark.parametrize("compiled", [False, True])
def test_foreign_data_before_what_changes_anyway(tmp_path: Path, compiled: bool) -> None:
    """The largest difference is a usual one; the embedding of foreign tokens is not."""
    torch.manual_seed(0)
    model = fxguard.instrument(Gpt(), history=tmp_path)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    train(model, called)
    usual = frames_of(model, called, *batch(100, volume=0.05))
    foreign = frames_of(model, called, *batch(101, foreign=True, volume=20.0))
    fxguard.remove(model)
    torch._dynamo.reset()
    without = fxguard.diff(usual, foreign)
    assert without.largest is not None
    assert without.largest.frame.kind in ("mul", "mean")
    found = fxguard.diff(usual, foreign, history=tmp_path)
    first = found.ranked[0]
    assert first.frame.title == "tokens Embedding"
    assert first.usual is not None
    assert first.times_usual is not None
    assert first.times_usual > 10
    assert first.usual.series.startswith("operation tokens embedding test_usual_changes.py:")
    assert (first.usual.steps, first.usual.as_large) == (39, 0)
    loud = next(match for match in found.ranked if match.frame.title == "mul")
    assert loud.distance > first.distance
    assert loud.times_usual is not None
    assert loud.times_usual < first.times_usual / 2
    # Every operation is found, once each; modules around several operations have no series.
    names = [each.usual.series for each in found.batches[0].matches if each.usual is not None]
    assert len(names) == len(set(names))
    lacking = [each.frame for each in found.batches[0].matches if each.usual is None]
    assert [frame.title for frame in lacking] == ["blocks.0 Block", "blocks.1 Block", "Gpt"]
    assert found.ranked[-3:] == [each for each in found.batches[0].differing if not each.usual]


def test_what_is_told(tmp_path: Path) -> None:
    """In the text, the table, the record and the page; without a history all is as it was."""
    torch.manual_seed(0)
    model = fxguard.instrument(Gpt(), history=tmp_path)
    train(model, model)
    frames = [frames_of(model, model, *batch(100 + i, foreign=i == 1)) for i in range(2)]
    fxguard.remove(model)
    found = fxguard.diff(*frames, history=fxguard.load_history(tmp_path))
    lines = found.verdict
    at = next(i for i, line in enumerate(lines) if line.startswith("changed most against what is"))
    assert lines[at].endswith("usual: tokens Embedding, batch 40 against 41")
    assert f"none of the last 39 changes in {tmp_path} was as large" in lines[at + 1]
    assert lines[at + 2] == "   times  A abs max  B abs max  usual"
    assert "x 1.07 " in lines[at + 3]
    assert "tokens Embedding  test_usual_" in lines[at + 3]
    assert f"ranked last, as {tmp_path} does not say what is usual for them: 3 modules" in lines
    assert not any(line.startswith("the largest difference") for line in lines)
    table = found.to_table().splitlines()
    assert "times the usual change" in table[0]
    assert "| tokens Embedding " in table[2]
    assert "| -  " in table[-1]
    record = json.loads(found.to_json())
    assert told("Diff", record) == []
    assert record["history"] == str(tmp_path)
    by_name = {each["operation"]: each["usual"] for each in record["batches"][0]["differing"]}
    assert by_name["Gpt"] is None
    embedding = by_name["tokens Embedding"]
    assert embedding["times"] == pytest.approx(embedding["change"] / embedding["usual_change"])
    assert "times its usual change" in found._page()
    without = fxguard.diff(*frames)
    assert without.history is None
    assert "usual change" not in str(without) + without._page()
    assert "usual change" not in without.to_table()
    assert without.ranked == without.batches[0].differing
    assert told("Diff", json.loads(without.to_json())) == []


def test_two_healthy_batches(tmp_path: Path) -> None:
    """The change that is largest against the usual one is not large."""
    torch.manual_seed(0)
    model = fxguard.instrument(Gpt(), history=tmp_path)
    train(model, model)
    frames = [frames_of(model, model, *batch(step)) for step in (100, 101)]
    fxguard.remove(model)
    first = fxguard.diff(*frames, history=tmp_path).ranked[0]
    assert first.times_usual is not None
    assert first.times_usual < 5


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, volume):
        return self.outer(self.inner(x).relu()) + 0 * (x * volume).sum()

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(30):
    x = torch.randn(32, 8)
    if step == 20:
        x[3] *= 50
    loss = nn.functional.cross_entropy(net(x, 10 ** torch.randn(())), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command(tmp_path: Path, capsys: Printed) -> None:
    """Batches of a trace, against the history of the same run: operations of the loss, too."""
    (tmp_path / "train.py").write_text(SCRIPT)
    history = tmp_path / "history"
    options = ["--history", history, "--trace-to", tmp_path, "--trace-batch-nums", "19,20"]
    done = run("-m", "fxguard", "run", *options, tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    (trace,) = tmp_path.glob("*.jsonl")
    asked = ["diff", str(trace), "--batches", "19,20", "--history", str(history)]
    assert status(*asked) == 1
    said = capsys.readouterr().out
    assert "changed most against what is usual: inner Linear, batch 19 against 20" in said
    assert "1 of the last 29 changes" in said or "2 of the last 29 changes" in said
    assert "of the backward or the step" in said
    assert status(*asked, "--json", "-") == 1
    record = json.loads(capsys.readouterr().out)
    assert told("Diff", record) == []
    known = {
        each["usual"]["series"]
        for each in record["batches"][0]["differing"]
        if each["usual"] is not None
    }
    assert any(name.startswith("operation cross_entropy train.py:") for name in known)
    assert status(*asked, "--format", "table") == 1
    assert "| inner Linear " in capsys.readouterr().out.splitlines()[2]
    assert status(*asked[:-1], str(tmp_path / "none")) == 2
    assert status(*asked[:-1], str(tmp_path)) == 2
    assert "it holds no history of fxguard" in capsys.readouterr().err


def test_the_history_of_another_model_is_said(tmp_path: Path) -> None:
    """Nothing is ranked, and the text says so; equal batches are told so as well."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU())
    nn.init.eye_(model[0].weight)  # 1 becomes 9 in it, and 0.84 becomes 9 in the GELU
    model = fxguard.instrument(model)
    frames = [frames_of(model, model, torch.full((2, 4), x)) for x in (1.0, 9.0)]
    history = write(tmp_path / "other", range(40))
    line = f"not ranked: {history} has no series of any operation of these batches; they are found "
    found = fxguard.diff(*frames, history=history)
    assert line + "by module, operation and line" in found.verdict
    assert any(line.startswith("the largest difference: ") for line in found.verdict)
    assert found.ranked == found.batches[0].differing
    same = fxguard.diff(frames[0], frames[0], history=history)
    assert same.agrees
    assert line + "by module, operation and line" in same.verdict


def test_without_pyarrow_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sentence that all of a history has; without a history nothing is asked for."""
    frames = [made("matmul", 2.0)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        fxguard.FxguardError, match=r"a history is kept with pyarrow: pip install 'fxguard\[hist"
    ):
        fxguard.diff(frames, frames, history=tmp_path)
    assert fxguard.diff(frames, frames).agrees


def test_it_needs_no_torch(tmp_path: Path) -> None:
    history = write(tmp_path / "h", range(40))
    program = (
        "import sys, fxguard\nfrom fxguard.types import Frame, Row\n"
        "a, b = ([Frame('', 'matmul', True, (Row('output', 0.0, x),))] for x in (1.0, 2.0))\n"
        f"fxguard.diff(a, b, history={str(history)!r})\nassert 'torch' not in sys.modules"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


# One series, and one operation.


def write(folder: Path, steps: range, number: Callable[[int], float] = float, **about: Any) -> Path:
    """A history of one series, whose largest magnitude is given by the step."""
    writer = Writer(folder, about={})
    writer.register(Series("operation matmul a.py:7", "operation", "matmul", "a.py:7"))
    for step in steps:
        writer.add(Row(step, [0.0], [number(step)]))
    writer.close()
    return folder


def made(
    kind: str, *largest: float, line: int = 7, name: str = "", phase: str = "forward"
) -> Frame:
    rows = tuple(fxguard.types.Row(f"output[{i}]", 0.0, x) for i, x in enumerate(largest))
    return Frame(name, kind, True, rows, Source("/x/a.py", line, "y = a @ b"), phase=phase)


def compared(folder: Path, a: float, b: float) -> fxguard.types.UsualChange:
    found = fxguard.diff([made("matmul", a)], [made("matmul", b)], history=folder)
    usual = found.batches[0].matches[0].usual
    assert usual is not None
    return usual


@pytest.mark.parametrize(
    ("number", "usual"),
    [
        (lambda step: 3.0, 0.1),  # the floor
        (lambda step: 2.0 ** (step % 2), 1.4826),  # up and down: the band would be just as wide
        (lambda step: 2.0 ** (3 * (step % 3 == 0)), 3 * 1.4826),  # two of three steps change
        (lambda step: 2.0 ** (0.01 * step), 0.1),  # a slow drift is no change from step to step
        (lambda step: 2.0 ** (5 * (step == 30)), 0.1),  # one spike is not usual
        (lambda step: math.nan if step % 2 else 2.0 ** (step // 2 % 2), 1.4826),
        (lambda step: math.inf, 0.1),  # a mask
        (lambda step: 0.0, 0.1),
    ],
)
def test_what_is_usual(tmp_path: Path, number: Callable[[int], float], usual: float) -> None:
    """1.4826 times the median of the changes in octaves, and at least 0.1."""
    folder = write(tmp_path / "h", range(100), number)
    found = compared(folder, 1.0, 4.0)
    assert (found.change, found.usual) == (2.0, pytest.approx(usual))
    assert found.times == pytest.approx(2 / usual)
    assert found.usual_factor == pytest.approx(2**usual)


def test_only_the_last_steps_count(tmp_path: Path) -> None:
    """64 changes of the last run in which they were measured; not the change between two runs."""
    folder = tmp_path / "h"
    write(folder, range(100), lambda step: 2.0 ** (5 * (step % 2)))
    write(folder, range(100, 140), lambda step: 1000.0)
    found = compared(folder, 1.0, 32.0)
    assert (found.steps, found.as_large) == (63, 24)
    write(folder, range(140, 240), lambda step: 1.0)
    assert (compared(folder, 1.0, 2.0).steps, compared(folder, 1.0, 2.0).as_large) == (64, 0)


def test_too_few_steps(tmp_path: Path) -> None:
    """The text says how many there are; nothing is ranked by them."""
    folder = write(tmp_path / "h", range(12))
    assert compared(folder, 1.0, 4.0).times is None
    found = fxguard.diff([made("matmul", 1.0)], [made("matmul", 4.0)], history=folder)
    few = f"not ranked: {folder} has 11 changes from step to step, too few to say what is usual"
    assert few in found.verdict
    assert told("Diff", json.loads(found.to_json())) == []
    assert compared(write(tmp_path / "more", range(13), lambda step: 1.0), 1.0, 4.0).times == 20


@pytest.mark.parametrize(
    ("a", "b", "change"),
    [
        (1.0, math.nan, math.inf),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (8.0, 1.0, 3.0),
        (0.0, 1.0, 200.0),
        (1.0, math.inf, 1100.0),
    ],
)
def test_changes_that_are_not_finite(tmp_path: Path, a: float, b: float, change: float) -> None:
    folder = write(tmp_path / "h", range(40), lambda step: 1.0)
    assert compared(folder, a, b).change == change
    found = fxguard.diff([made("matmul", a)], [made("matmul", b)], history=folder)
    assert told("Diff", json.loads(found.to_json())) == []
    assert str(found)
    assert found.to_table()


def test_the_largest_of_several_outputs(tmp_path: Path) -> None:
    """As a series has it."""
    folder = write(tmp_path / "h", range(40), lambda step: 1.0)
    pair = [made("matmul", 1.0, 8.0)], [made("matmul", 7.0, 16.0)]
    found = fxguard.diff(*pair, history=folder).batches[0].matches[0].usual
    assert found is not None
    assert found.change == 1.0


def test_only_the_same_operation_has_the_series(tmp_path: Path) -> None:
    """Not one of another line, of another module, of another kind, or a backward."""
    folder = write(tmp_path / "h", range(40), lambda step: 1.0)
    others = [
        made("matmul", 1.0, line=8),
        made("matmul", 1.0, name="block"),
        made("mul", 1.0),
        made("matmul", 1.0, phase="backward"),
    ]
    for frame in others:
        frames = [frame, made("add", 1.0)]
        found = fxguard.diff(frames, frames, history=folder)
        assert [match.usual for match in found.batches[0].matches] == [None, None]


def test_what_differs_has_no_series(tmp_path: Path) -> None:
    """Others have one: nothing is ranked, and the largest difference is shown as ever."""
    folder = write(tmp_path / "h", range(40), lambda step: 1.0)
    pair = [
        [made("matmul", 1.0), made("mul", x), made("add", x * x), made("mul", x, phase="backward")]
        for x in (1.0, 2.0)
    ]
    verdict = fxguard.diff(*pair, history=folder).verdict
    why = f"not ranked, as {folder} does not say what is usual for them: mul, add, "
    assert f"{why}1 frame of the backward or the step" in verdict
    assert "the largest difference: add, batch 0" in verdict


def test_a_wrapper_around_the_model(tmp_path: Path) -> None:
    """It adds a first part to the names of batches, or the history has it."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Tensor) -> Tensor:
            return self.module(*args)

    for place, wrap in enumerate((lambda model: model, Wrapper)):
        torch.manual_seed(0)
        model = wrap(Gpt())
        fxguard.instrument(model, history=tmp_path / str(place))
        train(model, model, 20)
        fxguard.remove(model)
    for place, wrap in enumerate((Wrapper, lambda model: model)):
        model = fxguard.instrument(wrap(Gpt()))
        frames = [frames_of(model, model, *batch(step)) for step in (100, 101)]
        found = fxguard.diff(*frames, history=tmp_path / str(place))
        usual = [match.usual for match in found.batches[0].matches if match.usual is not None]
        assert len(usual) == 24, place


class Loop(nn.Module):
    """One layer, several times, in one graph or in several."""

    def __init__(self, times: int, breaks: bool = False) -> None:
        super().__init__()
        self.layer, self.times, self.breaks = nn.Linear(8, 8), times, breaks

    def forward(self, x: Tensor) -> Tensor:
        for turn in range(self.times):
            x = self.layer(x) * (turn + 1)
            if self.breaks:
                torch._dynamo.graph_break()
        return x.tanh() - x.tanh()


@pytest.mark.parametrize("times", [3, MOST + 2])
def test_an_operation_that_runs_several_times(tmp_path: Path, times: int) -> None:
    """Each time has its own series, up to eight."""
    model = fxguard.instrument(Loop(times), history=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for _ in range(20):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    frames = [frames_of(model, model, torch.randn(4, 8)) for _ in range(2)]
    fxguard.remove(model)
    history = fxguard.load_history(tmp_path)
    for frame in fxguard.diff(*frames, history=history).batches[0].matches[:-1]:
        assert frame.usual is not None
    found = fxguard.diff(*frames, history=history).batches[0].matches
    series = [match.usual.series for match in found if match.usual and match.frame.kind == "mul"]
    details = [history.described[name].detail for name in series]
    assert details == ["", *(f"#{min(turn, MOST)}" for turn in range(2, times + 1))]


def test_places_and_details() -> None:
    places = [(which, run) for which in range(1, MOST + 1) for run in range(1, MOST + 1)]
    assert [place_of(detail_of(*place)) for place in places] == places
    assert detail_of(1, 1) == ""
    assert detail_of(2, 3) == "#2 run 3"


def grid(in_graph: int, runs: int) -> list[Place]:
    return [(which + 1, run + 1) for run in range(runs) for which in range(in_graph)]


@pytest.mark.parametrize(
    ("known", "count", "expected"),
    [
        (grid(1, 1), 1, [(1, 1)]),
        (grid(3, 1), 3, [(1, 1), (2, 1), (3, 1)]),
        (grid(3, 1), 2, [(1, 1), (2, 1)]),  # a loop of fewer turns than in another step
        (grid(2, 1), 4, [(1, 1), (2, 1)] * 2),  # two graphs, of which each has two
        (grid(2, 1), 3, [None] * 3),
        (grid(1, 3), 3, [(1, 1), (1, 2), (1, 3)]),
        (grid(1, 2), 3, [None] * 3),  # another graph and two runs of one: which is first?
        (grid(2, 2), 4, grid(2, 2)),
        (grid(2, 2), 3, [None] * 3),
        (grid(MOST, 1), MOST + 1, [*grid(MOST, 1), (MOST, 1)]),
        (grid(1, MOST), MOST + 1, [*grid(1, MOST), (1, MOST)]),
        ([], 1, [None]),
    ],
)
def test_where_an_operation_of_a_batch_has_its_series(
    known: list[Place], count: int, expected: list[Place | None]
) -> None:
    """Where nobody can tell which one it is, none is taken."""
    assert [placed(index, count, known) for index in range(count)] == expected
