"""Whether gradients jump: the norm of all together, or that of one that is a good part of it."""

from __future__ import annotations

import torch
from torch import Tensor

from fxguard.history._rows import Rows
from fxguard.history._watch import FLOOR, NORMAL, TINY, USUAL, Watch

__all__ = ["Gradients"]

PATTERNS = 8  # sets of weights whose gradients are measured together
JUMP = 14.0  # deviations of one gradient in one step
ABOVE = 1.0  # octaves above all that was usual, at least
SHARE = 0.05  # of the norm of all gradients: one that is less moves little
REFRESHED = 32  # steps after which it is computed anew what is usual
ENOUGH = USUAL // 2  # steps in which a gradient was measured, of the last 64


class Gradients:
    """The norms of the gradients of all weights, as the steps of optimizers read them."""

    def __init__(self) -> None:
        self._index = torch.zeros(0, dtype=torch.long, device="cpu")
        self._limits = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._count, self._last = 0, -1  # series, and the position of the last
        self._age = 0
        self._totals: dict[bytes | int, Watch] = {}  # by which gradients are measured

    def add(self, place: int) -> None:
        """Watch one more series."""
        self._index = torch.cat([self._index, torch.tensor([place], device="cpu")])
        self._count, self._last = self._count + 1, place
        self._limits = torch.cat([self._limits, self._limits.new_full((1,), torch.inf)])

    def jump(self, numbers: Tensor, rows: Rows) -> bool:
        """Whether they jump in the step whose numbers were added to the rows last."""
        if not self._count or numbers.shape[0] <= self._last:
            return False
        norms = numbers[self._index]
        key: bytes | int = self._count
        total = norms.norm().item()
        if total != total:  # some were not measured
            measured = norms == norms
            key, total = bytes(measured.tolist()), float(norms[measured].norm())
            if key == bytes(self._count):
                return False
        watch = self._totals.get(key)
        if watch is None:
            if len(self._totals) == PATTERNS:
                del self._totals[next(iter(self._totals))]
            watch = self._totals[key] = Watch()
        found = watch.jumps(total)
        self._age += 1
        if self._age % REFRESHED == 0:
            self._refresh(rows)
        if (norms > self._limits).any().item():
            self._refresh(rows)
            found |= bool(((norms > self._limits) & (norms > SHARE * total)).any())
        return found

    def _refresh(self, rows: Rows) -> None:
        """Compute what is usual, from the steps before the last."""
        _, table = rows.last(USUAL + 1, self._last + 1)
        values = table[:-1, self._index].log2().clamp_(min=TINY).T.contiguous()
        middle = values.nanmedian(dim=1, keepdim=True).values
        deviation = (values - middle).abs_().nanmedian(dim=1).values.mul_(NORMAL)
        highest = values.nan_to_num(-torch.inf).amax(dim=1)
        limits = torch.maximum(middle[:, 0] + JUMP * deviation.clamp_(min=FLOOR), highest + ABOVE)
        enough = (values == values).sum(dim=1) >= ENOUGH
        self._limits = torch.exp2(limits).where(enough, torch.inf)
