"""Fingerprints in traces: what two traces say of elements whose ranges agree."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fxguard
from fxguard import diff, load_trace
from fxguard.batch.frames import row_of
from fxguard.measure.fingerprints import BLOCK, fingerprint_of
from fxguard.records import Fingerprint
from fxguard.trace.batch_diff import TOLERANCES, distance
from fxguard.trace.fingerprints import distance_of_elements
from fxguard.trace.writer import TraceWriter
from fxguard.types import Frame, Row, TracedBatch
from support import traced_net

OLD = Path(__file__).parent / "before_fingerprints.jsonl"  # written by the version before
INF, NAN = math.inf, math.nan


def row(value: Tensor) -> Row:
    return replace(row_of("output", value), fingerprint=fingerprint_of(value))


def batch(*values: Tensor, number: int = 0) -> TracedBatch:
    frames = tuple(Frame("a", f"op{i}", True, (row(v),)) for i, v in enumerate(values))
    return TracedBatch(number, frames)


def sample(dtype: torch.dtype = torch.float32, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape or (6, 7), generator=generator).to(dtype)


# What is seen though ranges are equal.


def changed(x: Tensor) -> Tensor:
    """One element that is neither the smallest nor the largest magnitude."""
    other = x.clone()
    place = x.abs().flatten().argsort()[x.numel() // 2]
    other.view(-1)[place] *= 1.25
    return other


CHANGES = {
    "rolled": lambda x: x.roll(1, 0),
    "rolled in rows": lambda x: x.roll(1, -1),
    "flipped": lambda x: x.flip(0),
    "transposed": lambda x: x.transpose(0, 1).reshape(x.shape),
    "negated": lambda x: -x,
    "of other signs": lambda x: x.abs(),
    "changed": changed,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_equal_ranges_and_other_elements(change: str, name: str) -> None:
    """Each is a difference, and the same tensor is none."""
    x = sample(getattr(torch, name))
    other = CHANGES[change](x)
    assert distance(row(x), row(other)) == 0
    assert not torch.equal(x, other)
    found = diff(batch(x), batch(other))
    assert found.differs
    assert not diff(batch(x), batch(x.clone())).differs
    assert "A: mean " in str(found)
    assert "the ranges of what it read and made agree; the elements that it made do not" in str(
        found
    )


@pytest.mark.parametrize("shape", [(2, BLOCK), (4, 2 * BLOCK), (2, 3, BLOCK)])
def test_whole_blocks_in_another_order(shape: tuple[int, ...]) -> None:
    """Samples of a batch that changed places, each a whole number of blocks of signs."""
    x = sample(torch.float32, *shape)
    assert diff(batch(x), batch(x.roll(1, 0))).differs


def test_other_shapes_and_other_counts() -> None:
    """Another number of elements is a difference; so is another number of NaN or of masks."""
    x = sample()
    assert distance_of_elements(row(x), row(torch.cat([x, x]))) == 1
    bad, worse = x.clone(), x.clone()
    bad[0, 0], worse[0, :4] = NAN, NAN
    assert distance(row(bad), row(worse)) == 0
    assert distance_of_elements(row(bad), row(worse)) == 0.75
    masked = x.masked_fill(torch.eye(6, 7).bool(), -INF)
    assert distance_of_elements(row(masked), row(masked.clone())) == 0
    # The elements beside the mask are compared.
    assert diff(batch(masked), batch(masked.roll(7).where(masked.isfinite(), masked))).differs


def test_masks_of_the_largest_number_are_the_same_in_two_dtypes() -> None:
    x, hidden = sample(), torch.eye(6, 7).bool()
    pair = [
        batch(x.to(dtype).masked_fill(hidden, torch.finfo(dtype).min))
        for dtype in (torch.float32, torch.float16)
    ]
    assert diff(*pair).agrees


# Roundings.


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5000),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(0, 2**31),
    st.sampled_from(["normal", "heavy", "positive"]),
)
def test_roundings_are_no_difference(n: int, name: str, seed: int, kind: str) -> None:
    """Elements that are each off by a part of what their largest may be off, at random.

    A projection of them is off by as much for 10 elements as for 5000.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    x = {"normal": x, "heavy": x**5, "positive": x.abs()}[kind]
    noise = torch.randn(n, generator=generator, dtype=torch.float64).clamp(-3, 3)
    rms = x.square().mean().sqrt()
    other = x + TOLERANCES[name] / 3 * rms * noise
    a, b = (replace(row(each), dtype=name) for each in (x, other))
    apart = distance_of_elements(a, b)
    assert apart is not None
    assert apart <= TOLERANCES[name]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.floats(0, 1e-3))
@settings(max_examples=60, deadline=None)
def test_a_common_factor_counts_as_in_ranges(elements: list[float], by: float) -> None:
    """All elements larger by one factor: fingerprints are no stricter than ranges."""
    x = torch.tensor(elements, dtype=torch.float64)
    apart = distance_of_elements(row(x), row(x * (1 + by)))
    assert apart is not None
    assert apart <= by + 1e-12
    assert apart == distance_of_elements(row(x * (1 + by)), row(x))


# Files.


def test_a_file_keeps_them(tmp_path: Path) -> None:
    """Seven digits, counts, notes and gaps come back."""
    x = sample()
    x[0, 0] = NAN
    rows = (
        row(x),
        replace(row(x), fingerprint=replace(fingerprint_of(x), of_eager_run=True)),
        Row("output", 0.0, 1.0, fingerprint=Fingerprint(note="sparse")),
        Row("output", 0.0, 1.0),
        Row("output", note="None"),
    )
    traced = TracedBatch(0, (Frame("a", "mul", True, rows),))
    writer = TraceWriter(tmp_path, "Net", "2.13.0")
    writer.write(traced, None)
    assert writer.path is not None
    back = load_trace(writer.path).batches[0].frames[0].rows
    for before, after in zip(rows, back, strict=True):
        if before.fingerprint is None:
            assert after.fingerprint is None
            continue
        assert after.fingerprint is not None
        for name in ("count", "left_out", "of_eager_run", "note"):
            assert getattr(after.fingerprint, name) == getattr(before.fingerprint, name)
        assert after.fingerprint.mean == pytest.approx(before.fingerprint.mean, rel=1e-6)
        assert after.fingerprint.norm == pytest.approx(before.fingerprint.norm, rel=1e-6)
        assert after.fingerprint.projections == pytest.approx(
            before.fingerprint.projections, rel=1e-6
        )


def test_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    """It loads, and next to a new one its ranges are compared and nothing more is claimed."""
    old = load_trace(OLD)
    rows = [row for each in old.batches for frame in each.frames for row in frame.rows]
    assert len(rows) == 19 + 4 + 20 + 10
    assert all(row.fingerprint is None for row in rows)
    new = traced_net.trace(tmp_path)
    for a, b, lacks in ((OLD, new, "A"), (new, OLD, "B")):
        found = diff(a, b)
        assert found.verdict[0] == "ranges agree: 0 of 22 compared frames differ"
        assert found.verdict[1].endswith("not compared: elements")
        assert f"{lacks} has no fingerprints" in found.verdict
    both = diff(new, new)
    assert both.verdict[0] == "ranges and fingerprints agree: 0 of 22 compared frames differ"
    # Gradients and weights after a step have ranges only, and the text says so.
    assert "17 of 26 values by ranges only: no fingerprint was taken (17)" in both.verdict


def test_earlier_versions_read_the_same_lines(tmp_path: Path) -> None:
    """Without the one entry that is new, a file is what it was: they look for no other."""
    new = traced_net.trace(tmp_path)
    stripped = tmp_path / "stripped.jsonl"
    lines = [json.loads(line) for line in new.read_text().splitlines()]
    assert sum("fingerprints" in line for line in lines) == 2
    for line in lines:
        line.pop("fingerprints", None)
    stripped.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert lines[0]["fxguard_trace"] == 1
    old = [json.loads(line) for line in OLD.read_text().splitlines()]
    assert [sorted(line) for line in lines] == [sorted(line) for line in old]
    assert diff(stripped, OLD).agrees


def test_other_signs_are_not_compared(tmp_path: Path) -> None:
    """A later version may take sums with others."""
    new = traced_net.trace(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text(new.read_text().replace('"signs":1', '"signs":2'))
    found = diff(new, other)
    assert found.verdict[0].startswith("ranges agree: ")
    assert "a fingerprint of another version of fxguard (9)" in str(found)


DAMAGE: list[Any] = [
    {"signs": 1, "rows": []},
    {"signs": 1},
    {"signs": "1", "rows": [None]},
    {"signs": 1, "rows": [[1, 0, 1.0, 1.0, 1.0]]},
    {"signs": 1, "rows": [[1, 2, 1.0, 1.0, 1.0, 1.0]]},
    {"signs": 1, "rows": [[1, 0, 1.0, -1.0, 1.0, 1.0]]},
    {"signs": 1, "rows": [[1, 0, 1.0, 1.0, "x", 1.0]]},
    {"signs": 1, "rows": [7]},
    [],
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_fingerprints(damage: Any, tmp_path: Path) -> None:
    """Are an error that names the line."""
    traced = TracedBatch(0, (Frame("a", "mul", True, (row(torch.ones(1)),)),))
    writer = TraceWriter(tmp_path, "Net", "2.13.0")
    writer.write(traced, None)
    assert writer.path is not None
    *lines, last = writer.path.read_text().splitlines()
    entry = json.loads(last)
    entry["fingerprints"] = damage
    writer.path.write_text("\n".join([*lines, json.dumps(entry), ""]))
    with pytest.raises(fxguard.FxguardError, match=r":3: not a trace of fxguard"):
        load_trace(writer.path)


def test_json_says_how_far_elements_are_apart() -> None:
    x = sample()
    data = json.loads(diff(batch(x), batch(-x)).to_json())
    [difference] = data["batches"][0]["differing"]
    [pair] = difference["rows"]
    assert pair["difference_of_elements"] == pair["difference"] > 0.1
    plain = TracedBatch(0, (Frame("a", "op0", True, (row_of("output", x),)),))
    assert distance_of_elements(row(x), plain.frames[0].rows[0]) is None
