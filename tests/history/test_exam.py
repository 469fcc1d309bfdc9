"""The exam of `fxguard.history` is fair: planted causes move the loss, and healthy runs are calm.

How far a value is from its band: its log2, averaged over three steps, less the median of the 64
steps before, in units of their deviation (1.4826 times the median distance, at least 0.1). A jump
is 6 or more above. The values are the loss of each step, and the norm of all gradients when
the optimizer's step reads them, of those weights that had one in all of the 64 steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from history.exam.architectures import ARCHITECTURES
from history.exam.chosen import healthy, planted
from history.exam.healthy import HEALTHY, Healthy
from history.exam.planted import PLANTED, Planted

JUMP = 6.0
BEFORE = 64
WITHIN = 30  # steps after the planted one
AHEAD = 50  # of a growth, before the loss moves

Series = Sequence[float]

PLANTED_SAMPLE = {
    *("gpt-weight-drawn-anew", "mlp-column-in-other-units", "mlp-momentum-turned"),
    *("mlp-noise-in-one-gradient", "moe-decay-of-wrong-sign", "moe-router-negated"),
    "vit-hook-overwrites",
}
HEALTHY_SAMPLE = dict.fromkeys(
    ("actor-critic", "gan", "gpt-resumed", "mlp-epochs", "moe-unclipped", "vit-unfrozen"), 200
)


class Norms:
    """Notes the norm of each weight's gradient when an optimizer's step begins."""

    def __init__(self) -> None:
        self.rows: list[list[list[float]]] = []  # of each optimizer, at each step, of each weight

    def started(self, model: nn.Module, optimizer: Optimizer) -> None:
        assert isinstance(model, nn.Module)
        rows: list[list[float]] = []
        self.rows.append(rows)

        def note(optimizer: Optimizer, *given: object) -> None:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            gradients = [weight.grad for weight in weights]
            rows.append([math.nan if g is None else float(g.float().norm()) for g in gradients])

        optimizer.register_step_pre_hook(note)

    def totals(self, start: int, end: int) -> list[Series]:
        """The norm of all gradients of some steps, for each optimizer that made as many."""
        found = []
        for rows in self.rows:
            table = np.array(rows[max(start, 0) : end])
            if len(table):
                table = table[:, ~np.isnan(table).any(axis=0)]
                found.append(np.sqrt((table**2).sum(axis=1)))
        return found


def distances(values: Series, at: int) -> np.ndarray:
    """How far each of the values from step `at` on is from the band of the steps before it."""
    logs = np.log2(np.maximum(np.abs(np.asarray(values, dtype=float)), 1e-30))
    means = np.convolve(logs, np.ones(3) / 3)[: len(logs)]
    means[:2] = logs[:2]
    band = means[max(at - BEFORE, 0) : at]
    middle = np.median(band)
    deviation = max(0.1, 1.4826 * float(np.median(np.abs(band - middle))))
    return (means[at:] - middle) / deviation


def highest(values: Series) -> float:
    """The furthest that any value is above the band of the 64 before it."""
    starts = range(BEFORE + 2, len(values))
    return max(float(distances(values[at - BEFORE - 2 : at + 1], BEFORE + 2)[0]) for at in starts)


def is_jump(values: Series, at: int, within: int) -> bool:
    return bool((distances(values, at)[:within] >= JUMP).any())


def test_the_table_is_complete() -> None:
    """Thirty runs, each architecture in both dtypes, every kind of cause, at different steps."""
    assert len({run.name for run in PLANTED}) == len({run.step for run in PLANTED}) == 30
    assert all(150 <= run.step <= 320 for run in PLANTED)
    variants = Counter((run.architecture, run.dtype) for run in PLANTED)
    assert set(variants) == {
        (name, dtype) for name in ARCHITECTURES for dtype in ("float32", "bfloat16")
    }
    causes = Counter(run.cause for run in PLANTED)
    assert set(causes) == {"data", "weights", "step", "gradient", "operation", "growth"}
    assert min(causes.values()) >= 3


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, id=run.name) for run in PLANTED if run.cause in ("weights", "operation")],
)
def test_what_is_planted_is_in_the_model(run: Planted) -> None:
    """The first right answer is part of a name that the model has."""
    model = ARCHITECTURES[run.architecture].model()
    held = model.state_dict() if run.cause == "weights" else dict(model.named_modules())
    assert any(run.what[0] in name for name in held)


@planted(PLANTED_SAMPLE)
def test_a_planted_cause_moves_the_loss(run: Planted) -> None:
    """The loss or the gradients jump in the 30 steps from the planted one on, and not before.

    What grows moves the loss later: 50 steps or more after it began.
    """
    norms = Norms()
    losses = run.train(norms.started)
    assert all(map(math.isfinite, losses))
    series = [losses, *norms.totals(0, len(losses))]
    assert all(len(values) == len(losses) for values in series)
    for values in series:
        assert highest(values[: run.step]) < JUMP
    if run.cause == "growth":
        assert not any(is_jump(values, run.step, AHEAD) for values in series)
        assert is_jump(losses, run.step, len(losses))
    else:
        assert any(is_jump(values, run.step, WITHIN) for values in series)


@healthy(HEALTHY_SAMPLE)
def test_a_healthy_run_is_calm(run: Healthy, steps: int) -> None:
    """Neither its loss nor its gradients jump."""
    norms = Norms()
    losses = run.train(norms.started, steps)
    assert len(losses) == steps
    assert all(map(math.isfinite, losses))
    assert highest(losses) < JUMP
    assert norms.rows
    for start in range(steps - BEFORE - 2):
        for values in norms.totals(start, start + BEFORE + 3):
            if len(values) == BEFORE + 3:
                assert distances(values, BEFORE + 2)[0] < JUMP, f"step {start + BEFORE + 2}"


def test_healthy_runs_are_20_000_steps() -> None:
    """Together, and each is longer than the planted ones."""
    assert sum(run.steps for run in HEALTHY) >= 20_000
    assert min(run.steps for run in HEALTHY) >= 500


@pytest.mark.parametrize(
    "run",
    [
        *(
            pytest.param(run, id=run.name)
            for run in PLANTED
            if run.name == "mlp-noise-in-one-gradient"
        ),
        *(pytest.param(run, id=run.name, marks=pytest.mark.campaign) for run in PLANTED[::4]),
    ],
)
def test_a_run_is_the_same_twice(run: Planted) -> None:
    """To the last bit, whatever torch drew before."""
    first = run.train(lambda *pair: None)
    torch.rand(3)
    assert run.train(lambda *pair: None) == first
