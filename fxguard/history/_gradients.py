"""Whether gradients jump: the norm of all together, or that of one that is a good part of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch

from fxguard.history._rows import Rows
from fxguard.history._watch import FLOOR, NORMAL, TINY, USUAL, Watch

__all__ = ["Gradients"]

PATTERNS = 8  # sets of weights whose gradients are measured together
JUMP = 14.0  # deviations of one gradient in one step
ABOVE = 2.0  # octaves above all that was usual, at least
SHARE = 0.05  # of the norm of all gradients: one that is less moves little
REFRESHED = 32  # steps after which it is computed anew what is usual
ENOUGH = USUAL // 2  # steps in which a gradient was measured, of the last 64


class Gradients:
    """The norms of the gradients of all weights, as the steps of optimizers read them."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._limits: list[float] = []
        self._age = 0
        self._totals: dict[bytes | int, Watch] = {}  # by which gradients are measured

    def add(self, place: int) -> None:
        """Watch one more series."""
        self._places.append(place)
        self._limits.append(math.inf)

    def jump(self, numbers: Sequence[float], rows: Rows) -> bool:
        """Whether they jump in the step whose numbers were added to the rows last."""
        places = self._places
        if not places or len(numbers) <= places[-1]:
            return False
        norms = [numbers[place] for place in places]
        key: bytes | int = len(norms)
        measured = norms
        if math.isnan(sum(norms)):  # some were not measured
            key, measured = bytes([x == x for x in norms]), [x for x in norms if x == x]
            if not measured:
                return False
        total = math.hypot(*measured)
        if not total:  # of a part of the loss that does not count yet: it says nothing
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
        if any(map(operator.gt, norms, self._limits)):
            self._refresh(rows)
            above = map(operator.gt, norms, self._limits)
            found |= any(
                norm > SHARE * total
                for norm, is_above in zip(norms, above, strict=True)
                if is_above
            )
        return found

    def _refresh(self, rows: Rows) -> None:
        """Compute what is usual, from the steps before the last."""
        _, table = rows.last(USUAL + 1, self._places[-1] + 1)
        values = table[:-1, self._places].log2().clamp_(min=TINY).T.contiguous()
        middle = values.nanmedian(dim=1, keepdim=True).values
        deviation = (values - middle).abs_().nanmedian(dim=1).values.mul_(NORMAL)
        highest = values.nan_to_num(-torch.inf).amax(dim=1)
        limits = torch.maximum(middle[:, 0] + JUMP * deviation.clamp_(min=FLOOR), highest + ABOVE)
        enough = (values == values).sum(dim=1) >= ENOUGH
        enough &= middle[:, 0] > TINY  # of a part of the loss that begins, such a gradient was 0
        self._limits = torch.exp2(limits).where(enough, torch.inf).tolist()
