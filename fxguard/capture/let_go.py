"""Lets go of what TorchDynamo keeps of a model's graphs, once nobody can run them any more.

TorchDynamo's cache hangs on code objects: that of a class's ``forward``, and those of functions
that it calls. An entry of the cache holds a backend, a compiled graph and its guards, and nothing
removes it before ``torch._dynamo.reset()``. Entries with a backend of fxguard serve one model only,
so they would outlive every model.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``eval_frame.cached_backends``: every backend that was ever given to ``torch.compile``, for
  ``torch._dynamo.reset()``. Ours have nothing to reset, and are taken out.
- ``convert_frame.input_codes.seen``: weak references to all code that it has looked at.
- ``_debug_get_cache_entry_list``: the entries of a code object. ``ExtraState.invalidate``: what it
  does itself to an entry when an object is gone that the entry depends on. Without them, the graphs
  of a model stay.
- ``CleanupManager.instance``: the global variables that a compiled code uses, by that code, which
  may never be freed: torch 2.13 loses count of its references where a graph breaks.
- Attributes of ``guard_manager``: finalizers of objects that live for ever refer to it.
- ``torch.fx.graph_module._loader.eval_cache``: the source text of every graph that was compiled.
  That of the captured graph itself stays, as it does without fxguard.
- ``reset_code``: removes all entries of a code object, with its count of compilations. Without it,
  invalidated entries stay, and TorchDynamo refuses to compile code that has 256 of them.
- ``convert_frame.compile_lock``: held while a thread compiles.
"""

from __future__ import annotations

import linecache
import types
import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as entries_of
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import CleanupManager
from torch.fx import GraphModule, graph_module

from fxguard.capture.finalizers import when_gone
from fxguard.graph.running_code import running_code
from fxguard.torch_names import CompileContext

__all__ = ["forget_backend", "let_go", "let_source_go", "tidy"]

Backend = Callable[..., Any]

GONE = "fxguard no longer guards the model of this graph"

_untidy: dict[int, weakref.ref[types.CodeType]] = {}  # by id: code with invalidated entries


def forget_backend(backend: Backend) -> None:
    """Take a backend out of the table of all backends, in which it is the latest."""
    kept: dict[int, Any] = eval_frame.cached_backends
    for key in reversed(kept):
        if _innermost(kept[key]) is backend:
            del kept[key]
            return


def let_go(backends: Collection[Backend]) -> None:
    """Free every graph that was compiled with some backends: nobody calls them any more.

    The garbage collector may call this at any time, as it calls TorchDynamo's own finalizers.
    """
    gone = {id(backend) for backend in backends}
    if not gone:
        return
    running = running_code()
    for code in _known_code():
        for entry in entries_of(code):
            if entry.code is not None and id(_innermost(entry.backend)) in gone:
                if id(entry.code) not in running:
                    _forget_globals_of(entry.code)
                _invalidate(entry)
                _untidy[id(code)] = weakref.ref(code)


def _forget_globals_of(compiled: types.CodeType) -> None:
    if compiled in CleanupManager.instance:
        CleanupManager.instance._remove_id(id(compiled))


def _invalidate(entry: Any) -> None:
    manager = entry.guard_manager
    manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper(GONE))
    vars(manager).clear()
    manager.cache_entry = None


def tidy() -> None:
    """Remove invalidated entries from code that has no others and that nobody runs or compiles."""
    if not _untidy or CompileContext.current_compile_id() is not None:
        return
    if not convert_frame.compile_lock.acquire(blocking=False):
        return  # another thread compiles
    try:
        running = running_code()
        while _untidy:
            code = _untidy.popitem()[1]()
            if code is None or id(code) in running:
                continue
            if all(entry.code is None for entry in entries_of(code)):
                reset_code(code)
    finally:
        convert_frame.compile_lock.release()


def let_source_go(*graphs: GraphModule) -> None:
    """Let the source text of graphs go when they do."""
    for graph in graphs:
        when_gone(graph, _forget_source, type(graph)).atexit = False


def _forget_source(kind: type[GraphModule]) -> None:
    code = getattr(vars(kind).get("forward"), "__code__", None)
    if code is not None:
        graph_module._loader.eval_cache.pop(code.co_filename, None)
        linecache.cache.pop(code.co_filename, None)


def _known_code() -> list[types.CodeType]:
    # Their references are not kept: each has a callback that is to die with the table.
    return [code for each in convert_frame.input_codes.seen if (code := each()) is not None]


def _innermost(backend: Any) -> Any:
    return getattr(backend, "compiler_fn", backend)  # torch.compile keeps it with its options
