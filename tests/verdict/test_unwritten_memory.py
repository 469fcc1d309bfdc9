"""Memory that was given, and is written in parts: what is bad in the rest counts where it is read.

A KV cache is allocated at once, with whatever was in that memory, and each call writes a part of it
and reads what is written so far. NaN stands here for what was in the memory.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard

LENGTH, WRITTEN = 8, 3
Step = Callable[[Tensor, Tensor], Tensor]


def by_a_slice(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN] = new
    return cache[:, :WRITTEN]


def by_index_copy(cache: Tensor, new: Tensor) -> Tensor:
    return cache.index_copy_(1, torch.arange(WRITTEN), new)[:, :WRITTEN]


def by_indices(cache: Tensor, new: Tensor) -> Tensor:
    cache[torch.arange(2)[:, None], torch.arange(WRITTEN)] = new
    return cache[:, :WRITTEN]


def one_by_one(cache: Tensor, new: Tensor) -> Tensor:
    for position in range(WRITTEN):
        cache[:, position] = new[:, position]
    return cache[:, :WRITTEN]


def by_a_copy(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN].copy_(new)
    return cache[:, :WRITTEN]


def by_a_narrow_copy(cache: Tensor, new: Tensor) -> Tensor:
    cache.narrow(1, 0, WRITTEN).copy_(new)
    return cache.narrow(1, 0, WRITTEN)


def by_an_output(cache: Tensor, new: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(new, 2.0, out=cache[:, :WRITTEN])
    return cache[:, :WRITTEN]


def by_copies_to_a_view_of_a_view(cache: Tensor, new: Tensor) -> Tensor:
    for sample, row in zip(cache.unbind(), new, strict=True):
        sample[:WRITTEN].copy_(row)
    return cache[:, :WRITTEN]


def copied_between_graphs(cache: Tensor, new: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    cache[:, :WRITTEN].copy_(new)
    torch._dynamo.graph_break()
    return cache[:, :WRITTEN]


def between_graphs(cache: Tensor, new: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    cache[:, :WRITTEN] = new
    torch._dynamo.graph_break()
    return cache[:, :WRITTEN]


def masked_by_where(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN] = new
    return torch.where((torch.arange(LENGTH) < WRITTEN)[:, None], cache, 0.0)


def masked_by_a_product(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN] = new
    return cache * (torch.arange(LENGTH) < WRITTEN)[:, None]


def read_whole(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN] = new
    return cache


def read_too_far(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN] = new
    return cache[:, : WRITTEN + 1]


def averaged(cache: Tensor, new: Tensor) -> Tensor:
    """Its next value depends on the one before, so NaN stays for ever."""
    cache.mul_(0.9).add_(0.1 * new.mean())
    return new


def averaged_in_part(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN].mul_(0.9).add_(0.1 * new)
    return new


def copied_and_read(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN].copy_(new)
    return cache.mean(1, keepdim=True)


def bad_when_written(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, :WRITTEN] = new / 0
    return new


class Attention(nn.Module):
    """It is given a cache, or holds one as a buffer."""

    def __init__(self, step: Step, held: Tensor | None) -> None:
        super().__init__()
        self.project, self.step = nn.Linear(4, 4), step
        self.register_buffer("cache", held)

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        held = self.cache if cache is None else cache
        out: Tensor = self.project(self.step(held, self.project(x)))  # type: ignore[arg-type]
        return out


def memory(filled_with: float = torch.nan) -> Tensor:
    return torch.full((2, LENGTH, 4), filled_with)


def found_in(
    step: Step, *, held: bool, filled_with: float = torch.nan
) -> list[fxguard.types.Report]:
    torch.manual_seed(0)
    found = list[fxguard.types.Report]()
    model = Attention(step, memory(filled_with) if held else None)
    guarded = fxguard.instrument(model, on_detect=found.append)
    cache = () if held else (memory(filled_with),)
    with torch.no_grad():
        for _ in range(2):
            guarded(torch.randn(2, WRITTEN, 4), *cache)
    return found


UNREAD = [
    *(by_a_slice, by_index_copy, by_indices, one_by_one, between_graphs, masked_by_where),
    *(by_a_copy, by_a_narrow_copy, by_an_output, by_copies_to_a_view_of_a_view),
    copied_between_graphs,
]
READ = [masked_by_a_product, read_whole, read_too_far, averaged, averaged_in_part, copied_and_read]


@pytest.mark.parametrize("held", [False, True], ids=["given", "buffer"])
@pytest.mark.parametrize("step", UNREAD)
def test_what_is_not_read_is_no_fault(step: Step, held: bool) -> None:
    """The outputs are those that a cache of zeros gives."""
    assert found_in(step, held=held) == []


@pytest.mark.parametrize("held", [False, True], ids=["given", "buffer"])
@pytest.mark.parametrize("step", READ)
def test_what_is_read_is_named(step: Step, held: bool) -> None:
    """A product with a mask of zeros keeps NaN; a running average keeps it for the next call."""
    report = found_in(step, held=held)[0]
    assert report.origins[0].what == (
        "buffer cache" if held else "argument `cache` of Attention.forward"
    )
    assert found_in(step, held=held, filled_with=0.0) == []


def test_what_is_written_bad_is_a_fault_although_nobody_reads_it() -> None:
    """The model has made it, and the next call will read it."""
    report = found_in(bad_when_written, held=False)[0]
    assert report.origins[0].what == "div"


def test_uninitialised_memory_is_no_fault_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch itself puts there where it shall repeat: NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        cache = torch.empty(2, LENGTH, 4)
        assert cache.isnan().all()
        found = list[fxguard.types.Report]()
        guarded = fxguard.instrument(Attention(by_a_slice, None), on_detect=found.append)
        with torch.no_grad():
            assert guarded(torch.randn(2, WRITTEN, 4), cache).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == []
