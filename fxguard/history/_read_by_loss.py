"""What the operations of a loss read that no guarded model has made, as series."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor

from fxguard.batch.events import UncapturedOperation
from fxguard.batch.keys import Key
from fxguard.batch.plain_operations import Brief, LossBatch
from fxguard.history._data import note_data
from fxguard.history._open_step import OpenStep
from fxguard.history._places import detail_of
from fxguard.plan.plan import Value
from fxguard.source.assigned import statement_at
from fxguard.source.lines import Place, source_at
from fxguard.source.named import argument_text

__all__ = ["ReadByLoss"]

# Of these, a plain number is a term, a factor, an exponent or a bound. Of others it may be a size.
TAKE_NUMBERS = frozenset({"add", "clamp", "clamp_max", "clamp_min", "div", "mul", "pow", "sub"})
OPERAND = "input["  # how labels of operands begin; those of a model's outputs do not
LONG = 32  # characters: a longer expression is no name


class ReadByLoss:
    """Adds tensors that a script has made, and plain numbers.

    Args:
        step: the step that runs.
    """

    def __init__(self, step: OpenStep) -> None:
        self._step = step
        # By operation, its place, which one of these it is, and the label of what it reads.
        self._names: dict[tuple[str, Place | None, int, str], str] = {}
        self._noted: dict[int, weakref.ref[Tensor]] = {}  # of the last batch, by value

    def begins(self) -> None:
        """Another batch begins."""
        self._noted.clear()

    def has_noted(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of those that the last batch was given."""
        return any(each() is tensor for each in self._noted.values())

    def add(
        self, batch: LossBatch, event: Brief | UncapturedOperation, line: str, which: int
    ) -> None:
        """Add what an operation reads.

        Args:
            batch: of the loss.
            event: the operation.
            line: as series name it.
            which: which operation of its kind and line it is, from 1.
        """
        takes_numbers = event.kind in TAKE_NUMBERS
        for label, x in _operands(event):
            if type(x) is Key:
                tensor = None if x.value in self._noted else batch.operand(x)
                if tensor is not None and _is_of_script(batch.values[x.value]):
                    self._noted[x.value] = weakref.ref(tensor)
                    name = self._name(event, which, label)
                    note_data(self._step, "target", name, tensor, line)
            elif takes_numbers and (type(x) is float or type(x) is int):
                detail = detail_of(which, 1)
                series = self._step.series(
                    "number", event.kind, line, detail=detail, is_of_loss=True
                )
                self._step.note(series, float(x), float(x))

    def _name(self, event: Brief | UncapturedOperation, which: int, label: str) -> str:
        asked = event.kind, event.place, which, label
        name = self._names.get(asked)
        if name is None:
            number = f" {detail_of(which, 1)}" if which > 1 else ""
            name = _name(event, label) or f"an operand of {event.kind}{number}"
            self._names[asked] = name
        return name


def _is_of_script(value: Value) -> bool:
    """Whether a value is no output of a guarded model, and is not trained."""
    return value.name.startswith(OPERAND) and not value.needs_gradient


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
    if event.place is None or not isinstance(event, Brief):  # labels of others count some alone
        return ""
    method = getattr(Tensor, event.kind, None)
    is_method = event.func is method or hasattr(event.func, "__objclass__")
    code = statement_at(source_at(event.place))
    text = argument_text(code, event.kind, int(label), is_method=is_method)
    return text if len(text) <= LONG else ""
