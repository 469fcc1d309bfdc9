"""The operations of every N-th step, run twice: what does not repeat, and on which machine.

In a rechecked step each operation of the captured graphs, between them, in the loss and in the
backward runs once more on its operands, at once. A graph that a compiler runs is run twice as a
whole. Weights are looked at from the end of the step before, gradients until their step.
"""

from __future__ import annotations

import contextlib
import json
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import Module

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.runner import Runner
from fxguard.capture.traced_hooks import compiles_backwards
from fxguard.forgiving import theirs
from fxguard.graph.random_state import RandomState
from fxguard.measure.at_hand import own_arithmetic
from fxguard.quiet._memory import Held, Memory, hold
from fxguard.quiet._training import Rule, Step, Training
from fxguard.quiet._twice import Twice, Unlike, difference, same_bits
from fxguard.ranks import agreement
from fxguard.records import title_of
from fxguard.rerun.start import Start, copies_of
from fxguard.source.lines import Place, calling_line, lines_of_trace, source_of_trace
from fxguard.torch_names import current_autograd_node, sequence_number

__all__ = ["Recheck"]

WAITS = 20  # steps for what other ranks have found
TRANSIENT = (
    "the processor or its memory made an error: take the machine out, and go back to weights from "
    "before"
)
VARIES = "its kernel gives other bits each time; torch.use_deterministic_algorithms(True) says why"


@dataclass(frozen=True, slots=True)
class _Where:
    """The operation that runs."""

    title: str
    place: Place | None


@dataclass(frozen=True, slots=True)
class _Found:
    """Something that did not repeat, until all ranks have told what they found."""

    step: int
    what: str
    place: Place | None
    evidence: str
    advice: str


_Watched = tuple[weakref.ref[Tensor], Held]  # a weight or a gradient, and what it held


class Recheck(Rule):
    """Runs the operations of every N-th step twice.

    Args:
        training: of the model.
        every: N.

    Attributes:
        steps: how many steps were rechecked.
        documented: operations that did not repeat and that torch documents as nondeterministic.
    """

    def __init__(self, training: Training, every: int) -> None:
        super().__init__(training)
        self.every = every
        self.steps = 0
        self.documented: set[str] = set()
        self._memory = Memory()
        self._twice = Twice(self._unlike, self._memory)
        self._where = _Where("", None)
        self._forward: dict[int, _Where] = {}  # of operations with a backward, by their number
        self._calls = 0  # of the model, where nobody tells of steps
        self._has_steps = False
        self._now: int | None = None  # the step that is rechecked
        self._weights: dict[str, _Watched] = {}
        self._gradients: dict[str, _Watched] = {}
        self._waiting: list[_Found] = []
        self._counts: dict[int, int] = {}  # what did not repeat, by step

    @property
    def coverage(self) -> str:
        """What was rechecked, for the last line; "" for nothing."""
        twice = self._twice
        if not self.steps:
            return ""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        text = f"; {twice.count} operations of {steps} ran twice"
        if self.documented:
            names = ", ".join(sorted(self.documented))
            text += f", {names} with other bits, which torch documents"
        return text

    # What is rechecked.

    def begins(self, batch: Batch) -> None:
        """Recheck a batch, if it is of an N-th step."""
        self._calls += 1
        number = self.training.steps if self._has_steps else self._calls - 1
        if (number + 1) % self.every:
            self._now = None
            return
        if not torch.is_grad_enabled():
            return
        if self._now != number:
            self._now, self.steps = number, self.steps + 1
            self._counts[number] = 0
            self._compare(self._weights, "weight")
            self._weights = _watched(self._named())
        batch.watchers.append(_Runs(self, batch))

    def watches_steps(self) -> None:
        """Called when steps of optimizers are told from now on."""
        self._has_steps = True

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A block in which a backward runs."""
        if self._now is None or compiles_backwards():
            yield
            return
        self._where = _Where("", None)
        with self._twice:
            yield

    def gradients_came(self) -> None:
        if self._now is None:
            return
        named = {name: x.grad for name, x in self._named() if x.grad is not None}
        for name, gradient in named.items():
            bit = self._memory.flipped(gradient)
            if bit is not None:
                self._add_flipped(f"gradient of {self.training.full(name)}", gradient, bit)
        self._gradients = _watched(named.items())

    def before(self, step: Step) -> None:
        if self._now is not None:
            self._compare(self._gradients, "gradient of")
            self._compare(self._weights, "weight")
            self._leave()
        self._judge()

    def after(self, step: Step) -> None:
        self._now, self._weights, self._gradients = None, {}, {}
        self._memory.forget()
        self._forward.clear()
        if (step.number + 1) % self.every == 0:  # the next step is rechecked
            self._weights = _watched(self._named())

    def ends(self) -> None:
        self._judge(is_over=True)

    # Runs.

    def graph(
        self, run: GraphRun, ran: Callable[..., Any], args: Sequence[Any], batch: Batch
    ) -> Any:
        """Run a graph: its operations twice, or all of it if a compiler runs it."""
        module = getattr(ran, "__self__", None)
        if run.is_compiled or not isinstance(module, GraphModule):
            return self._whole(run, ran, args)
        steps = {x.node: x for x in run.plan.steps if not x.inside}

        def where(node: Node) -> _Where:
            step = steps.get(node.name)
            title = node.name if step is None else step.title
            lines = lines_of_trace(node.meta.get("stack_trace"))
            source = source_of_trace(node.meta.get("stack_trace"))
            place = None if source is None or not lines else (source.file, source.line)
            return _Where(title, place)

        return _Interpreted(module, self, where).run(*args)

    def operation(
        self, function: Callable[..., Any], args: Any, kwargs: Any, kind: str, module: str
    ) -> Any:
        """Run an operation between graphs."""
        with self.at(_Where(title_of(module, kind), calling_line())), self._twice:
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def at(self, where: _Where) -> Iterator[None]:
        """A block in which an operation runs, with the numbers of what autograd keeps of it."""
        before, self._where = self._where, where
        first = sequence_number()
        try:
            yield
        finally:
            for number in range(first, sequence_number()):
                self._forward[number] = where
            self._where = before

    @property
    def mode(self) -> Twice:
        """The mode in which operations run twice."""
        return self._twice

    def _whole(self, run: GraphRun, ran: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a compiled graph twice, on copies of what it writes.

        On a GPU it runs once: a recorded CUDA graph would write its results over those of before.
        """
        if Start(run).why_not() or any(isinstance(x, Tensor) and x.is_cuda for x in args):
            return ran(*args)
        try:
            copies = copies_of(run)
        except RuntimeError:  # no memory
            return ran(*args)
        before = RandomState.now(args)
        outputs = ran(*args)
        after = RandomState.now(args)
        try:
            before.restore()
            second = ran(*copies)
        except theirs():  # no memory for a second run
            return outputs
        finally:
            after.restore()
        self._twice.count += 1
        with own_arithmetic():
            for at, (one, two) in enumerate(zip(outputs, second, strict=False)):
                if not isinstance(one, Tensor) or not isinstance(two, Tensor):
                    continue
                if same_bits(one, two):
                    continue
                value = run.plan.outputs[at] if at < len(run.plan.outputs) else None
                step = next((x for x in run.plan.steps if value in x.outputs), None)
                title = "a compiled graph"
                title += "" if step is None else f" up to {step.title}"
                place = None
                if step is not None and step.source is not None:
                    place = step.source.file, step.source.line
                with self.at(_Where(title, place)):
                    self._unlike(Unlike("graph", difference(one, two), is_once=True))
                break
        return outputs

    # What was found.

    def _unlike(self, unlike: Unlike) -> None:
        if unlike.is_documented:
            self.documented.add(unlike.operation)
            return
        where = self._where
        if not where.title:  # in a backward
            node = current_autograd_node()
            number = -1 if node is None else node._sequence_nr()
            known = self._forward.get(number)
            name = unlike.operation if node is None else node.name()
            title = f"backward of {known.title}" if known else f"backward ({name})"
            where = _Where(title, known.place if known else None)
        self._add(where, unlike.evidence, TRANSIENT if unlike.is_once else VARIES)

    def _add(self, where: _Where, evidence: str, advice: str) -> None:
        number = self._now or 0
        self._counts[number] = self._counts.get(number, 0) + 1
        self._waiting.append(_Found(number, where.title, where.place, evidence, advice))
        if agreement.rank_and_count()[1] < 2:
            self._judge(is_over=True)

    def _compare(self, held: dict[str, _Watched], what: str) -> None:
        """Look for a flipped bit in what nothing has written."""
        for name, (reference, before) in list(held.items()):
            tensor = reference()
            bit = None if tensor is None else before.flipped(tensor)
            if tensor is not None and bit is not None:
                self._add_flipped(f"{what} {self.training.full(name)}", tensor, bit)
                del held[name]

    def _add_flipped(self, what: str, tensor: Tensor, bit: int) -> None:
        evidence = f"bit {bit} of one of its {tensor.numel()} elements changed in memory"
        self._add(_Where(what, None), evidence, TRANSIENT)

    def _named(self) -> list[tuple[str, Tensor]]:
        model: Module | None = self.training.model()
        return [] if model is None else [*model.named_parameters()]

    # Ranks.

    def _leave(self) -> None:
        if self._now is not None and agreement.rank_and_count()[1] > 1:
            count = self._counts.get(self._now, 0)
            agreement.leave(self._key(self._now), json.dumps(count))

    def _key(self, step: int) -> str:
        return f"recheck/{self.training.held_as()}/{step}"

    def _judge(self, *, is_over: bool = False) -> None:
        """Tell what was found, once all ranks have told of that step, or too much time has gone."""
        rank, count = agreement.rank_and_count()
        for each in list(self._waiting):
            others = agreement.left_by_others(self._key(each.step)) if count > 1 else {}
            is_known = len(others) >= count - 1
            if not (is_known or is_over or self.training.steps > each.step + WAITS):
                continue
            self._waiting.remove(each)
            what = each.what
            if count > 1 and is_known and not any(json.loads(text) for text in others.values()):
                what = f"machine: rank {rank} of {count}, alone, on {socket.gethostname()}: {what}"
            self.training.found(
                "does not repeat",
                what,
                place=each.place,
                evidence=each.evidence,
                advice=each.advice,
            )


def _watched(named: Iterable[tuple[str, Tensor]]) -> dict[str, _Watched]:
    found = ((name, x, hold(x)) for name, x in named)
    return {name: (weakref.ref(x), held) for name, x, held in found if held is not None}


class _Runs(Runner):
    """The runs of one batch."""

    def __init__(self, recheck: Recheck, batch: Batch) -> None:
        self.recheck, self.batch = recheck, batch

    def of_loss(self) -> _Runs:
        return self

    def run_graph(self, run: GraphRun, ran: Callable[..., Any], args: Sequence[Any]) -> Any:
        return self.recheck.graph(run, ran, args, self.batch)

    def run_operation(
        self, function: Callable[..., Any], args: Any, kwargs: Any, kind: str, module: str
    ) -> Any:
        return self.recheck.operation(function, args, kwargs, kind, module)


class _Interpreted(Interpreter):
    """Runs a graph node by node, and each of its own operations twice."""

    def __init__(
        self, module: GraphModule, recheck: Recheck, where: Callable[[Node], _Where]
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an exception is that of the model
        self.recheck, self.where = recheck, where

    def run_node(self, n: Node) -> Any:
        kind = getattr(n.target, "__module__", "") or ""
        if n.op not in ("call_function", "call_method", "call_module") or kind.startswith(
            "fxguard"
        ):
            return super().run_node(n)
        with self.recheck.at(self.where(n)), self.recheck.mode:
            return super().run_node(n)
