"""The columns of a page: the steps that a history has, one by one or several in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxguard.history._distances import alike
from fxguard.history.track import Track

__all__ = ["Columns"]


class Columns:
    """The first and the last step of each column: all that any series has.

    Args:
        tracks: the series.
    """

    def __init__(self, tracks: Sequence[Track]) -> None:
        found: dict[int, int] = {}
        seen = set[bytes]()
        for track in tracks:
            if (key := _key(track)) in seen:
                continue
            seen.add(key)
            for step, last in zip(track.steps, track.last_steps, strict=True):
                found[step] = max(last, found.get(step, last))
        self.steps = sorted(found)
        self.last_steps = [found[step] for step in self.steps]
        self._places = {step: place for place, step in enumerate(self.steps)}
        self._known: dict[bytes, tuple[Tensor, list[tuple[int, int]]]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def of(self, track: Track) -> tuple[Tensor, list[tuple[int, int]]]:
        """The columns of the rows of a series, and the stretches of rows of about the same size."""
        key = _key(track)
        if key not in self._known:
            sizes = [b - a + 1 for a, b in zip(track.steps, track.last_steps, strict=True)]
            places = torch.tensor([self._places[step] for step in track.steps])
            self._known[key] = places, alike(sizes)
        return self._known[key]

    def runs(self) -> list[tuple[int, int, int]]:
        """Columns of the same size that follow each other: first step, size, how many."""
        found: list[tuple[int, int, int]] = []
        for step, last in zip(self.steps, self.last_steps, strict=True):
            size = last - step + 1
            if found and found[-1][1] == size and found[-1][0] + size * found[-1][2] == step:
                found[-1] = (found[-1][0], size, found[-1][2] + 1)
            else:
                found.append((step, size, 1))
        return found


def _key(track: Track) -> bytes:
    return track.steps.tobytes() + track.last_steps.tobytes()
