"""What the operations of a loss read that no guarded model has made, as series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxguard.batch.batch import Batch
from fxguard.batch.events import UncapturedOperation
from fxguard.batch.keys import Key
from fxguard.batch.plain_operations import Brief
from fxguard.history._open_step import OpenStep
from fxguard.history._places import detail_of
from fxguard.history._series import Kind
from fxguard.measure.traceable import NOTES
from fxguard.records import Role
from fxguard.source.assigned import statement_at
from fxguard.source.lines import Place, source_at
from fxguard.source.named import argument_text

__all__ = ["ReadByLoss"]

# Of these, a plain number is a term, a factor, an exponent or a bound. Of others it may be a size.
TAKE_NUMBERS = frozenset({"add", "clamp", "clamp_max", "clamp_min", "div", "mul", "pow", "sub"})
OPERAND = "input["  # how labels of operands begin; those of a model's outputs do not
LONG = 32  # characters: a longer expression is no name


class ReadByLoss:
    """Adds tensors that a script has made, with their magnitudes, and plain numbers.

    Args:
        step: the step that runs.
    """

    def __init__(self, step: OpenStep) -> None:
        self._step = step
        # By operation, its place, which one of these it is, and the label of what it reads.
        self._series: dict[tuple[str, Place | None, int, str], int] = {}
        self._noted = set[int]()  # values of the batch

    def begins(self) -> None:
        """Another batch begins."""
        self._noted.clear()

    def add(
        self,
        batch: Batch,
        between: Sequence[Sequence[float]],
        event: Brief | UncapturedOperation,
        line: str,
        which: int,
    ) -> None:
        """Add what an operation reads, before what it makes.

        Args:
            batch: of the loss.
            between: the magnitudes of its values.
            event: the operation.
            line: as series name it.
            which: which operation of its kind and line it is, from 1.
        """
        takes_numbers = event.kind in TAKE_NUMBERS
        for label, x in _operands(event):
            if type(x) is Key:
                if not x.is_between_graphs or x.value in self._noted:
                    continue
                value = batch.values[x.value]
                is_given = value.role is Role.INPUT and value.name.startswith(OPERAND)
                if is_given and not value.needs_gradient and between[x.value][1] not in NOTES:
                    self._noted.add(x.value)
                    low, high = between[x.value]
                    self._step.note(self._of("target", event, line, which, label), low, high)
            elif takes_numbers and (type(x) is float or type(x) is int):
                self._step.note(self._of("number", event, line, which, label), x, x)

    def _of(
        self, kind: Kind, event: Brief | UncapturedOperation, line: str, which: int, label: str
    ) -> int:
        """The position of a series."""
        asked = event.kind, event.place, which, label
        found = self._series.get(asked)
        if found is None:
            number = detail_of(which, 1)
            if kind == "number":
                what = event.kind
            else:  # a name, and so no detail
                what = _name(event, label) or f"an operand of {event.kind} {number}".rstrip()
                number = ""
            found = self._step.series(kind, what, line, detail=number, is_of_loss=True)
            self._series[asked] = found
        return found


def _operands(event: Brief | UncapturedOperation) -> Iterator[tuple[str, object]]:
    """What an operation was given, by keyword or position."""
    if isinstance(event, Brief):
        yield from ((str(at), x) for at, x in enumerate(event.args))
        yield from event.kwargs.items()
    else:
        yield from ((label.removeprefix(OPERAND).rstrip("]"), key) for label, key in event.inputs)


def _name(event: Brief | UncapturedOperation, label: str) -> str:
    """What a script calls an operand; "" if that is not certain."""
    if not label.isdigit():
        return f"{label} of {event.kind}"
    if event.place is None:
        return ""
    text = argument_text(statement_at(source_at(event.place)), event.kind, int(label))
    return text if len(text) <= LONG else ""
