"""What the options of ``instrument`` change."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from support import zoo
from support.models import Checkpointed
from support.ways import AOT, PYTHON

from ..records import Cases, Record, guarded


class Two(nn.Module):
    """Two operations go wrong, others read their results, and one is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        unread = (x * 0).log()
        left = (self.first(x) * 1e3).exp()
        right = self.second(x) / (x - x)
        return left * 2, right + torch.where(unread < 0, 0.0, unread)


class Raises(Two):
    """The forward itself raises after something went wrong."""

    def forward(self, x: Tensor) -> Any:
        left, _ = super().forward(x)
        if not bool(left.isfinite().all()):
            raise RuntimeError("the loss is not finite")
        return left


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "raise": {"on_detect": "raise"},
    "warn": {"on_detect": "warn"},
    "3 frames": {"max_frames_to_save": 3},
    "1 frame, raise": {"max_frames_to_save": 1, "on_detect": "raise"},
    "modules": {"granularity": "module"},
    "modules, raise": {"granularity": "module", "on_detect": "raise"},
    "strict": {"strict": True},
    "strict, raise": {"strict": True, "on_detect": "raise"},
    "replay": {"replay": True},
    "replay, raise": {"replay": True, "on_detect": "raise"},
    "no backward": {"backward": False},
    "ignore log": {"ignore": ["*:log"]},
    "ignore first": {"ignore": ["first"]},
    "ignore exp and div": {"ignore": ["*:exp", "*:div"]},
    "ignore nothing": {"ignore": ["third.*"]},
    "trace": {"trace_batch_nums": [0]},
    "trace and abort": {"trace_batch_nums": [1], "abort_after_batch_num": 1},
    "abort": {"abort_after_batch_num": 0},
    "loss scale": {"loss_scale": 1024.0},
    "a wrong option": {"max_frames_to_save": 0},
    "a wrong glob": {"ignore": "first"},
    "strict and replay": {"strict": True, "replay": True},
}
MODELS = {"two": Two, "raises": Raises, "checkpointed": Checkpointed}


def cases() -> Cases:
    """Each option with models that go wrong, and two other ways to run them."""
    for title, options in OPTIONS.items():
        for name, make in MODELS.items():
            yield f"{name}/{title}", functools.partial(called, make, **options)
    for way in (AOT, PYTHON):
        for name, make in MODELS.items():
            yield f"{name}/{way}", functools.partial(called, make, way=way)


def called(make: Any, **options: Any) -> Record:
    """Four batches, the second and the third of them with zeros, and a backward each."""
    torch.manual_seed(0)
    model = make()

    def call(called: Any) -> None:
        for scale in (1.0, 0.0, 0.0, 100.0):
            output = called(torch.ones(2, 4) * scale)
            torch.as_tensor(sum(x.sum() for x in zoo.tensors_in(output))).backward()

    return guarded(model, call, **options)
