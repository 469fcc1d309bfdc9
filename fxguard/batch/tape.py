"""Notes operations of a script as they run, for a graph that can run again.

Operations that read tensors requiring a gradient, and operations that depend on their results,
become operations of the graph. Everything else that is read is an input. The graph is only built
when somebody asks for it, after a bad gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard.batch._live_tensors import LiveTensors
from fxguard.batch.autograd_nodes import function_of, metadata_of
from fxguard.batch.events import GraphRun
from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.batch.tape_graph import Noted, Ref, graph_of, refs, replaced
from fxguard.errors import FxguardError
from fxguard.graph.collectives import none_issued, waits
from fxguard.graph.nodes import elements_of, leaves
from fxguard.graph.operations import name_of
from fxguard.graph.random_state import RandomState, random_state_kept
from fxguard.graph.source_lines import Place
from fxguard.graph.tables import RANDOM
from fxguard.graph.torch_settings import settings_now
from fxguard.measure.at_hand import has_memory, version_of
from fxguard.measure.func_levels import are_levels_open
from fxguard.plan.reader import make_plan
from fxguard.records import Role

__all__ = ["Tape"]

MADE = "fxguard.made"  # key in the metadata of autograd nodes: the tape and the number there

MOST_CALLS = 16


class Tape:
    """The operations between some tensors and a loss.

    Args:
        names: id of a parameter or buffer to its role and qualified name.
    """

    def __init__(self, names: Mapping[int, tuple[Role, str]]) -> None:
        self.names = names
        self.calls: list[Noted] = []
        self.inputs: dict[int, tuple[Tensor, int | None]] = {}  # by number, with versions
        self.is_repeatable = True  # False once an input was written
        self.random_state: RandomState | None = None
        self.restore_settings: Callable[[], None] | None = None
        self._leaves: list[tuple[Tensor, str]] = []
        self._live = LiveTensors()
        self._count = 0
        self._me = weakref.ref(self)
        self._most_calls = MOST_CALLS  # before dead ones are forgotten

    def before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], module: str = ""
    ) -> Noted:
        """Called when an operation is about to run in a module."""
        if self.restore_settings is None:
            self.restore_settings = settings_now()
        if self.random_state is None and name_of(func) in RANDOM:
            self.random_state = RandomState.now((args, kwargs))
        versions = {id(x): version_of(x) for x in _tensors((args, kwargs))}
        return Noted(func, args, kwargs, versions, module, torch.is_grad_enabled())

    def after(self, call: Noted, result: Any, place: Place | None) -> None:
        """Called when the operation has returned this result; the user's line called it."""
        read = list(_tensors((call.args, call.kwargs)))
        if are_levels_open() or any(id(x) not in call.versions for x in read):
            return  # under torch.func, or the call changed its arguments, as a deep copy does
        written = [x for x in read if version_of(x) != call.versions[id(x)]]
        made = list(elements_of(result))
        if not (made or written) or not any(map(self._belongs_to(call), read)):
            return
        call.args, call.kwargs = replaced((call.args, call.kwargs), self._number_of(call))
        for tensor in written:
            known = self._live_number(tensor, call.versions[id(tensor)])
            if known is None or known in self.inputs:
                self.is_repeatable = False
            else:
                keys = self._live.written(tensor, call.versions[id(tensor)])
                call.written.update(key.value for key in keys)
        call.made = tuple((path, self._new(x)) for path, x in made)
        for (_, number), (_, tensor) in zip(call.made, made, strict=True):
            if tensor.grad_fn is not None:
                metadata_of(tensor.grad_fn)[MADE, tensor.output_nr] = self._me, number
        call.place = place
        call.versions = {}
        self.calls.append(call)

    def _belongs_to(self, call: Noted) -> Callable[[Tensor], bool]:
        def belongs(tensor: Tensor) -> bool:
            if tensor.requires_grad:
                return True
            number = self._live_number(tensor, call.versions[id(tensor)])
            return number is not None and number not in self.inputs

        return belongs

    def _number_of(self, call: Noted) -> Callable[[Tensor], Ref]:
        def number_of(tensor: Tensor) -> Ref:
            before = call.versions[id(tensor)]
            number = self._live_number(tensor, before)
            if number is not None and number not in self.inputs and function_of(tensor.grad_fn):
                number = None  # operations of its forward have another backward
            if number is None:
                number = self._new(tensor)
                self.inputs[number] = tensor, before
                if tensor.requires_grad and tensor.is_leaf:
                    self._leaves.append((tensor, self._name_of(tensor, call)))
            return Ref(number)

        return number_of

    def _live_number(self, tensor: Tensor, version: int | None) -> int | None:
        key = self._live.key_at(tensor, version)
        return None if key is None else key.value

    def _new(self, tensor: Tensor) -> int:
        self._count += 1
        self._live.remember_alone(tensor, Key(BETWEEN_GRAPHS, self._count))
        return self._count

    def _name_of(self, tensor: Tensor, call: Noted) -> str:
        """``weight fc.weight``, ``input[1] of mul``."""
        if id(tensor) in self.names:
            role, name = self.names[id(tensor)]
            return f"{role.value} {name}"
        read = _tensors((call.args, call.kwargs))
        position = next(i for i, each in enumerate(read) if each is tensor)
        return f"input[{position}] of {name_of(call.func)}"

    def new_leaves(self) -> list[tuple[Tensor, str]]:
        """The autograd leaves that operations have read since the last call, with names."""
        found, self._leaves = self._leaves, []
        return found

    def made_by_functions(self) -> list[Tensor]:
        """The tensors that operations read and that autograd functions made."""
        return [tensor for tensor, _ in self.inputs.values() if function_of(tensor.grad_fn)]

    def forget_dead(self) -> None:
        """Forget operations whose results nobody can ask for."""
        if len(self.calls) < self._most_calls:
            return
        self.calls = self._leading_to(self._live.alive())
        self.inputs = self._inputs_of(self.calls)
        self._most_calls = max(MOST_CALLS, 2 * len(self.calls))

    def _inputs_of(self, calls: Iterable[Noted]) -> dict[int, tuple[Tensor, int | None]]:
        read = {ref.number for call in calls for ref in refs((call.args, call.kwargs))}
        return {number: known for number, known in self.inputs.items() if number in read}

    def _leading_to(self, results: Collection[int]) -> list[Noted]:
        """The calls that made or wrote some tensors."""
        read: set[int] = set()
        found: list[Noted] = []
        for call in reversed(self.calls):
            changed = call.written.union(number for _, number in call.made)
            if any(number in results or number in read for number in changed):
                found.append(call)
                read.update(ref.number for ref in refs((call.args, call.kwargs)))
        return found[::-1]

    def number_of(self, root: Tensor) -> int | None:
        """The number of a tensor that an operation on the tape made."""
        number = self._live_number(root, version_of(root))
        return None if number is None or number in self.inputs else number

    def number_at(self, node: Any, output: int) -> int | None:
        """The same for an autograd node and one of its outputs."""
        tape, number = metadata_of(node).get((MADE, output), (None, None))
        return number if tape is not None and tape() is self else None

    def run(self, roots: Sequence[int], ended: Collection[int] = ()) -> GraphRun:
        """The operations that lead to some tensors, as a graph run.

        Args:
            roots: numbers of these tensors.
            ended: numbers of tensors that get no gradient.

        Raises:
            FxguardError: when they cannot run again: an input was written or freed since, or a
                collective would be issued.
        """
        calls = self._leading_to(set(roots))
        if not self.is_repeatable or any(waits(call.func, ()) for call in calls):
            raise FxguardError("operations between graphs that cannot run again")
        known = self._inputs_of(calls)
        if not all(_is_as_it_was(*each) for each in known.values()):
            raise FxguardError("an input of operations between graphs was changed or freed")
        written = {number for call in calls for number in call.written}
        graph = graph_of(calls, known, roots, set(ended) - written - set(roots))
        graph_module = GraphModule(torch.nn.Module(), graph)
        inputs = [tensor for tensor, _ in known.values()]
        self._find_examples(graph_module, inputs)
        arguments = {
            position: self.names[id(tensor)]
            for position, tensor in enumerate(inputs)
            if id(tensor) in self.names
        }
        plan = make_plan(graph_module, {}, arguments, has_marks=False)
        for node in graph.nodes:
            node.meta.pop("example_value", None)
        statistics = torch.empty((0, 2))
        return GraphRun(
            plan, graph_module, statistics, tuple(inputs), self.random_state, ("", ""), ()
        )

    def _find_examples(self, graph_module: GraphModule, inputs: Sequence[Tensor]) -> None:
        """Run the graph once, with the settings of the first run, for an example of each value."""
        restore = settings_now()
        try:
            with random_state_kept(inputs), none_issued(graph_module, inputs):
                if self.random_state is not None:
                    self.random_state.restore()
                if self.restore_settings is not None:
                    self.restore_settings()
                _WithExamples(graph_module).run(*map(_plain, inputs))
        finally:
            restore()


class _WithExamples(Interpreter):
    """Runs a graph, and keeps the result of each node as its example."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run_node(self, n: Node) -> Any:
        n.meta["example_value"] = result = super().run_node(n)
        return result


def _is_as_it_was(tensor: Tensor, version: int | None) -> bool:
    """Whether an input is unchanged; subclasses may issue collectives in any operation."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_plain and has_memory(tensor) and version_of(tensor) == version


def _plain(tensor: Tensor) -> Tensor:
    """A copy of the numbers, for a graph that may write them."""
    if not tensor.requires_grad:
        return tensor.detach().clone()
    return tensor.detach().clone().requires_grad_().clone()


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))
