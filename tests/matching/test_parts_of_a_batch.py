"""One sample of a batch, or a sample without its padding, against the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxguard.matching.match import compare_recordings
from fxguard.recording.running import recorded
from fxguard.report.run_comparison import RunComparison

WIDTH, HEADS, VOCAB = 12, 3, 40


class Decoder(nn.Module):
    """One layer; ``leak`` says how samples or positions get into one another."""

    def __init__(self, leak: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leak = leak
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.leak == "samples":
            x = x - x.mean(0, keepdim=True)  # over samples
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / math.sqrt(WIDTH // HEADS)
        if self.leak != "positions":
            length = ids.shape[1]
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        p = scores.softmax(-1)  # over keys
        x = x + (p @ v).transpose(1, 2).flatten(-2)
        found: Tensor = self.out(functional.silu(x).flatten(0, 1)).unflatten(0, ids.shape)
        return found


def ids() -> Tensor:
    return torch.randint(VOCAB, (5, 9), generator=torch.Generator().manual_seed(1))


def compared(leak: str, a: Tensor, b: Tensor) -> RunComparison:
    model = Decoder(leak).eval()
    with torch.no_grad():
        return compare_recordings(*(recorded(model, (x,), {}, 2**30)[0] for x in (a, b)))


@pytest.mark.parametrize(
    ("part", "note"),
    [
        ((slice(3, 4), slice(None)), "B is sample 3 of 5 of A"),
        ((slice(1, 3), slice(None)), "B is samples 1 to 2 of 5 of A"),
        ((slice(2, 3), slice(0, 7)), "B is sample 2 of 5 and positions 0 to 6 of 9 of A"),
        ((slice(None), slice(0, 4)), "B is positions 0 to 3 of 9 of A"),
    ],
)
def test_a_part_computes_what_the_batch_does(part: tuple[slice, slice], note: str) -> None:
    found = compared("", ids(), ids()[part])
    assert found.outcome == "agree", found
    assert note in found.verdict
    assert found.outputs[0].recorded is not None
    assert found.outputs[0].recorded < 1e-6


@pytest.mark.parametrize(
    ("leak", "part", "line"),
    [
        ("samples", (slice(3, 4), slice(None)), "# over samples"),
        ("positions", (slice(None), slice(0, 7)), "# over keys"),  # which read padding
    ],
)
def test_a_leak_is_named(leak: str, part: tuple[slice, slice], line: str) -> None:
    found = compared(leak, ids(), ids()[part])
    assert found.outcome == "operation"
    assert found.first is not None
    assert found.first.b is not None
    assert found.first.b.source is not None
    assert line in found.first.b.source.code, found


def test_what_is_no_part_or_not_told() -> None:
    """Other data; the same data twice; a batch as large as a weight."""
    for a, b in (
        (ids(), (ids()[:1] + 1) % VOCAB),
        (ids()[:1].expand(5, 9), ids()[:1]),
        (torch.zeros(WIDTH, 9, dtype=torch.int64).index_fill(0, torch.tensor(3), 1), ids()[:1]),
    ):
        found = compared("", a, b)
        assert found.outcome in ("agree", "not compared"), found
        assert not found.notes
