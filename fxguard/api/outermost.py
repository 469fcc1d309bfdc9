"""Guards the outermost modules that a script calls, from their first call on.

Nothing stays on a module between its calls: the guard is put in front of ``forward`` when a call
begins and is removed when the call ends. So a script always handles plain modules when it pickles,
copies or scripts its models.
"""

from __future__ import annotations

import contextlib
import os.path
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module

from fxguard.api.listening import guard_with_tools
from fxguard.api.whole_script import WholeScript
from fxguard.capture import backend, dynamo, traced_modules
from fxguard.capture.tracebacks import hide_frames
from fxguard.errors import FxguardError, UsageError
from fxguard.guard.guard import GuardedModel, in_backward
from fxguard.guard.last_frames import LastFrames
from fxguard.guard.withheld import Withheld
from fxguard.install.holders import name_by_holder
from fxguard.install.instrumented import check_kind, find_guard, unwrapped
from fxguard.install.own_calls import OwnCalls
from fxguard.options import Options
from fxguard.quiet.listener import QuietFaults
from fxguard.report.errors import NonFiniteError
from fxguard.report.report import Report
from fxguard.steps.losses import Losses
from fxguard.torch_names import CompileContext, is_fx_symbolic_tracing, tracing_state

__all__ = ["OutermostModules"]

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called

TORCH = os.path.dirname(torch.__file__) + os.sep
AOT_FILES = os.path.join(TORCH, "_functorch", "_aot_autograd") + os.sep

# How many guards are kept. A model whose guard was dropped is captured anew when called.
KEPT = 32


class Watched:
    """A module that was called outermost, and its guard."""

    def __init__(self, guard: GuardedModel) -> None:
        self.guard = guard
        self.calls = 0  # calls that are running now, in all threads
        self.stays = False  # something has wrapped the guard, which can no longer be removed


class OutermostModules:
    """While entered, guards every outermost module at its first call, before it runs.

    Args:
        options: those of :func:`fxguard.instrument`.
        on_report: called with each report after it was handed on.
        on_batch: called after the first call and after each later one.
        on_drop: called with a guard that is no longer kept.
        on_refusal: called with the class of a module that cannot be guarded, and the reason.
        capture_all: whether modules without parameters and buffers are captured as well. Losses and
            transforms are such modules. Otherwise they are checked operation by operation, as is
            everything in a worker of a DataLoader, where a capture would not pay.
        follow_losses: whether what the script computes from outputs is also checked, up to its
            backward. A module without parameters that reads outputs is then a part of the loss:
            what it returns counts where it gets to, and is no model's output. What any other module
            without parameters returns is withheld until something comes of it.
    """

    def __init__(
        self,
        options: Options,
        *,
        on_report: Callable[[Report], object] = lambda report: None,
        on_batch: Callable[[], object] = lambda: None,
        on_drop: Callable[[GuardedModel], object] = lambda guard: None,
        on_refusal: Callable[[str, str], object] = lambda name, reason: None,
        capture_all: bool = False,
        follow_losses: bool = False,
    ) -> None:
        self.options = options
        self.on_report = on_report
        self.on_batch = on_batch
        self.on_drop = on_drop
        self.on_refusal = on_refusal
        self.capture_all = capture_all
        self.follows_losses = follow_losses
        self.looks_beside = False  # whether a script is looked at, too, in the thread that enters
        self.losses: Losses | None = None  # set while entered
        self.script: WholeScript | None = None  # set when it is entered
        self._watched: OrderedDict[int, Watched] = OrderedDict()  # by id, least recent first
        self._earlier = LastFrames(options.max_frames_to_save)  # of all models, in order
        self._refused: weakref.WeakSet[Module] = weakref.WeakSet()
        # Their own __call__ runs no forward.
        self._left_to_parts: weakref.WeakSet[Module] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._original: Any = None
        self._own_calls = OwnCalls(self._make_own_call)
        self._withheld = Withheld()

    @property
    def guards(self) -> list[GuardedModel]:
        """The guards that are kept, least recently used first."""
        return [watched.guard for watched in list(self._watched.values())]

    def __enter__(self) -> OutermostModules:
        # Module hooks would run too late: by then, `_call_impl` has read `self.forward`.
        if self.follows_losses:
            self.losses = Losses(keeps_outputs=True)
            if self.looks_beside:
                self.script = WholeScript(
                    self.options, self.losses, self.on_report, self._of_no_model
                )
                self._withheld.made_beside = self.script.instead
                self._withheld.steps_made = self.script.steps_made
        self._original = Module.__call__
        Module.__call__ = self._make_call(self._original)  # type: ignore[method-assign]
        self._own_calls.begin()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._own_calls.end()
        Module.__call__ = self._original  # type: ignore[method-assign]
        for guard in self.guards:
            guard.stop_listening()
            guard.stop_watching_steps()
        losses, error = self.losses, exc_info[1]
        if losses is not None:
            script, self.losses = self.script, None
            tells = script is not None and not isinstance(error, FxguardError)
            if script is not None and tells and isinstance(error, BaseException):
                script.ends_with(error)
            losses.close()
            if script is not None:
                script.close()
                if tells:
                    # The script's own exception goes on, and the report stands in front of it.
                    with contextlib.suppress(*([NonFiniteError] if error else [])):
                        script.tell()

    @property
    def beside(self) -> int:
        """How many operations were looked at of a script that has called no model."""
        return 0 if self.script is None or self._withheld.has_model else self.script.count

    @property
    def unseen(self) -> int:
        """How many operations of the script, beside its models, could not be looked at."""
        return 0 if self.script is None else self.script.unseen

    def forget(self) -> None:
        """Start afresh in a forked process."""
        if self.script is not None:
            self.script.close()
        self._watched.clear()
        self._lock = threading.RLock()
        self._local = threading.local()

    def _make_call(self, original: Callable[..., Any]) -> Any:
        local, withheld = self._local, self._withheld
        apart, here = self._apart(), (self._enter, self._leave)

        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                # The user compiles a function around the module, or a guard compiles the module
                # itself.
                if backend.is_checked() or is_inlined(id(self), id(module)):
                    return original(module, *args, **kwargs)
                return call_apart(module, args, kwargs)
            # Modules that a compiler runs are not models; is_compiling() is true for all threads at
            # once.
            compiles = CompileContext.current_compile_id() is not None
            if compiles or getattr(local, "inside", False) or is_of_compiler(module):
                return original(module, *args, **kwargs)
            # TorchDynamo would compile these functions, too, where it is active.
            enter, leave = here if dynamo.eval_frame_callback() is None else apart
            watched = enter(module, args, kwargs)
            try:
                output = original(module, *args, **kwargs)
                if watched is not None and watched.guard.delivery.withholds:
                    withheld.returned(output)
                return output
            except BaseException as error:
                withheld.returned(None)
                hide_frames(error)
                raise  # this does not add the frame of this function again
            finally:
                leave(module, watched)

        dynamo.leave_to_python(call)
        traced_modules.pass_through(call, original)
        return call

    def _apart(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What is called before and after a module, as TorchDynamo does not look into it."""
        return torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)

    def _make_own_call(self, original: Callable[..., Any]) -> Any:
        """A function to replace the ``__call__`` of a class, which may call ``forward`` itself."""
        local = self._local
        enter, leave = self._apart()

        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(module, *args, **kwargs)
            compiles = CompileContext.current_compile_id() is not None
            inside = compiles or getattr(local, "inside", False)
            if inside or module in self._left_to_parts:
                return original(module, *args, **kwargs)
            watched = enter(module, args, kwargs)
            number = None if watched is None else watched.guard.recorder.next_number
            try:
                output = original(module, *args, **kwargs)
                if watched is not None and watched.guard.recorder.next_number == number == 0:
                    # From now on its parts are guarded where it calls them.
                    self._left_to_parts.add(module)
                    self.on_refusal(type(module).__name__, "its own __call__ ran no forward")
                return output
            finally:
                leave(module, watched)

        dynamo.leave_to_python(call)
        return call

    def stays_in_graph(self, module: Module) -> bool:
        """Whether a module that TorchDynamo traces inside another function stays in its graph.

        A graph break in front of a model lets its guard run it; if breaks are errors, the whole
        graph is checked. Modules that would not be captured stay in the graph and are not checked
        there.
        """
        target = unwrapped(module)
        if self._is_of_loss(target) or self._is_in_reader(target):
            return True
        watched = self._watched_of(target)
        if watched is None:
            return True
        if watched.guard.capture:
            return backend.is_inlined(id(watched.guard))
        self.on_refusal(type(target).__name__, "compiled around")
        return True

    def _enter(self, module: Module, args: Any, kwargs: Any) -> Watched | None:
        target = unwrapped(module)
        losses = self.losses
        if losses is not None and not has_parameters(target):
            if self._is_in_reader(target):
                return None
            reads = losses.is_read_in_loss if has_weights(target) else losses.is_read_by
            if reads(args, kwargs):
                self._local.reader = module
                return None
        if is_traced() or getattr(target, "_is_replica", False):
            return None
        watched = self._watched_of(target)
        if watched is not None:
            self._withheld.model_reads(args, kwargs)
            if self.script is not None:
                self.script.model_reads(target, args, kwargs)
            with self._lock:
                if watched.calls == 0 and not watched.stays:
                    watched.guard.install()
                watched.calls += 1
        # A module that cannot be guarded may call modules that can; a guarded one does not.
        self._local.inside = watched is not None or find_guard(target) is not None
        return watched

    def _leave(self, module: Module, watched: Watched | None) -> None:
        self._local.inside = False
        if getattr(self._local, "reader", None) is module:
            self._local.reader = None
        if watched is None:
            return
        guard = watched.guard
        with self._lock:
            watched.calls -= 1
            if watched.calls == 0 and not watched.stays:
                try:
                    guard.put_away()
                except UsageError:  # the model's forward was replaced during its call
                    watched.stays = True
        self.on_batch()

    def _is_of_loss(self, target: Module) -> bool:
        """Whether a module may be a part of the loss that this thread computes."""
        if self.losses is None or not self.losses.is_followed:
            return False
        return self._known(target) is None and not pays_to_capture(target)

    def _is_in_reader(self, target: Module) -> bool:
        """Whether a module without parameters is called by one that reads outputs: a criterion."""
        return getattr(self._local, "reader", None) is not None and not has_parameters(target)

    def _of_no_model(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those tensors that no guarded model has as a weight or buffer."""
        left = list(tensors)
        for guard in self.guards:
            names = guard.names.tensors
            left = [x for x in left if id(x) not in names]
        return left

    def _known(self, target: Module) -> Watched | None:
        """What is known of a module; nothing if it came in the place of one that is gone."""
        watched = self._watched.get(id(target))
        return None if watched is None or watched.guard.reference() is not target else watched

    def _watched_of(self, target: Module) -> Watched | None:
        watched, there = self._known(target), find_guard(target)
        if there is not None and (watched is None or there is not watched.guard):
            return None  # the script has instrumented it
        if watched is not None:
            with self._lock:
                self._watched.move_to_end(id(target))
            return watched
        if target in self._refused or in_backward():
            return None
        try:
            check_kind(target)
            self._check_parts(target)
            check_has_forward(target)
        except UsageError as error:
            self._refused.add(target)
            self.on_refusal(type(target).__name__, str(error))
            return None
        with self._lock:
            if (watched := self._known(target)) is not None:
                return watched
            self._drop_what_is_gone()
            captures = self.capture_all or pays_to_capture(target)
            held_as = name_by_holder(target) if captures else ""
            guard = guard_with_tools(target, self.options, held_as=held_as)
            # A glob for one of the models names nothing in the others, so no warning is due here.
            guard.delivery.warns_of_idle_globs = False
            guard.capture = captures
            if (quiet := guard.recorder.listener(QuietFaults)) is not None:
                quiet.tells = False  # who runs the script tells of them at its end
            if self.losses is not None:
                guard.watch_steps(self.losses)
            guard.delivery.heard = self.on_report
            guard.delivery.scale.may_be_own = self.looks_beside
            if self.losses is not None:
                is_model = has_parameters(target)
                self._withheld.has_model |= is_model
                if is_model and self.script is not None:
                    self.script.model_comes()
                guard.delivery.withheld, guard.delivery.withholds = self._withheld, not is_model
            guard.recorder.earlier = self._earlier
            self._watched[id(target)] = watched = Watched(guard)
            for key, old in list(self._watched.items())[:-KEPT]:
                if old.calls == 0 and not old.stays:
                    self._drop(key)
        return watched

    def _drop_what_is_gone(self) -> None:
        for key, watched in list(self._watched.items()):
            if watched.guard.reference() is None:
                self._drop(key)

    def _drop(self, key: int) -> None:
        guard = self._watched.pop(key).guard
        guard.stop_listening()
        guard.stop_watching_steps()
        self.on_drop(guard)

    def _check_parts(self, target: Module) -> None:
        # Guards of this table may be installed while another thread calls the part.
        own = self.guards
        for name, part in target.named_modules():
            guard = find_guard(part)
            if guard is not None and guard not in own:
                raise UsageError(f"its submodule {name!r} is instrumented by itself")


def is_inlined(outermost_id: int, module_id: int) -> bool:
    outermost: OutermostModules = dynamo.object_at(outermost_id)
    return outermost.stays_in_graph(dynamo.object_at(module_id))


dynamo.take_for_constant(is_inlined)


@torch.compiler.disable(recursive=False)
def call_apart(module: Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


def is_of_compiler(module: Module) -> bool:
    """Whether AOTAutograd calls a graph that it made from a compiled function."""
    frame: FrameType | None = sys._getframe() if isinstance(module, GraphModule) else None
    while frame is not None and (file := frame.f_code.co_filename).startswith((TORCH, __file__)):
        if file.startswith(AOT_FILES):
            return True
        frame = frame.f_back
    return False


def pays_to_capture(module: Module) -> bool:
    """Whether a module is a model: it has parameters or buffers, and does not run in a worker."""
    if torch.utils.data.get_worker_info() is not None:
        return False
    return has_weights(module)


def has_weights(module: Module) -> bool:
    """Whether a module, or a part of it, has parameters or buffers."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def has_parameters(module: Module) -> bool:
    """Whether a module, or a part of it, has parameters; a metric may have buffers alone."""
    return any(True for _ in module.parameters())


def check_has_forward(target: Module) -> None:
    """Raise an error if a module has no forward that a guard could stand in front of."""
    if getattr(type(target), "forward", None) is Module.forward and "forward" not in vars(target):
        raise UsageError("it has a __call__ and no forward")


def is_traced() -> bool:
    """Whether the code that runs now is being captured, without computing numbers."""
    if torch.compiler.is_exporting() or tracing_state() is not None:
        return True
    return bool(is_fx_symbolic_tracing())
