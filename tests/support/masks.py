"""One function as a guarded model, and masks to call it with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor, nn

import fxguard


class Function(nn.Module):
    """A module around one function, with a submodule on each side so that values reach modules."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.before, self.after = nn.Identity(), nn.Identity()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.after(self.function(*map(self.before, args), **kwargs))


def report_of(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Any:
    """The report of one batch, None where it is clean."""
    reports: list[fxguard.types.Report] = []
    fxguard.instrument(Function(function), on_detect=reports.append, **options)(*args)
    return reports[0] if reports else None


X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[False, True, True], [False, False, True]])


def softmax_of(scores: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1)


def set_item(x: Tensor) -> Tensor:
    scores = x.clone()
    scores[MASK] = -math.inf
    return scores


def finfo_mask(x: Tensor) -> Tensor:
    return MASK.to(x.dtype) * torch.finfo(x.dtype).min
