"""All that led from the data to a loss, to run it again: with the same data, or with other data.

Graphs that ran, and operations between them and behind them, are found with the nodes of autograd.
So a loss has a lineage from its forward until its backward frees what that had kept.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from fxguard.batch.autograd_nodes import function_of, metadata_of
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import RAN, KeptRun
from fxguard.batch.tape import MADE, Tape
from fxguard.batch.tape_graph import Made
from fxguard.errors import FxguardError
from fxguard.graph.nodes import class_name
from fxguard.graph.operations import name_of
from fxguard.graph.torch_settings import settings_now
from fxguard.graph.wide_form import NotJudged
from fxguard.rerun.start import GONE, Start

__all__ = ["Lineage"]

MOST = 1024  # graph runs, and operations outside them

NOTHING = "nothing that fxguard followed has made the loss"
LONG = f"more than {MOST} graphs and operations led to the loss"
WRITTEN = "a graph writes what was computed before it"
FUNCTION = "{}, an autograd function of the script, made a part of the loss"
UNSEEN = "{} is made outside the model: only fxguard.watch and fxguard run see it run"
OF_TORCH = "{}, an autograd function of torch, made a part of the loss"
WITHOUT = "the model computes a part of it without gradients"
DRAWN = "a compiler draws the random numbers of a graph"


class Lineage:
    """What led to a tensor.

    Args:
        root: a tensor that a backward is about to begin with.

    Attributes:
        data: what was given to it and is no weight and no single number: inputs, targets, masks,
            in a fixed order.
        form: equal for two tensors that came about in the same way, from other data.

    Raises:
        NotJudged: when a part of it was not followed.

    Example:
        >>> loss = loss_of(model(inputs), targets)
        >>> lineage = Lineage(loss)
        >>> lineage.data                      # the inputs, the targets
        [tensor(...), tensor(...)]
        >>> lineage.again()                   # the same loss
        >>> lineage.again([others, theirs])   # the loss that these have
    """

    def __init__(self, root: Tensor) -> None:
        self.data: list[Tensor] = []
        self._places: dict[int, int] = {}  # by the identity of the data: where in `data`
        self._parts: dict[tuple[int, int], _Part] = {}  # by identity
        source = self._source_of(root)
        if not isinstance(source, _Output):
            raise NotJudged(NOTHING)
        self._root = source
        self._order = self._in_order(source.part)
        self.form = tuple(part.form for part in self._order)

    def again(
        self,
        data: Sequence[Tensor] | None = None,
        weights: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """The tensor, of a second run that changes nothing.

        Args:
            data: in the place of ``data``, of the same shapes; None for the same.
            weights: in the place of weights, by the identity of these; None for those of now.

        Raises:
            NotJudged: when no second run may begin, or in place of a collective.
            Exception: whatever an operation raises.
        """
        data = self.data if data is None else data
        made: dict[_Part, Sequence[Any]] = {}
        for part in self._order:
            run, restore_settings = part.run()
            start, args = Start(run), run.args or ()
            with _settings(restore_settings), start.begun() as given:
                for position, argument in enumerate(args if weights else ()):
                    given[position] = (weights or {}).get(id(argument), given[position])
                for position, source in part.sources:
                    is_written = given[position] is not args[position]
                    value = data[source] if isinstance(source, int) else source.of(made)
                    given[position] = value.clone() if is_written else value
                made[part] = start.walk(given)[0]
        return self._root.of(made)

    def _source_of(self, tensor: Tensor) -> _Output | int | None:
        """What made a tensor: an output of a part, or a position in the data; None for neither."""
        node = tensor.grad_fn
        if node is None:
            stands = isinstance(tensor, Parameter) or not tensor.dim()
            return None if stands else self._place_of(tensor)
        metadata = metadata_of(node)
        ran, noted = metadata.get((RAN, tensor.output_nr)), metadata.get((MADE, tensor.output_nr))
        if ran is not None:
            kept, number = ran
            return _Output(self._part(id(kept), 0, lambda: _Graph(kept)), number)
        if noted is not None:
            reference, value = noted
            tape = reference()
            if tape is not None:
                part = self._part(id(tape), value.number, lambda: _Operations(tape, value))
                return _Output(part, 0)
        function = function_of(node)
        reason = OF_TORCH if isinstance(node, BackwardCFunction) else UNSEEN
        reason = reason if function is None else FUNCTION
        raise NotJudged(reason.format(class_name(function or type(node))))

    def _part(self, one: int, other: int, make: Callable[[], _Part]) -> _Part:
        found = self._parts.get((one, other))
        if found is None:
            if len(self._parts) >= MOST:
                raise NotJudged(LONG)
            found = self._parts[one, other] = make()
        return found

    def _place_of(self, tensor: Tensor) -> int:
        place = self._places.get(id(tensor))
        if place is None:
            place = self._places[id(tensor)] = len(self.data)
            self.data.append(tensor)
        return place

    def _in_order(self, last: _Part) -> list[_Part]:
        """The parts, each behind those that it reads."""
        found = list[_Part]()
        todo = [(last, self._read_by(last))]
        entered = {last}
        while todo:
            part, before = todo[-1]
            following = next(before, None)
            if following is None:
                found.append(part)
                todo.pop()
            elif following not in entered:
                entered.add(following)
                todo.append((following, self._read_by(following)))
        return found

    def _read_by(self, part: _Part) -> Iterator[_Part]:
        for position, tensor in part.reads():
            source = self._source_of(tensor)
            if source is None:
                continue
            part.sources.append((position, source))
            if isinstance(source, _Output):
                yield source.part


@dataclass(frozen=True, slots=True)
class _Output:
    """Something that a part has made."""

    part: _Part
    number: int

    def of(self, made: Mapping[_Part, Sequence[Any]]) -> Tensor:
        found: Tensor = made[self.part][self.number]
        return found


class _Part(abc.ABC):
    """A graph that ran, or operations that are noted on a tape.

    Attributes:
        form: tells it from parts that do something else.
        sources: where what it reads comes from, with the positions among its arguments.
    """

    form: Hashable

    def __init__(self) -> None:
        self.sources: list[tuple[int, _Output | int]] = []

    @abc.abstractmethod
    def reads(self) -> list[tuple[int, Tensor]]:
        """What it reads, but for weights that a graph has: with positions among its arguments."""

    @abc.abstractmethod
    def run(self) -> tuple[GraphRun, Callable[[], None]]:
        """It as an open run, and a function that restores torch's settings of that time."""


class _Graph(_Part):
    def __init__(self, kept: KeptRun) -> None:
        super().__init__()
        self.kept = kept
        self.form = id(kept.event.graph_module), kept.event.names

    def reads(self) -> list[tuple[int, Tensor]]:
        run, args = self.kept.event, self.kept.arguments()
        if args is None:
            raise NotJudged(GONE)
        if run.draws is not None:
            raise NotJudged(DRAWN)
        given = run.plan.inputs
        for position, value in given if run.plan.overwritten else ():
            is_made = value in run.inputs or value in run.derived
            if is_made and position in run.plan.overwritten:
                raise NotJudged(WRITTEN)
        read = [(position, x) for position, _ in given if isinstance(x := args[position], Tensor)]
        values = dict(given)
        for position, x in read:
            is_made = values[position] in run.inputs or values[position] in run.derived
            if is_made and x.grad_fn is None and x.dim():  # out of buffers, it may be: no data
                raise NotJudged(WITHOUT)
        return read

    def run(self) -> tuple[GraphRun, Callable[[], None]]:
        return self.kept.opened(), self.kept.restore_settings


class _Operations(_Part):
    def __init__(self, tape: Tape, value: Made) -> None:
        super().__init__()
        self.tape, self.value = tape, value
        self._run: tuple[GraphRun, Callable[[], None]] | None = None
        try:
            self._given = tape.read_by([value])
        except FxguardError as reason:
            raise NotJudged(str(reason)) from reason
        self.form = name_of(value.call.func), value.call.module, len(self._given)

    def reads(self) -> list[tuple[int, Tensor]]:
        names = self.tape.names
        read = enumerate(each.tensor for each in self._given)
        return [(position, x) for position, x in read if id(x) not in names]

    def run(self) -> tuple[GraphRun, Callable[[], None]]:
        if self._run is None:
            try:
                self._run = self.tape.run([self.value])
            except FxguardError as reason:
                raise NotJudged(str(reason)) from reason
        return self._run


@contextlib.contextmanager
def _settings(restore: Callable[[], None]) -> Iterator[None]:
    """Torch's settings as they were once."""
    restore_now = settings_now()
    try:
        restore()
        yield
    finally:
        restore_now()
