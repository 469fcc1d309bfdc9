"""Indices that a model writes in place: a module's row holds what that module read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard


def shifted(x: Tensor) -> Tensor:
    """As T5 shifts its labels."""
    ids = x.new_zeros(x.shape)
    ids[..., 1:] = x[..., :-1].clone()
    return ids


def filled(x: Tensor) -> Tensor:
    ids = x.clone()
    ids.masked_fill_(ids < 9, 8)
    return ids


def through_a_view(x: Tensor) -> Tensor:
    ids = x.clone()
    ids.view(-1)[:] = 7
    return ids


def given(x: Tensor) -> Tensor:
    x += 0
    x[:, 0] = 3
    return x


class Embeds(nn.Module):
    """Looks rows up by indices, twice, with a write between."""

    def __init__(self, make: Callable[[Tensor], Tensor], *, breaks: bool) -> None:
        super().__init__()
        self.make = make
        self.breaks = breaks
        self.first = nn.Embedding(10, 4)
        self.second = nn.Embedding(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        ids = self.make(x)
        y = self.first(ids)
        if self.breaks:
            torch._dynamo.graph_break()
        ids[:] = 5
        return torch.log((y + self.second(ids)).abs() * 0 - 1)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(
    ("make", "read"), [(shifted, 8), (filled, 9), (through_a_view, 7), (given, 9)]
)
def test_a_row_holds_what_the_module_read(
    make: Callable[[Tensor], Tensor], read: int, breaks: bool
) -> None:
    """The largest index, after the writes before the module and before those after it."""
    model = fxguard.instrument(Embeds(make, breaks=breaks), max_frames_to_save=99)
    with pytest.raises(fxguard.NonFiniteError, match="log made NaN") as caught:
        model(torch.arange(10)[None])
    shown = {
        frame.name: row.abs_max
        for frame in caught.value.report.frames
        for row in frame.rows
        if frame.kind == "Embedding" and row.label.startswith("input")
    }
    assert shown == {"first": read, "second": 5}
