"""Quiet faults in transformers' Trainer and in Lightning: a line each, when they are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from support.needs import needs

needs("transformers")
needs("accelerate")
needs("lightning")

from transformers import GPT2LMHeadModel  # noqa: E402

from fxguard.integrations.lightning import FxguardCallback as ForLightning  # noqa: E402
from fxguard.integrations.transformers import FxguardCallback as ForTrainer  # noqa: E402
from support import in_lightning, in_trainer  # noqa: E402

Printed = pytest.CaptureFixture[str]


class WithSpare(GPT2LMHeadModel):
    """A head that its forward forgets."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.spare = nn.Linear(config.n_embd, 2)

    def forward(self, input_ids: Any, labels: Any = None, **others: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, **others)


def noted(printed: Printed) -> list[str]:
    return [line for line in printed.readouterr().err.splitlines() if ": note: " in line]


@pytest.mark.parametrize("has_spare", [True, False])
def test_in_the_trainer(tmp_path: Path, capsys: Printed, has_spare: bool) -> None:
    model = in_trainer.small()
    if has_spare:
        model = WithSpare(model.config)
    data = in_trainer.pieces()
    in_trainer.trainer(tmp_path, data, model, ForTrainer(), max_steps=25).train()
    told = noted(capsys)
    assert len(told) == has_spare
    if has_spare:
        assert "never moves: spare.weight and spare.bias: no operation that leads" in told[0]


class NeverZeroes(in_lightning.Model):
    def optimizer_zero_grad(self, *args: Any) -> None:
        """Forgets it."""


@pytest.mark.parametrize("kind", [NeverZeroes, in_lightning.Model])
def test_in_lightning(capsys: Printed, kind: type[in_lightning.Model]) -> None:
    """Its backward runs in a closure of the step."""
    in_lightning.trainer(ForLightning()).fit(kind(), in_lightning.data())
    told = noted(capsys)
    assert len(told) == (kind is NeverZeroes)
    assert all("stale gradients" in line for line in told)
