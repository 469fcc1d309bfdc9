"""``fxguard run --forecast``: what the first step of a script would do in another dtype."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.api.outermost import is_traced, pays_to_capture
from fxguard.capture.dynamo import leave_to_python
from fxguard.cli._session import write
from fxguard.errors import FxguardError
from fxguard.forecasting.forecast import forecast_of_step
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import is_float
from fxguard.install.instrumented import unwrapped
from fxguard.report.forecast import Forecast

__all__ = ["FirstStep"]


@dataclass(eq=False)
class Call:
    """The first call of a model, as it was before it ran."""

    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: dict[str, bool]  # of each module
    buffers: dict[str, Tensor]
    random_state: RandomState
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of its outputs, by position
    outputs: int = 0


class FirstStep:
    """Runs a script up to the end of its first backward, prints forecasts, and ends it.

    Each outermost module with weights or buffers gets a forecast, from its first call. Without a
    backward, the script stops at the second call of a module, or at its own end.

    Args:
        dtype: "float16", "float8_e4m3fn".
        report: a file to write the forecast to: a page if its name ends in .html, JSON if it ends
            in .json, else text. The file of a second model has a number in its name.
    """

    def __init__(self, dtype: str, report: Path | None = None) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.report = report
        self.found: list[Forecast] = []
        self._calls: dict[int, Call] = {}
        self._local = threading.local()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while a script runs; SystemExit is raised when its first step has ended."""
        call, backward = Module.__call__, torch.autograd.backward
        Module.__call__ = self._make_call(call)  # type: ignore[method-assign]

        def backward_and_end(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)  # type: ignore[no-untyped-call]
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
                entered = self._entered(target, args, kwargs)
                output = original(module, *args, **kwargs)
                self._listen(entered, output)
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
        )

    def _listen(self, entered: Call, output: Any) -> None:
        """Keep the gradient of each output as it arrives from outside the model."""
        leaves = [x for x in trees.tree_leaves(output) if is_float(x)]
        entered.outputs = len(leaves)
        for position, leaf in enumerate(leaves):
            if leaf.requires_grad:

                def keep(gradient: Tensor | None, position: int = position) -> None:
                    if gradient is not None:
                        entered.gradients[position] = gradient.detach().clone()

                leaf.register_hook(keep)

    def _end(self) -> NoReturn:
        """Print the forecasts, and end the script."""
        calls, self._calls = list(self._calls.values()), {}
        self._local.inside = True  # what follows is not part of the script
        for number, each in enumerate(calls, 1):
            model = copy.deepcopy(each.module)
            for name, part in model.named_modules():
                part.training = each.training.get(name, part.training)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in each.buffers:
                        buffer.copy_(each.buffers[name])
            each.random_state.restore()
            gradients = None
            if each.gradients:
                gradients = [each.gradients.get(position) for position in range(each.outputs)]
            try:
                with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    found = forecast_of_step(model, each.args, each.kwargs, self.dtype, gradients)
            except FxguardError as error:
                print(f"{type(each.module).__name__}: {error}", flush=True)
                continue
            print(f"{type(each.module).__name__}: {found}", flush=True)
            self.found.append(found)
            if self.report is not None:
                more = "" if number == 1 else f"-{number}"
                write(found, self.report.with_stem(self.report.stem + more))
        sys.exit(0)
