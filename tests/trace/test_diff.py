"""Two traces next to each other: the first operation where they part, then the largest."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard import diff
from fxguard.records import RowRole
from fxguard.trace.batch_diff import Match
from fxguard.trace.writer import TraceWriter
from fxguard.types import Frame, Row, TracedBatch
from support import zoo
from support.residual_net import Block, Net, X

INF, NAN = math.inf, math.nan


def frames_of(model: nn.Module, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
    """Every frame of one call."""
    torch.manual_seed(0)
    fxguard.instrument(model, on_detect=lambda report: None)
    called = model if backend is None else torch.compile(model, backend=backend)
    called(*args, **kwargs)
    found = fxguard.guard_of(model).frames()
    fxguard.remove(model)
    torch._dynamo.reset()
    return found


IN_CI = [("lstm", torch.bfloat16), ("containers", torch.float16)]
LOW = [
    pytest.param(name, dtype, marks=() if (name, dtype) in IN_CI else pytest.mark.campaign)
    for name in ("bert", "mixtral", "lstm", "encoder", "containers")
    for dtype in (torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("name", "dtype"), LOW)
def test_rounding_is_no_difference(name: str, dtype: torch.dtype) -> None:
    """A healthy model in half precision, and compiled, next to itself in float32."""
    entry = zoo.ZOO[name]
    torch.manual_seed(0)
    model = entry.model().eval()
    args, kwargs = entry.inputs(torch.float32, False)
    plain = frames_of(model, *args, **kwargs)
    compiled = diff(plain, frames_of(model, *args, backend="aot_eager", **kwargs))
    assert str(compiled).splitlines()[3].startswith("ranges agree: 0 of")
    assert compiled.agrees
    args, kwargs = entry.inputs(dtype, False)
    found = diff(plain, frames_of(model.to(dtype), *args, **kwargs))
    assert not found.differs, str(found)
    assert len(found.batches[0].aligned) == len(plain)
    assert diff(plain, plain, tolerance=0).first is None


def test_an_overflow_in_float16() -> None:
    """The first operation that is infinite in one of them, with what both read and made."""
    entry = zoo.ZOO["t5"]
    torch.manual_seed(0)
    model = entry.model().eval()
    with torch.no_grad():
        model.encoder.block[1].layer[1].DenseReluDense.wi_1.weight.mul_(3e5)
    args, kwargs = entry.inputs(torch.float32, False)
    plain = frames_of(model, *args, **kwargs)
    args, kwargs = entry.inputs(torch.float16, False)
    found = diff(plain, frames_of(model.half(), *args, **kwargs))
    assert found.first is not None
    # The weight itself is beyond what float16 holds.
    assert found.first.frame.title == "encoder.block.1.layer.1.DenseReluDense.wi_1 Linear"
    assert found.first.distance == INF
    assert "its weight differs already" in str(found)


def test_a_checkpoint_that_changed() -> None:
    """The module whose weight differs; what stands before it is the same."""
    model, other = Net(), Net()
    with torch.no_grad():
        other.blocks[1].linear.weight[0, 0] += 2
    found = diff(frames_of(model, X), frames_of(other, X))
    assert found.first is not None
    assert found.first.frame.title == "blocks.1.linear Linear"
    assert [pair.a.label for pair in found.first.of(RowRole.PARAMETER) if pair.differs] == [
        "weight"
    ]
    assert [match.differs for match in found.batches[0].matches[:4]] == [False] * 4
    assert "they part at blocks.1.linear Linear, batch 0\n  its weight differs already" in str(
        found
    )


def test_other_inputs() -> None:
    """The report says that the models were given something else."""
    found = diff(frames_of(Net(), X), frames_of(Net(), X * 3))
    assert found.first is found.batches[0].differing[0]
    assert "the models were given something else: input[0]" in str(found)


def test_an_operation_that_computes_something_else() -> None:
    class Other(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) + x * 1.5

    other = Net()
    other.blocks[2] = copy.deepcopy(other.blocks[2])
    other.blocks[2].__class__ = Other
    found = diff(frames_of(Net(), X), frames_of(other, X))
    assert found.first is not None
    assert found.first.frame.title == "blocks.2 add"
    [alone] = found.batches[0].only_in_b
    assert alone.frame.title == "blocks.2 mul"
    assert "what it read differs already: input[1]; nothing that could" in str(found)
    assert "only in B: blocks.2 mul" in str(found)


def test_graph_breaks() -> None:
    """The same operations between graphs and in one."""

    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.linear(x))
            torch._dynamo.graph_break()
            return hidden + x

    other = Net()
    other.blocks[1].__class__ = Broken
    found = diff(frames_of(Net(), X), frames_of(other, X), tolerance=0)
    batch = found.batches[0]
    assert not found.differs
    assert not batch.only_in_a
    assert not batch.only_in_b
    assert all(match.compared for match in batch.aligned)
    assert [m.renamed_to for m in batch.aligned if m.renamed_to] == ["blocks.1 Broken"]
    assert "renamed: blocks.1 Block -> blocks.1 Broken" in str(found)


# Numbers.


def row(low: float | None, high: float | None, dtype: str = "float32") -> Row:
    return Row("output", low, high, dtype=dtype)


def batch(number: int, value: float, dtype: str = "float32") -> TracedBatch:
    made = row(0.0, value, dtype)
    return TracedBatch(number, (Frame("a", "mul", True, (made,)), Frame("", "Net", False, (made,))))


@pytest.mark.parametrize(
    ("dtypes", "allowed"),
    [
        (("float64", "float64"), 1e-5),
        (("float32", "float64"), 1e-4),
        (("float32", "float16"), 1e-2),
        (("bfloat16", "float16"), 5e-2),
        (("float8_e4m3fn", "float32"), 0.5),
        (("int64", "int64"), 1e-4),
    ],
)
def test_tolerance_by_dtype(dtypes: tuple[str, str], allowed: float) -> None:
    """By the coarsest; another one where it is given."""
    for far, differs in ((allowed * 0.9, False), (allowed * 1.1, True)):
        pair = batch(0, 1.0, dtypes[0]), batch(0, 1 - far, dtypes[1])
        assert diff(*pair).differs is differs
        assert not diff(*pair, tolerance=1.0).differs
    assert diff(batch(0, 1.0), batch(0, 1.0 + 1e-6), tolerance=0).differs


def test_batches_are_paired_by_number() -> None:
    """The first difference is that of the earliest batch, the largest may be of a later one."""
    numbers = (3, 5, 8)
    a = fxguard.types.Trace("Net", None, "2.13.0", tuple(batch(n, 1.0) for n in numbers))
    b = fxguard.types.Trace("Net", None, "2.13.0", (batch(5, 1.1), batch(7, 9.0), batch(8, 4.0)))
    found = diff(a, b)
    assert [(pair.a.number, pair.b.number) for pair in found.batches] == [(5, 5), (8, 8)]
    assert found.first is found.batches[0].matches[0]
    assert found.largest is found.batches[1].matches[0]
    assert "they part at a mul, batch 5\n" in str(found)
    assert "the largest difference: a mul, batch 8\n" in str(found)
    assert "4 of 4 compared frames differ in 2 batches" in str(found)
    assert "batch 3 against 9" in str(diff(batch(3, 1.0), batch(9, 2.0)))
    with pytest.raises(fxguard.FxguardError, match="no batch is in both traces: one has 3, 5, 8"):
        diff(a, fxguard.types.Trace("Net", None, "2.13.0", (batch(1, 1.0), batch(2, 1.0))))
    with pytest.raises(fxguard.FxguardError, match="the second trace has no batch"):
        diff(a, fxguard.types.Trace("Net", None, "2.13.0", ()))


def test_nothing_to_compare() -> None:
    """Is not said to be the same."""
    note = TracedBatch(0, (Frame("a", "mul", True, (Row("output", note="not measured"),)),))
    for other in (note, batch(0, 1.0)):
        found = diff(note, other)
        assert found.verdict[0] == (
            "nothing could be compared: of 1 frames in both, none has numbers in both"
        )
        assert not found.differs
        assert not found.agrees


def test_traces_of_two_programs(tmp_path: Path) -> None:
    """Nothing is in both: that is said, what there is is listed."""
    paths = []
    for name, kind in (("encoder", "softmax"), ("head.3", "conv2d")):
        frames = (Frame(name, kind, True, (Row("output", 0.0, 1.0, dtype="float32"),)),)
        TraceWriter(tmp_path, kind, "2.13.0").write(TracedBatch(0, frames), None)
        paths.append(str(tmp_path / f"{kind}-0.jsonl"))
    assert diff(*paths).verdict == [
        "nothing could be compared: no frame is in both",
        "only in A: encoder softmax",
        "only in B: head.3 conv2d",
    ]
    assert not diff(*paths).agrees


def test_what_agrees_is_the_ranges() -> None:
    """Elements in another order have the same range: the words claim no more than was compared."""
    x = torch.tensor([1.0, 2.0, 3.0])
    frames = [frames_of(Turned(turns), x) for turns in range(3)]
    assert not torch.equal(Turned(0)(x), Turned(1)(x))
    found = diff(frames[0], frames[1])
    assert found.agrees
    assert found.verdict[0].startswith("ranges agree: 0 of ")
    assert found.verdict[1] == ("compared: smallest and largest magnitudes; not compared: elements")
    assert found.verdict[1] in diff(frames[0], frames[2]).verdict
    assert "no difference" not in str(found)


def test_compare_sees_what_ranges_do_not() -> None:
    """The same elements in another order are found at the operation that turned them."""
    found = fxguard.compare(Turned(0), Turned(1), torch.tensor([1.0, 2.0, 3.0]))
    assert found.ranges.agrees
    assert found.first is not None
    assert found.first.kind == "roll"


class Turned(nn.Module):
    """The same numbers in another order; from two turns on, others."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        return (torch.roll(x, self.turns) + 1) * (2 if self.turns > 1 else 1)


@pytest.mark.parametrize("wrong", [3, [1, 2], None])
def test_what_is_no_trace(wrong: Any) -> None:
    with pytest.raises(fxguard.FxguardError, match="diff takes traces, batches of traces, files"):
        diff(wrong, batch(0, 1.0))


@pytest.mark.parametrize("tolerance", [-1.0, NAN])
def test_a_tolerance_that_cannot_be(tolerance: float) -> None:
    with pytest.raises(fxguard.FxguardError, match="tolerance has to be 0 or more"):
        diff(batch(0, 1.0), batch(0, 1.0), tolerance=tolerance)


def test_rows_that_a_graph_numbers_otherwise() -> None:
    """By order, where there are as many."""
    a = Frame("a", "mul", True, (Row("input[x]", 0, 1.0), Row("input[y]", 0, 2.0), row(0, 2.0)))
    b = Frame("a", "mul", True, (Row("input[0]", 0, 1.0), Row("input[1]", 0, 3.0), row(0, 3.0)))
    match = diff([a], [b]).first
    assert isinstance(match, Match)
    assert [(pair.a.label, pair.differs) for pair in match.of(RowRole.INPUT)] == [
        ("input[x]", False),
        ("input[y]", True),
    ]


# Formats.


def test_json_and_table() -> None:
    """Strict JSON, with the same operations as the table."""
    found = diff(batch(0, 1.0), TracedBatch(0, (*batch(0, INF).frames, batch(0, 1.0).frames[0])))

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    data = json.loads(found.to_json(), parse_constant=refuse)
    assert data["differs"] is True
    assert data["verdict"] == found.verdict
    [pair] = data["batches"]
    assert [entry["operation"] for entry in pair["differing"]] == ["a mul", "Net"]
    assert pair["differing"][0]["difference"] == "inf"
    assert pair["only_in_b"] == ["a mul"]
    lines = found.to_table().splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["a mul", "Net"]
    assert lines[2].split("|")[4:8] == lines[3].split("|")[4:8]
    assert "<table>" in found.to_table("html")
