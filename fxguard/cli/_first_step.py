"""The first step of a script, or some: its models as they were, what they got, and their loss."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.api.outermost import is_traced, pays_to_capture
from fxguard.capture.dynamo import leave_to_python
from fxguard.cli._loss_of_step import LossOfStep
from fxguard.cli._session import write
from fxguard.errors import FxguardError
from fxguard.graph.random_state import RandomState, random_state_kept
from fxguard.graph.wide_form import is_float
from fxguard.install.instrumented import unwrapped
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.forecast import Forecast
from fxguard.report.recorded_step import RecordedStep

__all__ = ["Call", "FirstStep"]

Found = Forecast | ErrorBudget | RecordedStep


@dataclass(eq=False)
class Call:
    """The first call of a model in a step, as it was before it ran."""

    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: dict[str, bool]  # of each module
    buffers: dict[str, Tensor]
    random_state: RandomState
    step: int  # from 0
    output: Any = None  # what it returned
    outputs: int = 0  # floating-point tensors in it
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of these, by position
    # What the backward began with, as a function of what the model returns; None if not known.
    loss: Callable[[Any], Any] | None = None

    def model(self) -> Module:
        """A copy of the model as it was, with the random state of that time."""
        model = copy.deepcopy(self.module)
        for name, part in model.named_modules():
            part.training = self.training.get(name, part.training)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
        self.random_state.restore()
        return model


class FirstStep:
    """Runs a script up to the end of its first backward, looks at its models, and ends it.

    Each outermost module with weights or buffers is looked at, as it was at its first call. Without
    a backward, a step ends at the second call of a module, or at the script's end.

    Args:
        look: makes a record of a call.
        report: a file to write the record to: a page if its name ends in .html, JSON if it ends
            in .json, else text. The file of a second model has a number in its name.
        loss: notes how the script computes its loss; None if nobody asks for that.
        steps: the numbers of the steps to look at, from 0. The script ends with the last of them.

    Attributes:
        found: the records.
        ended: how many steps the script has made, none of which was the last one of these.
    """

    def __init__(
        self,
        look: Callable[[Call], Found],
        report: Path | None = None,
        loss: LossOfStep | None = None,
        steps: Collection[int] = (0,),
    ) -> None:
        self.look = look
        self.report = report
        self.found: list[Found] = []
        self.ended = 0
        self._loss = loss
        self._steps = frozenset(steps)
        self._calls: dict[int, Call | None] = {}  # None in a step that is not looked at
        self._local = threading.local()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while a script runs; SystemExit is raised when its first step has ended."""
        call, backward = Module.__call__, torch.autograd.backward
        Module.__call__ = self._make_call(call)  # type: ignore[method-assign]

        def backward_and_end(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._loss is not None and self.ended in self._steps:
                self._loss.ends_with(tensors)
            backward(tensors, *args, **kwargs)  # type: ignore[no-untyped-call]
            if self._calls:
                self._end()

        torch.autograd.backward = backward_and_end
        try:
            yield
            if self._calls:
                self._end()
        finally:
            Module.__call__ = call  # type: ignore[method-assign]
            torch.autograd.backward = backward

    def _make_call(self, original: Any) -> Any:
        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            inside = torch.compiler.is_dynamo_compiling() or getattr(self._local, "inside", False)
            target = unwrapped(module)
            if inside or is_traced() or not pays_to_capture(target):
                return original(module, *args, **kwargs)
            if id(target) in self._calls:
                self._end()
            self._local.inside = True
            try:
                if self.ended not in self._steps:
                    self._calls[id(target)] = None
                    return original(module, *args, **kwargs)
                entered = self._entered(target, args, kwargs)
                with contextlib.nullcontext() if self._loss is None else self._loss.paused():
                    output = original(module, *args, **kwargs)
                self._listen(entered, output)
                if self._loss is not None:
                    self._loss.returned((args, kwargs), output)
            finally:
                self._local.inside = False
            self._calls[id(target)] = entered
            return output

        leave_to_python(call)
        return call

    def _entered(self, target: Module, args: Any, kwargs: Any) -> Call:
        args, kwargs = trees.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        return Call(
            target,
            args,
            kwargs,
            {name: part.training for name, part in target.named_modules()},
            {name: x.detach().clone() for name, x in target.named_buffers()},
            RandomState.now((args, kwargs)),
            self.ended,
        )

    def _listen(self, entered: Call, output: Any) -> None:
        """Keep the gradient of each output as it arrives from outside the model."""
        leaves = [x for x in trees.tree_leaves(output) if is_float(x)]
        entered.output, entered.outputs = output, len(leaves)
        for position, leaf in enumerate(leaves):
            if leaf.requires_grad:

                def keep(gradient: Tensor | None, position: int = position) -> None:
                    if gradient is not None:
                        entered.gradients[position] = gradient.detach().clone()

                leaf.register_hook(keep)

    def _end(self) -> None:
        """Print what is found of each model, and end the script if this was the last step."""
        calls, self._calls = [x for x in self._calls.values() if x is not None], {}
        if calls:
            self._look_at_all(calls)
        if self.ended >= max(self._steps):
            sys.exit(0)
        self.ended += 1
        if self._loss is not None:
            self._loss.restart()

    def _look_at_all(self, calls: list[Call]) -> None:
        inside = getattr(self._local, "inside", False)
        self._local.inside = True  # what follows is not part of the script
        with contextlib.ExitStack() as outside:
            outside.callback(setattr, self._local, "inside", inside)
            outside.enter_context(random_state_kept([(x.args, x.kwargs) for x in calls]))
            if self._loss is not None:
                outside.enter_context(self._loss.paused())
            outside.enter_context(torch.inference_mode(False))
            for device in ("cpu", "cuda"):
                outside.enter_context(torch.autocast(device, enabled=False))
            for each in calls:
                self._look_at(each)

    def _look_at(self, call: Call) -> None:
        name = type(call.module).__name__
        if self._loss is not None:
            call.loss = self._loss.of(call.output)
        try:
            found = self.look(call)
        except FxguardError as error:
            print(f"{name}: {error}", flush=True)
            return
        print(f"{name}: {found}", flush=True)
        self.found.append(found)
        if self.report is not None:
            more = "" if len(self.found) == 1 else f"-{len(self.found)}"
            write(found, self.report.with_stem(self.report.stem + more))
