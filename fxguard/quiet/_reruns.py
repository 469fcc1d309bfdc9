"""The runs of a rechecked step: each operation twice, and a compiled graph twice as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard.batch.events import GraphRun
from fxguard.batch.runner import Runner
from fxguard.capture.traced_hooks import compiles_backwards
from fxguard.forgiving import theirs
from fxguard.graph.random_state import RandomState
from fxguard.measure.at_hand import own_arithmetic
from fxguard.quiet._memory import Memory
from fxguard.quiet._twice import Twice, Unlike, difference, same_bits
from fxguard.records import Source, title_of
from fxguard.rerun.start import Start, copies_of
from fxguard.source.lines import Place, calling_line, source_of_trace
from fxguard.torch_names import current_autograd_node, sequence_number

__all__ = ["Reruns", "Where"]


@dataclass(frozen=True, slots=True)
class Where:
    """The operation that runs."""

    title: str
    place: Place | None


class Reruns(Runner):
    """Runs what batches run, twice.

    Args:
        unlike: called with what did not repeat, and where.

    Attributes:
        memory: what tensors held when they were made.
        documented: operations that did not repeat and that torch documents as nondeterministic.
    """

    def __init__(self, unlike: Callable[[Where, Unlike], None]) -> None:
        self.unlike = unlike
        self.memory = Memory()
        self.documented: set[str] = set()
        self._twice = Twice(self._hear, self.memory)
        self._where = Where("", None)
        self._forward: dict[int, Where] = {}  # of operations with a backward, by their number

    @property
    def count(self) -> int:
        """How many operations ran twice."""
        return self._twice.count

    def of_loss(self) -> Reruns:
        return self

    def forget(self) -> None:
        """Forget what was made: the step has ended."""
        self.memory.forget()
        self._forward.clear()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A block in which a backward runs."""
        if compiles_backwards():
            yield
            return
        self._where = Where("", None)
        with self._twice:
            yield

    def run_graph(self, run: GraphRun, ran: Callable[..., Any], args: Sequence[Any]) -> Any:
        module = getattr(ran, "__self__", None)
        if run.is_compiled or not isinstance(module, GraphModule):
            return self._whole(run, ran, args)
        steps = {x.node: x for x in run.plan.steps if not x.inside}

        def where(node: Node) -> Where:
            step = steps.get(node.name)
            source = source_of_trace(node.meta.get("stack_trace"))
            return Where(node.name if step is None else step.title, _place_of(source))

        return _Interpreted(module, self, where).run(*args)

    def run_operation(
        self, function: Callable[..., Any], args: Any, kwargs: Any, kind: str, module: str
    ) -> Any:
        with self.at(Where(title_of(module, kind), calling_line())):
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def at(self, where: Where) -> Iterator[None]:
        """A block in which an operation runs twice, with the numbers that autograd gives it."""
        before, self._where = self._where, where
        first = sequence_number()
        try:
            with self._twice:
                yield
        finally:
            for number in range(first, sequence_number()):
                self._forward[number] = where
            self._where = before

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
                if not same_bits(one, two):
                    unlike = Unlike("graph", difference(one, two), is_once=True)
                    self.unlike(_of_graph(run, at), unlike)
                    break
        return outputs

    def _hear(self, unlike: Unlike) -> None:
        """Say where it was that something did not repeat."""
        if unlike.is_documented:
            self.documented.add(unlike.operation)
            return
        where = self._where
        if not where.title:  # in a backward
            node = current_autograd_node()
            known = None if node is None else self._forward.get(node._sequence_nr())
            name = unlike.operation if node is None else node.name()
            title = f"backward of {known.title}" if known else f"backward ({name})"
            where = Where(title, known.place if known else None)
        self.unlike(where, unlike)


def _of_graph(run: GraphRun, output: int) -> Where:
    """A compiled graph, by the operation that made one of its outputs."""
    value = run.plan.outputs[output] if output < len(run.plan.outputs) else None
    step = next((x for x in run.plan.steps if value in x.outputs), None)
    if step is None:
        return Where("a compiled graph", None)
    return Where(f"a compiled graph up to {step.title}", _place_of(step.source))


def _place_of(source: Source | None) -> Place | None:
    return None if source is None else source.position


class _Interpreted(Interpreter):
    """Runs a graph node by node, and each of its own operations twice."""

    def __init__(self, module: GraphModule, reruns: Reruns, where: Callable[[Node], Where]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an exception is that of the model
        self.reruns, self.where = reruns, where

    def run_node(self, n: Node) -> Any:
        kind = getattr(n.target, "__module__", "") or ""
        if not n.op.startswith("call_") or kind.startswith("fxguard"):
            return super().run_node(n)
        with self.reruns.at(self.where(n)):
            return super().run_node(n)
