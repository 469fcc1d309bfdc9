"""Notes operations of a script as they run, for a graph that can run again.

Operations that read tensors requiring a gradient, and operations that depend on their results,
become operations of the graph. Everything else that is read is an input. The graph is only built
when somebody asks for it, after a bad gradient.

What was noted of a result belongs to the result: to the tensor, and to its node in the autograd
graph. It refers to what the operation read, and never to what came later. So it is gone with both,
at once, and the inputs with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard.batch.autograd_nodes import function_of, metadata_of
from fxguard.batch.events import EXCHANGED, GraphRun
from fxguard.batch.tape_graph import Given, Made, Noted, filled, graph_of, replaced
from fxguard.errors import FxguardError
from fxguard.graph.collectives import none_issued, waits
from fxguard.graph.exchanges import exchange_of
from fxguard.graph.nodes import elements_of, leaves, memory_of
from fxguard.graph.operations import has_effects, name_of
from fxguard.graph.random_state import RandomState, random_state_kept
from fxguard.graph.tables import RANDOM
from fxguard.graph.torch_settings import settings_now
from fxguard.measure.at_hand import has_memory, version_of
from fxguard.measure.func_levels import are_levels_open
from fxguard.plan.reader import make_plan
from fxguard.records import Role
from fxguard.source.lines import Place

__all__ = ["MADE", "Tape"]

GONE = "operations between graphs that cannot run again"
MOST_COPIED = 2**20  # elements of a tensor that is about to be written
MADE = "fxguard.made"  # key in the metadata of autograd nodes: the tape and what was made there

# A live tensor, its version, and what it holds up to that version. What is given holds the tensor,
# so it belongs to those who read it.
_Known = tuple[weakref.ref[Tensor], int | None, Made | weakref.ref[Given]]


class Tape:
    """The operations between some tensors and a loss.

    Args:
        names: id of a parameter or buffer to its role and qualified name.
    """

    def __init__(self, names: Mapping[int, tuple[Role, str]]) -> None:
        self.names = names
        self.has_noted = False  # whether any operation was noted
        self._restore_settings: Callable[[], None] | None = None
        self._leaves: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._by_functions: weakref.WeakSet[Given] = weakref.WeakSet()
        self._known: dict[int, _Known] = {}  # by id of the tensor
        self._without_gradient: list[int] = []  # ids of tensors noted since the last turn
        self._count = 0
        self._me = weakref.ref(self)

    def turn(self) -> None:
        """Called when a model has returned.

        Torch's settings may be others from now on. No gradient comes to a tensor that requires
        none, so its past is forgotten: a running total would hold all that it was computed from.
        """
        self._restore_settings = None
        for identity in self._without_gradient:
            known = self._known.get(identity)
            tensor = None if known is None else known[0]()
            if tensor is not None and not tensor.requires_grad:
                del self._known[identity]
        self._without_gradient.clear()

    def before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], module: str = ""
    ) -> Noted:
        """Called when an operation is about to run in a module."""
        call = Noted(func, args, kwargs, self.settings(), module, torch.is_grad_enabled())
        if name_of(func) in RANDOM:
            call.random_state = RandomState.now((args, kwargs))
        call.versions = {id(x): version_of(x) for x in _tensors((args, kwargs))}
        if args and has_effects(func) and self._is_lost_by(call, args[0]):
            call.overwrites = args[0], args[0].detach().clone()
        return call

    def settings(self) -> Callable[[], None]:
        """A function that restores torch's settings of now."""
        if self._restore_settings is None:
            self._restore_settings = settings_now()
        return self._restore_settings

    def _is_lost_by(self, call: Noted, target: Any) -> bool:
        """Whether numbers that nothing on the tape has made give way to some with a gradient."""
        if not isinstance(target, Tensor) or target.requires_grad or not has_memory(target):
            return False
        if target.numel() > MOST_COPIED or type(target) is not Tensor:
            return False
        brings = any(x.requires_grad for x in _tensors((call.args[1:], call.kwargs)))
        return brings and not isinstance(self._held(target, call.versions[id(target)]), Made)

    def after(self, call: Noted, result: Any, place: Place | None) -> None:
        """Called when the operation has returned this result; the user's line called it."""
        read = list(_tensors((call.args, call.kwargs)))
        if are_levels_open() or any(id(x) not in call.versions for x in read):
            return  # under torch.func, or the call changed its arguments, as a deep copy does
        written = [x for x in read if version_of(x) != call.versions[id(x)]]
        exchange = exchange_of(call.func, call.args, call.kwargs)
        if exchange is not None:  # it counts no version
            self._forget_given(exchange.writes)
            held = [(x, self._held(x, call.versions[id(x)])) for x in exchange.writes]
            written = [x for x, value in held if isinstance(value, Made)]
        made = list(elements_of(result))
        if not (made or written) or not any(map(self._belongs_to(call), read)):
            return
        before = self._as_before(call) if written else None
        if not all(self._is_known(x, call, before) for x in written):
            # It has written what was given. What that holds now is given anew.
            for tensor in read:
                self._note_leaf(tensor, call.func, (call.args, call.kwargs))
            return
        values, given = list[Given | Made](), (call.args, call.kwargs)

        def value_in(tensor: Tensor) -> Given | Made:
            values.append(self._value_in(call.func, given, tensor, call.versions[id(tensor)]))
            return values[-1]

        call.args, call.kwargs = replaced(given, value_in)
        call.read = tuple(values)
        call.order = self._next()
        for tensor in written:
            self._rewrite(tensor, call)
        for path, tensor in made:
            self._has_made(call, path, tensor)
        self._has_run(call, place)

    def _as_before(self, call: Noted) -> Given | None:
        """What a call has written, as it was, if nothing on the tape had made that."""
        if call.overwrites is None:
            return None
        (target, copy), call.overwrites = call.overwrites, None
        value = Given(self._next(), copy, version_of(copy))
        self._remember(target, value, call.versions[id(target)])
        return value

    def _is_known(self, written: Tensor, call: Noted, before: Given | None) -> bool:
        value = self._held(written, call.versions[id(written)])
        return isinstance(value, Made) or (value is not None and value is before)

    def ran(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        versions: dict[int, int | None],
        read: Mapping[int, Tensor],
        result: Tensor,
        place: Place | None,
        module: str = "",
    ) -> None:
        """Called when an operation has run that has written nothing, in place of both above.

        Args:
            func: what ran.
            args: its arguments.
            kwargs: likewise.
            versions: those of the tensors that it has read, by identity.
            read: these tensors.
            result: the tensor that it has made.
            place: the user's line that called it.
            module: the module in which it ran.
        """
        held, belongs = dict[int, Given | Made | None](), False
        for key, tensor in read.items():
            held[key] = value = self._held(tensor, versions[key])
            belongs = belongs or type(value) is Made or tensor.requires_grad
        if not belongs:
            return
        for key, tensor in read.items():
            if held[key] is None or function_of(tensor.grad_fn) is not None:
                held[key] = self.given_to(func, args, kwargs, tensor, versions[key])
        values = {key: value for key, value in held.items() if value is not None}
        given = filled(args, values), filled(kwargs, values) if kwargs else {}
        call = Noted(func, *given, self.settings(), module, torch.is_grad_enabled())
        call.read = tuple(values.values())
        call.order = self._next()
        self._has_made(call, (), result)
        self._has_run(call, place)

    def _has_made(self, call: Noted, path: tuple[int, ...], tensor: Tensor) -> None:
        node = tensor.grad_fn
        value = Made(self._next(), call)
        call.made += ((path, value.number),)
        self._remember(tensor, value)
        if node is not None:
            # An operation may hand on what it has read, such as `float`.
            metadata_of(node).setdefault((MADE, tensor.output_nr), (self._me, value))

    def _has_run(self, call: Noted, place: Place | None) -> None:
        call.place = place
        call.versions = {}
        self.has_noted = True

    def _forget_given(self, tensors: Iterable[Tensor]) -> None:
        """What these tensors held is gone: other ranks have written them."""
        memories = {memory_of(x) for x in tensors} - {None}
        for identity, (reference, _, value) in list(self._known.items() if memories else ()):
            holder, given = reference(), _in_place(value)
            if isinstance(given, Given) and memory_of(holder) in memories:
                given.version = EXCHANGED
                del self._known[identity]

    def _belongs_to(self, call: Noted) -> Callable[[Tensor], bool]:
        def belongs(tensor: Tensor) -> bool:
            if tensor.requires_grad:
                return True
            return isinstance(self._held(tensor, call.versions[id(tensor)]), Made)

        return belongs

    def given_to(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor: Tensor,
        before: int | None,
    ) -> Given | Made:
        """What a tensor holds that an operation has read, at that version."""
        return self._value_in(func, (args, kwargs), tensor, before)

    def _value_in(
        self, func: Any, given: tuple[Any, Any], tensor: Tensor, before: int | None
    ) -> Given | Made:
        value = self._held(tensor, before)
        by_function = function_of(tensor.grad_fn) is not None
        if isinstance(value, Made) and by_function:
            value = None  # operations of its forward have another backward
        if value is None:
            value = Given(self._next(), tensor, before)
            self._remember(tensor, value)
            if by_function:
                self._by_functions.add(value)
            self._note_leaf(tensor, func, given)
        return value

    def _note_leaf(self, tensor: Tensor, func: Any, given: tuple[Any, Any]) -> None:
        """Note that an operation has read a leaf of autograd, if it has."""
        if tensor.requires_grad and tensor.is_leaf:
            self._leaves[id(tensor)] = weakref.ref(tensor), self._name_of(tensor, func, given)

    def _rewrite(self, tensor: Tensor, call: Noted) -> None:
        """Note that a call wrote a tensor, and with it all that share its memory."""
        before, memory, now = call.versions[id(tensor)], memory_of(tensor), version_of(tensor)
        for reference, version, value in list(self._known.values()):
            holder, old = reference(), _in_place(value)
            if holder is None or old is None or version != before or version_of(holder) != now:
                continue
            if holder is tensor or (memory is not None and memory_of(holder) == memory):
                value_now = Made(self._next(), call, old)
                call.written += ((old.number, value_now.number),)
                self._remember(holder, value_now)

    def _held(self, tensor: Tensor, version: int | None) -> Given | Made | None:
        """What a tensor held at a given version."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != version:
            return None
        return _in_place(known[2])

    def _remember(self, tensor: Tensor, value: Given | Made, version: int | None = None) -> None:
        """Note what a tensor holds from now on, or held at a version, as long as it is alive."""
        identity, me = id(tensor), self._me
        version = version_of(tensor) if version is None else version

        def gone(_: weakref.ref[Tensor]) -> None:
            if (tape := me()) is not None:
                tape._known.pop(identity, None)

        held = weakref.ref(value) if isinstance(value, Given) else value
        self._known[identity] = weakref.ref(tensor, gone), version, held
        if not tensor.requires_grad:
            self._without_gradient.append(identity)

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _name_of(self, tensor: Tensor, func: Any, given: tuple[Any, Any]) -> str:
        """``weight fc.weight``, ``input[1] of mul``."""
        if id(tensor) in self.names:
            role, name = self.names[id(tensor)]
            return f"{role.value} {name}"
        position = next(i for i, each in enumerate(_tensors(given)) if each is tensor)
        return f"input[{position}] of {name_of(func)}"

    def new_leaves(self) -> list[tuple[Tensor, str]]:
        """The autograd leaves that operations have read since the last call, with names."""
        found, self._leaves = self._leaves, {}
        return [(leaf, name) for each, name in found.values() if (leaf := each()) is not None]

    def made_by_functions(self) -> list[Tensor]:
        """The tensors that operations read and that autograd functions made."""
        return [given.tensor for given in self._by_functions]

    def value_of(self, root: Tensor) -> Made | None:
        """What an operation on the tape made, if a tensor holds that."""
        value = self._held(root, version_of(root))
        return value if isinstance(value, Made) else None

    def value_at(self, node: Any, output: int) -> Made | None:
        """The same for an autograd node and one of its outputs."""
        tape, value = metadata_of(node).get((MADE, output), (None, None))
        return value if tape is not None and tape() is self else None

    def may_run_to(self, root: Tensor) -> bool:
        """Whether a noted operation made a tensor, and no backward has freed what that had read."""
        value = self.value_of(root)
        return value is not None and not value.call.is_gone

    def let_go(self, roots: Iterable[Tensor]) -> None:
        """Called when a backward has freed the graph of some tensors: nobody needs their inputs."""
        todo = [value for root in roots if (value := self.value_of(root)) is not None]
        seen = set[int]()  # numbers of values that a call has written
        while todo:
            value = todo.pop()
            if isinstance(value.before, Made) and value.number not in seen:
                seen.add(value.number)
                todo.append(value.before)
            call = value.call
            if not call.is_gone:
                todo += [each for each in call.read if isinstance(each, Made)]
                call.let_go()

    @staticmethod
    def read_by(roots: Iterable[Made]) -> list[Given]:
        """What the operations that lead to some values read: the arguments of :meth:`run`.

        Raises:
            FxguardError: when it was let go.
        """
        return list(_given_to(_leading_to(roots)).values())

    def run(
        self, roots: Sequence[Made], ended: Collection[int] = ()
    ) -> tuple[GraphRun, Callable[[], None]]:
        """The operations that lead to some tensors, as a graph run.

        Args:
            roots: what these tensors hold.
            ended: numbers of what gets no gradient.

        Returns:
            The run, and a function that restores torch's settings of that time.

        Raises:
            FxguardError: when they cannot run again: an input was written or freed since, or a
                collective would be issued.
        """
        calls = _leading_to(roots)
        if any(waits(call.func, ()) for call in calls):
            raise FxguardError(GONE)
        given = _given_to(calls)
        if not all(_is_as_it_was(each.tensor, each.version) for each in given.values()):
            raise FxguardError("an input of operations between graphs was changed or freed")
        numbers = [root.number for root in roots]
        written = {before for call in calls for before, _ in call.written}
        graph = graph_of(calls, given, numbers, set(ended) - written - set(numbers))
        graph_module = GraphModule(torch.nn.Module(), graph)
        inputs = [each.tensor for each in given.values()]
        drawn = (call.random_state for call in calls)
        random_state = next((state for state in drawn if state is not None), None)
        restore_settings = calls[0].restore_settings
        _find_examples(graph_module, inputs, random_state, restore_settings)
        arguments = {
            position: self.names[id(tensor)]
            for position, tensor in enumerate(inputs)
            if id(tensor) in self.names
        }
        plan = make_plan(graph_module, {}, arguments, has_marks=False)
        for node in graph.nodes:
            node.meta.pop("example_value", None)
        statistics = torch.empty((0, 2))
        event = GraphRun(plan, graph_module, statistics, tuple(inputs), random_state, ("", ""), ())
        return event, restore_settings


def _in_place(held: Made | weakref.ref[Given]) -> Given | Made | None:
    """What is known of a tensor."""
    return held if isinstance(held, Made) else held()


def _leading_to(values: Iterable[Made]) -> list[Noted]:
    """The calls that made or wrote some values, in order."""
    todo, found = list(values), dict[int, Noted]()
    while todo:
        value = todo.pop()
        if isinstance(value.before, Made):
            todo.append(value.before)
        if value.call.order not in found:
            found[value.call.order] = value.call
            todo += [each for each in value.call.read if isinstance(each, Made)]
    return [found[order] for order in sorted(found)]


def _given_to(calls: Iterable[Noted]) -> dict[int, Given]:
    """What some calls read that none of them made, by its number."""
    given = dict[int, Given]()
    for call in calls:
        if call.is_gone:
            raise FxguardError(GONE)
        given.update((x.number, x) for x in call.read if isinstance(x, Given))
    return given


def _find_examples(
    graph_module: GraphModule,
    inputs: Sequence[Tensor],
    random_state: RandomState | None,
    restore_settings: Callable[[], None],
) -> None:
    """Run a graph once, with the settings of the first run, for an example of each value."""
    restore = settings_now()
    try:
        with random_state_kept(inputs), none_issued(graph_module, inputs):
            if random_state is not None:
                random_state.restore()
            restore_settings()
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
