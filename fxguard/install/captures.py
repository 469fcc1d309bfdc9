"""The forms in which a model has been captured: by method, compiler and hooks."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn import Module

from fxguard.batch import observer
from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.capture import dynamo, let_go
from fxguard.capture.backend import CheckingBackend
from fxguard.capture.finalizers import when_gone
from fxguard.capture.full_batches import FullBatches
from fxguard.capture.keeping import Keeping
from fxguard.capture.keeping_backend import KeepingBackend
from fxguard.capture.layers import EqualLayers, by_layers, equal_layers, rows_of
from fxguard.capture.module_hooks import HOOK_ID
from fxguard.forgiving import theirs
from fxguard.install._hooks import HookState, hook_state
from fxguard.install.installation import Installation
from fxguard.install.names import Names
from fxguard.plan.plan import Plan

__all__ = ["Captures", "Form", "Hear"]

# Called with each run of a captured graph and what it returned, or None if it raised, before the
# run is added to the batch.
Hear = Callable[[GraphRun, Sequence[Any] | None], None]

# After so many calls that do little, a capture of the whole model pays. A call for the next token
# of a text counts as a part of one: most texts are short.
MOST_SMALL_CALLS = 20
MOST_TOKENS, TOKEN = 32, 0.02

# If hooks are new at each call, the model would be captured at each call. Beyond this number of
# captures it is left to Python and the observer.
MOST_CAPTURES = 32

MOST_ONCE = 3  # captures in a row for hooks that are others at the next call

MOST_ANEW = 8  # times that a model which raised is captured anew

NOT_SOUGHT = object()  # equal layers, since the model has changed


@dataclass(slots=True, eq=False)
class Form:
    """A method of a model as it is to be called.

    Attributes:
        function: calls it; what was not captured yet is captured.
        captured: calls what was captured, or raises
            :class:`~fxguard.capture.captured_only.NotCaptured`; None if this cannot be done.
        takes_model: whether both take the model as their first argument: they do not keep it.
        is_one_graph: whether a call of it is one run of a graph; None before the first. Once
            it was more, it stays False.
        known: what is known of such calls, by ``id`` of the graph's plan.
        code: of the method; None if it has none.
        codes: of the functions of which graphs were captured.
    """

    function: Callable[..., Any]
    captured: Callable[..., Any] | None = None
    takes_model: bool = False
    is_one_graph: bool | None = None
    known: dict[int, Any] = field(default_factory=dict)
    code: types.CodeType | None = None
    codes: Set[types.CodeType] = frozenset()

    def note(self, is_one_run: bool) -> None:
        """Note whether a call was one run of a graph that holds the method from its beginning.

        Behind a break of the graph there may be a function to capture where the method has code.
        """
        if self.is_one_graph is not False:
            is_whole = self.captured is not None and self.codes <= {self.code}
            self.is_one_graph = is_one_run and is_whole

    def bound(self, model: Module) -> Callable[..., Any]:
        """The function as a method of a model."""
        return types.MethodType(self.function, model) if self.takes_model else self.function


class Captures:
    """The captured forms of one model's methods.

    Threads share it, and add to it under a lock.

    Args:
        installation: gives the methods of the model without the guard.
        names: the names in the model.
        hear: called with each run of a graph.
        full_batches: in which batches every operation is measured; None for all of them.
        whole: whether the model is captured whole even where layers could share a capture.
        checks: whether anything is measured; if not, there has to be something to keep.

    Attributes:
        keeping: the operations that are kept in float32; None if nobody asked for it.
    """

    def __init__(
        self,
        installation: Installation,
        names: Names,
        hear: Hear,
        *,
        full_batches: FullBatches | None = None,
        whole: bool = False,
        checks: bool = True,
    ) -> None:
        self.keeping: Keeping | None = None
        self.checks = checks
        self.installation = installation
        self.names = names
        self.hear = hear
        self.full_batches = full_batches
        self.whole = whole
        # The compiler, which keeps its id; the compiled method.
        self._compiled: dict[Any, tuple[Any, Form]] = {}
        # How layers share captures, with gradients and without, since the last change of the model.
        self._equal: dict[bool, EqualLayers | None] = {}
        self._changes = 0
        self._anew = 0
        # The form that was last called, if nothing but these decides about it: the method, whether
        # there are gradients, and the changes of the model.
        self._whole: tuple[tuple[str, bool, int], Form] | None = None
        # The last hooks, how often they were met in a row, and how many before were met only once.
        self._hooks: HookState = ()
        self._same_hooks = self._once = 0
        self._small_calls = 0.0  # in which the graphs of layers, and what is between, are felt
        self._pieces: dict[bool, int] = {}  # in the first call by layers, as `_equal`
        self._backends: list[CheckingBackend] = []
        # Of graphs that may run. TorchDynamo's cache refers to them.
        self._in_use: list[dynamo.Backend] = []
        self._lock = threading.RLock()
        when_gone(self, _let_go, self._in_use).atexit = False

    def form_of(
        self,
        method: str,
        outer: dynamo.OuterCompiler | None,
        given: Callable[[], Iterable[Any]],
        *,
        fallback: bool,
    ) -> Form:
        """The form of a method that is to be called now.

        Args:
            method: its name.
            outer: who compiles the model, if anybody does.
            given: what it is called with.
            fallback: whether code that TorchDynamo fails to capture is left to Python.
        """
        if outer is None and observer.is_watched_by_others():
            return Form(self.installation.original(method))
        # If the user compiles the model, its hooks are read once, as torch.compile does.
        hooks = hook_state(self.names.hooked, HOOK_ID) if outer is None else ()
        last = (method, torch.is_grad_enabled(), self.names.changes)
        if not outer and not hooks and (known := self._whole) is not None and known[0] == last:
            return known[1]
        fullgraph = outer is not None and outer.fullgraph
        with self._lock:
            layers = frozenset() if outer or hooks or self.whole else self._layers(given)
            inner = None if outer is None else id(outer.backend)
            key = (method, inner, fullgraph, hooks, layers)
            come_and_go = bool(hooks) and self._come_and_go(hooks)
            if key not in self._compiled:
                if come_and_go or len(self._compiled) >= MOST_CAPTURES:
                    return Form(self.installation.original(method))
                self._compiled[key] = self._compile(method, outer, fallback, layers)
            form: Form = self._compiled[key][1]
            if not outer and not hooks and self._is_always_whole():
                self._whole = last, form
            return form

    def _come_and_go(self, hooks: HookState) -> bool:
        """Whether a script adds hooks at each call: then no capture is used twice."""
        if hooks == self._hooks:
            self._same_hooks += 1
            return False
        self._once = self._once + 1 if self._same_hooks == 1 else 0
        self._hooks, self._same_hooks = hooks, 1
        return self._once >= MOST_ONCE

    def _is_always_whole(self) -> bool:
        """Whether the model is captured whole whatever it is called with, until it changes."""
        return self.whole or self._equal.get(torch.is_grad_enabled(), NOT_SOUGHT) is None

    def _layers(self, given: Callable[[], Iterable[Any]]) -> frozenset[int]:
        """The layers of the model that are captured one by one; none if it is captured whole.

        They are looked for at the first call, with gradients and without, and when modules change.
        """
        try:
            return self._layers_now(given)
        except theirs():  # modules and tensors of classes that answer in a way of their own
            return frozenset()

    def _layers_now(self, given: Callable[[], Iterable[Any]]) -> frozenset[int]:
        if not self.checks or self.keeping is not None:
            return frozenset()
        if self._changes != self.names.changes:
            self._equal, self._pieces, self._changes = {}, {}, self.names.changes
        has_gradients = torch.is_grad_enabled()
        if has_gradients not in self._equal:
            self._equal[has_gradients] = equal_layers(self.names.model)
        found = self._equal[has_gradients]
        if found is None:
            return frozenset()
        rows = rows_of(given())
        if rows < found.least_rows(self._pieces.get(has_gradients, 0)):
            self._small_calls += TOKEN if rows <= MOST_TOKENS else 1
            if self._small_calls > MOST_SMALL_CALLS:
                return frozenset()
        return frozenset() if rows > found.most_rows else found.ids

    def note_pieces(self, batch: Batch) -> None:
        """Note how many graphs and operations between them the first call by layers has had."""
        has_gradients = torch.is_grad_enabled()
        if has_gradients in self._pieces or self._equal.get(has_gradients) is None:
            return
        if len(batch.runs) > 1:  # it was not captured whole
            self._pieces[has_gradients] = len(batch.runs) + batch.uncaptured()

    def _compile(
        self,
        method: str,
        outer: dynamo.OuterCompiler | None,
        fallback: bool,
        layers: frozenset[int],
    ) -> tuple[Any, Form]:
        inner = "eager" if outer is None else outer.backend
        backend = self._backend(inner, self.hear, self.keeping, follows_python=outer is None)
        entry = self.installation.entry(method)
        function = entry.function
        if layers:
            function = by_layers(function, layers)
            dynamo.leave_to_python(function)
        compiled = dynamo.compile_forward(
            function,
            backend,
            fullgraph=outer is not None and outer.fullgraph,
            leave_what_fails=outer is None and fallback,
            layers_in_turn=len(layers),
        )
        captured = None if outer or layers else compiled.captured
        codes: Set[types.CodeType] = getattr(backend, "captured", frozenset())
        takes_model, code = entry.takes_model, compiled.code
        return inner, Form(compiled.function, captured, takes_model, code=code, codes=codes)

    def around(self, inner: dynamo.Backend, hear: Hear) -> dynamo.Backend:
        """The backend for a graph that holds the model and the code compiled around it.

        Args:
            inner: the backend that the graph was meant for.
            hear: called with each run of the graph.
        """
        self.names.read()
        keeping = None if self.keeping is None else self.keeping.around(self.names.model)
        return self._backend(inner, hear, keeping, has_marks=False)

    def _backend(
        self,
        inner: str | dynamo.Backend,
        hear: Hear,
        keeping: Keeping | None,
        *,
        follows_python: bool = False,
        has_marks: bool = True,
    ) -> dynamo.Backend:
        names = self.names
        if not self.checks:
            assert keeping is not None
            keeper = KeepingBackend(
                inner,
                keeping,
                names.modules,
                names.tensors,
                names.read,
                weights_stay=names.weights_stay,
                follows_python=follows_python,
            )
            self._in_use.append(keeper)
            return keeper
        backend = CheckingBackend(
            inner,
            hear,
            names.modules,
            names.tensors,
            names.read,
            weights_stay=names.weights_stay,
            full_batches=self.full_batches,
            follows_python=follows_python,
            has_marks=has_marks,
            keeping=keeping,
        )
        self._backends.append(backend)
        self._in_use.append(backend)
        return backend

    def keep(self, keeping: Keeping | None) -> None:
        """Keep operations in float32 in everything that is captured from now on."""
        self.keeping = keeping
        self.clear()

    def expect_kept(self) -> None:
        """Check, after the model has run, that the operations to keep were found.

        Raises:
            FxguardError: when no glob named an operation of a graph.
        """
        if self.keeping is not None and self._compiled:
            self.keeping.expect_some()

    @property
    def plans(self) -> list[Plan]:
        """The plan of every graph that was captured."""
        return [plan for backend in self._backends for plan in backend.plans]

    def graphs(self) -> Iterator[tuple[GraphModule, Plan, dynamo.Backend]]:
        """Every graph that was captured, with its plan and the backend that it was meant for."""
        for backend in self._backends:
            for graph, plan in zip(backend.graphs, backend.plans, strict=True):
                yield graph, plan, backend.inner

    def forget_forms(self) -> None:
        """Forget the captured forms, because the methods have changed."""
        with self._lock:
            self._compiled.clear()
            self._whole = None
        _let_go(self._in_use)

    def capture_anew(self) -> None:
        """Forget the captured forms, because the model failed, and with it their capture.

        What TorchDynamo fails on is left to Python for good. But a model that raises was perhaps
        given a wrong argument, and is called with a right one next.
        """
        if self._anew < MOST_ANEW:
            self._anew += 1
            self.forget_forms()

    def clear(self) -> None:
        """Forget everything that was captured."""
        self.forget_forms()
        self._backends.clear()
        let_go.tidy()


def _let_go(backends: list[dynamo.Backend]) -> None:
    let_go.let_go(backends)
    backends.clear()
