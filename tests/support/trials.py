"""A guarded model in which one fault after the other is planted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import fxguard
from fxguard.types import Origin, Report
from support import zoo
from support.models import Checkpointed
from support.planting import NOTHING, Planter

MODELS = {**zoo.ZOO, "checkpointed": zoo.Entry("checkpointed", Checkpointed, zoo.numbers(3, 4))}


@dataclass
class Trial:
    """A guarded model that is run again and again."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    backend: str
    options: dict[str, Any] = field(default_factory=lambda: {"strict": True})
    reports: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        args, kwargs = self.inputs
        with torch.no_grad():
            self.model(*args, **kwargs)  # some models change themselves in their first forward
        self.planter = Planter(self.model)
        fxguard.instrument(self.model, on_detect=self.reports.append, **self.options)
        self.compiled = self.model
        if self.backend not in ("eager", "python"):
            self.compiled = torch.compile(self.model, backend=self.backend)

    def run(self, site: int = NOTHING, fault: str = "nan") -> Exception | None:
        """One forward with a fault. What the model raises for it is no matter, and returned."""
        args, kwargs = self.inputs
        buffers = {buffer: buffer.clone() for buffer in self.model.buffers()}
        self.reports.clear()
        self.planter.begin(site, fault)
        torch.manual_seed(0)
        stance = "force_eager" if self.backend == "python" else "default"
        try:
            with torch.compiler.set_stance(stance), torch.set_grad_enabled(self.model.training):
                self.compiled(*args, **kwargs)
        except Exception as error:
            if site == NOTHING:
                raise
            return error
        finally:
            with torch.no_grad():
                for buffer, before in buffers.items():
                    buffer.copy_(before)
        return None

    @property
    def origins(self) -> tuple[Origin, ...]:
        return self.reports[0].origins if self.reports else ()
