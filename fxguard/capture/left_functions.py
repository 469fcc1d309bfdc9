"""Functions that are left to Python, and not traced again on the way to what they call.

A capture begins with the outermost function. If it ends at an operation that cannot be captured, it
begins again with each function that leads there, which takes their number times as long. So all
of them are left at once, and what they call besides is captured.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``exc.SkipFrame``: leaves a function to Python.
- ``exc.TorchRuntimeError``: an operation failed on fake tensors.
- ``InstructionTranslator.run``: traces the function that is captured, ``step`` by ``step``.
- ``SubgraphTracer.create_proxy``: puts an operation into the graph.
- ``OutputGraph.current_tx``: the tracer of the innermost function; its ``parent`` is its caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NoReturn

from torch._dynamo.exc import SkipFrame, TorchRuntimeError
from torch._dynamo.output_graph import SubgraphTracer
from torch._dynamo.symbolic_convert import InstructionTranslator

from fxguard.capture.plain_python import backend_of

__all__ = ["calls_to", "calls_to_last", "failures", "skip_left_functions"]


@functools.cache
def skip_left_functions(look: Callable[[Any], object]) -> None:
    """Capture none of the functions that a backend has ``left``; done once.

    Args:
        look: called with the tracer of a function before it is traced; may add the function.
    """
    run, create_proxy = InstructionTranslator.run, SubgraphTracer.create_proxy

    @functools.wraps(run)
    def run_unless_left(self: Any) -> None:
        look(self)
        left: set[CodeType] = getattr(backend_of(self), "left", set())
        if self.f_code in left:
            self.step = _leave  # run cleans up after its steps
        try:
            run(self)
        except TorchRuntimeError:
            global _failures
            _failures += 1
            left.update(tx.f_code for tx in calls_to_last(self) if tx is not self)
            raise
        finally:
            self._fxguard_innermost = None  # it refers to this one

    @functools.wraps(create_proxy)
    def note_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.output_graph.root_tx._fxguard_innermost = self.output_graph.current_tx
        return create_proxy(self, *args, **kwargs)

    InstructionTranslator.run = run_unless_left  # type: ignore[method-assign]
    SubgraphTracer.create_proxy = note_function  # type: ignore[method-assign]


def failures() -> int:
    """How often an operation has failed in a capture of this process."""
    return _failures


_failures = 0


def calls_to_last(root: Any) -> Iterator[Any]:
    """The tracers of the functions that lead to the last operation, innermost first."""
    return calls_to(getattr(root, "_fxguard_innermost", None))


def calls_to(tx: Any) -> Iterator[Any]:
    """The tracers of a function and of those that lead to it, innermost first."""
    while tx is not None:
        yield tx
        tx = tx.parent


def _leave() -> NoReturn:
    raise SkipFrame("a function that leads to what cannot be captured")
