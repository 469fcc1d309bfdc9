"""A bad tensor that a loss reads is named by what holds it in the script.

Functions with an ``assert`` hold nothing here: pytest makes them read ``locals()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options

TARGETS = torch.tensor([0, 1, 2, 0])
PRIOR = torch.tensor([1.0, torch.nan, 1.0])


class Scaled(nn.Module):
    """A criterion with a buffer that no checkpoint holds, and one inside it."""

    def __init__(self, scale: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale, persistent=False)
        self.inner = nn.CrossEntropyLoss(weight)

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.inner(out * self.scale, targets)
        return loss


class Centre(nn.Module):
    """A running average, which a loss reads without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", PRIOR.clone())


@dataclass
class Losses:
    """A dataclass of criteria."""

    main: nn.Module


class Trainer:
    """A plain object that holds a criterion and a tensor."""

    def __init__(self, bad: float = torch.nan) -> None:
        self.criterion = nn.CrossEntropyLoss(torch.tensor([1.0, bad, 1.0]))
        self.prior = torch.tensor([1.0, bad, 1.0])

    def weighted(self, out: Tensor) -> Tensor:
        loss: Tensor = self.criterion(out, TARGETS)
        return loss

    def centred(self, out: Tensor) -> Tensor:
        return (out - self.prior).square().mean()


def pos_weight(out: Tensor) -> Any:
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, torch.inf, 2.0]))
    return criterion(out, torch.zeros(4, 3))


def not_persistent(out: Tensor) -> Any:
    criterion = Scaled(PRIOR.clone(), torch.ones(3))
    return criterion(out, TARGETS)


def nested(out: Tensor) -> Any:
    criterion = Scaled(torch.ones(3), PRIOR.clone())
    return criterion(out, TARGETS)


def in_a_list(out: Tensor) -> Any:
    criteria = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(PRIOR.clone())]
    return sum(criterion(out, TARGETS) for criterion in criteria)


def in_a_dict(out: Tensor) -> Any:
    criteria = {"ce": nn.CrossEntropyLoss(PRIOR.clone())}
    return criteria["ce"](out, TARGETS)


def in_a_dataclass(out: Tensor) -> Any:
    losses = Losses(nn.CrossEntropyLoss(PRIOR.clone()))
    return losses.main(out, TARGETS)


def statistics(out: Tensor) -> Any:
    centre = Centre()
    return (out - centre.mean).square().mean()  # type: ignore[operator] # torch's union


def by_a_variable(out: Tensor) -> Any:
    doubled = PRIOR * 2
    return (out * doubled).mean()


def shifted(given: Tensor) -> Tensor:
    return given + 1


def handed_on(out: Tensor) -> Any:
    doubled = PRIOR * 2
    return (out * doubled + shifted(doubled)).mean()


HELD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "pos_weight": (pos_weight, "buffer criterion.pos_weight holds inf"),
    "not persistent": (not_persistent, "buffer criterion.scale holds NaN"),
    "nested": (nested, "buffer criterion.inner.weight holds NaN"),
    "list": (in_a_list, "buffer criteria.1.weight holds NaN"),
    "dict": (in_a_dict, "buffer criteria.ce.weight holds NaN"),
    "dataclass": (in_a_dataclass, "buffer losses.main.weight holds NaN"),
    "statistics": (statistics, "buffer centre.mean holds NaN"),
    "of a trainer": (lambda out: Trainer().weighted(out), "buffer criterion.weight holds NaN"),
    "attribute": (lambda out: Trainer().centred(out), "input `self.prior`: 1 NaN, at [1]"),
    "global": (lambda out: (out * PRIOR).mean(), "input `PRIOR`: 1 NaN, at [1]"),
    "variable": (by_a_variable, "input `doubled`: 1 NaN, at [1]"),
    "handed on": (handed_on, "input `doubled`: 1 NaN, at [1]"),
    "held by nobody": (lambda out: (out * (PRIOR * 2)).mean(), "input[1] of mul: 1 NaN, at [1]"),
}


def found_in(loss: Callable[[Tensor], Any], steps: int = 1) -> list[fxguard.types.Report]:
    torch.manual_seed(0)
    model, found = nn.Linear(4, 3), list[fxguard.types.Report]()
    with OutermostModules(Options(on_detect=found.append), follow_losses=True):
        for _ in range(steps):
            loss(model(torch.randn(4, 4))).backward()
    return found


@pytest.mark.parametrize(("loss", "message"), HELD.values(), ids=HELD)
def test_a_bad_tensor_is_named_by_what_holds_it(
    loss: Callable[[Tensor], Any], message: str
) -> None:
    """In the first batch that reads it."""
    report = found_in(loss)[0]
    assert (report.origins[0].message, report.batch_number) == (message, 0)


def test_what_reads_no_bad_tensor_reports_nothing() -> None:
    """The same objects with finite numbers."""
    trainer = Trainer(2.0)
    assert found_in(lambda out: trainer.weighted(out) + trainer.centred(out), steps=2) == []


def test_a_search_keeps_no_tensor_alive() -> None:
    """The variables of the frames that were searched are released."""
    import gc
    import weakref

    references = list[weakref.ref[Tensor]]()

    def loss(out: Tensor) -> Any:
        bad = PRIOR * 3
        references.append(weakref.ref(bad))
        return (out.detach() * bad).mean() + (out * PRIOR).mean()

    assert found_in(loss)
    gc.collect()
    assert references[0]() is None
