"""What the rules share: the training of one model, and the faults found in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.batch.late_writes import LateWrites
from fxguard.batch.loss import Loss
from fxguard.report.quiet_fault import FaultKind, QuietFault
from fxguard.source.lines import Place, source_at

__all__ = ["MANY", "Rule", "Step", "Training"]

MANY = 20  # steps: so many show what a training does in all of them


@dataclass(frozen=True, slots=True)
class Step:
    """A step of an optimizer that holds weights of the model.

    Attributes:
        optimizer: it.
        weights: those of the model that it holds, by name.
        number: how many steps it is of the model, from 1.
        is_learning: whether its learning rate is above 0.
    """

    optimizer: Optimizer
    weights: Mapping[str, Tensor]
    number: int
    is_learning: bool


class Training:
    """The training of one model.

    Args:
        model: gives the model; None when it is gone.
        held_as: the name that a script has for the model; "" if names need not begin with it.
        writes: gives what the script has written since the last backward; None if that is not seen.
        is_scaled: whether a GradScaler has multiplied the last loss.
        of_models: gives the identities of the weights of all models that are watched.
        tell: called with each new fault.

    Attributes:
        steps: how many an optimizer of the model's weights has made.
        faults: what was found, each once.
    """

    def __init__(
        self,
        model: Callable[[], Module | None],
        held_as: Callable[[], str],
        writes: Callable[[], LateWrites | None],
        is_scaled: Callable[[], bool],
        of_models: Callable[[], Collection[int]],
        tell: Callable[[QuietFault], object],
    ) -> None:
        self.model = model
        self.held_as = held_as
        self.writes = writes
        self.is_scaled = is_scaled
        self.of_models = of_models
        self.steps = 0
        self.faults: list[QuietFault] = []
        self._tell = tell
        self._known: set[tuple[FaultKind, str]] = set()

    def full(self, name: str) -> str:
        """The name of a weight, as scripts with several models have it."""
        return f"{self.held_as()}.{name}".lstrip(".")

    def has(self, kind: FaultKind) -> bool:
        """Whether a fault of a kind was found."""
        return any(fault.kind == kind for fault in self.faults)

    def found(
        self,
        kind: FaultKind,
        what: str,
        *,
        place: Place | None = None,
        evidence: str = "",
        advice: str = "",
    ) -> None:
        """Note a fault, once for each kind and line.

        Args:
            kind: of fault.
            what: it is about.
            place: the line of the script.
            evidence: what was seen.
            advice: what to do.
        """
        source = "" if place is None else source_at(place).place
        if (kind, source or what) in self._known:
            return
        self._known.add((kind, source or what))
        fault = QuietFault(kind, what, source, evidence, advice, self.steps)
        self.faults.append(fault)
        self._tell(fault)


class Rule:
    """One kind of fault. Each method does nothing here.

    Args:
        training: of the model.
    """

    def __init__(self, training: Training) -> None:
        self.training = training

    def loss_comes(self, loss: Loss, place: Place | None) -> None:
        """Called before a backward of a loss that was computed from outputs of the model."""

    def backward_comes(self, place: Place | None) -> None:
        """Called before any backward of the process, with the line that begins it."""

    def gradients_came(self) -> None:
        """Called when a backward has brought gradients to weights of the model."""

    def before(self, step: Step) -> None:
        """Called before a step of an optimizer that holds weights of the model."""

    def after(self, step: Step) -> None:
        """Called behind it."""

    def of_others(self, optimizer: Optimizer) -> None:
        """Called before a step of an optimizer that holds no weight of the model."""

    def ends(self) -> None:
        """Called when the training has ended."""
