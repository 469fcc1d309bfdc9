"""Intended masks are no bad values: not in a trace, not on its page, not in a count."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.records import Row
from fxguard.report.load import load_report
from fxguard.report.sheet import page_data

INF = math.inf


class Attention(nn.Module):
    """Causal attention, with a factor that can overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        q, k, v = (self.qkv(x) * factor).chunk(3, -1)
        mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -INF)
        return (q @ k.transpose(-1, -2) + mask).softmax(-1) @ v


def trace_of(folder: Path, factor: float) -> fxguard.types.Trace:
    """The trace of one batch, read from its file."""
    model = fxguard.instrument(Attention(), trace_batch_nums=[0], trace_to=folder)
    model(torch.randn(6, 4), torch.tensor(factor))
    [path] = folder.glob("*.jsonl")
    return fxguard.load_trace(path)


def test_a_healthy_trace_with_a_mask_counts_nothing_as_bad(tmp_path: Path) -> None:
    """The page has a green headline, and no red row below it."""
    trace = trace_of(tmp_path, 1.0)
    [batch] = trace.batches
    infinite = [r for f in batch.frames for r in f.rows if r.abs_max == INF]
    assert len(infinite) >= 4  # made, read by the addition, made by that, read by the softmax
    assert all(row.mask and not row.is_bad for row in infinite)
    assert trace.is_healthy
    assert not any("inf" in line for line in trace.verdict)
    [sheet] = page_data([batch.sheet()])["sheets"]
    assert "bad" not in sheet["headroom"]
    rows = [row for frame in batch.frames for row in frame.rows]
    assert {i for i, row in enumerate(rows) if row.mask} == set(sheet["masks"])


def test_a_fault_beside_a_mask_is_bad_and_the_mask_is_not(tmp_path: Path) -> None:
    """Only what overflowed, and what came of it, is counted; also in the report and its JSON."""
    [batch] = trace_of(tmp_path, 1e38 * 9).batches
    first = next(frame for frame in batch.frames if frame.made_bad)
    assert first.kind in ("mul", "matmul")
    masked = next(frame for frame in batch.frames if frame.kind == "masked_fill")
    assert not masked.made_bad
    with pytest.raises(fxguard.NonFiniteError) as caught:
        fxguard.instrument(Attention())(torch.randn(6, 4), torch.tensor(1e38 * 9))
    path = tmp_path / "report.json"
    path.write_text(caught.value.report.to_json())
    assert load_report(path).frames == caught.value.report.frames


def test_a_nan_is_never_a_mask(tmp_path: Path) -> None:
    """A row that is masked entirely makes NaN, and that is counted."""

    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x < 9, -INF).softmax(-1)

    model = fxguard.instrument(Empty(), trace_batch_nums=[0], trace_to=tmp_path)
    model(torch.ones(2, 2))
    [path] = tmp_path.glob("*.jsonl")
    trace = fxguard.load_trace(path)
    assert not trace.is_healthy
    assert next(frame.kind for frame in trace.batches[0].frames if frame.made_bad) == "softmax"


@pytest.mark.parametrize("masks", ["x", [["a"]], ["0"], 3])
def test_a_damaged_list_of_masks_is_refused(tmp_path: Path, masks: object) -> None:
    """Like any other damage: an error that names the line."""
    trace_of(tmp_path, 1.0)
    [path] = tmp_path.glob("*.jsonl")
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), "masks": masks})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(fxguard.FxguardError, match="not a trace"):
        fxguard.load_trace(path)


def test_a_row_without_a_mask_stays_bad() -> None:
    """An infinity that nobody intended, and a NaN."""
    assert Row("output", 0.0, INF).is_bad
    assert not Row("output", 0.0, INF, mask=True).is_bad
