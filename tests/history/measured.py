"""Measures a plain training run, step by step, as `fxguard.history` is to do it, without fxguard.

One row ends with each step of an optimizer. A TorchFunctionMode sees each operation of a forward
that autograd follows, and of the loss.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, resolve_name

from fxguard.history._series import Kind, Row, Series

MOVES = {
    *("chunk", "clone", "contiguous", "detach", "expand", "flatten", "float", "gather", "permute"),
    *("reshape", "split", "squeeze", "stack", "to", "transpose", "unflatten", "unsqueeze", "view"),
    *("view_as", "where", "__getitem__", "backward", "item", "tolist", "requires_grad_", "cat"),
}


def magnitudes(tensor: Tensor) -> tuple[float, float]:
    if not tensor.numel():
        return math.nan, math.nan
    low, high = torch.aminmax(tensor.detach().abs().float())
    return float(low), float(high)


def norm(tensor: Tensor) -> float:
    return float(tensor.detach().float().norm())


def turn(first: Tensor, second: Tensor) -> float:
    """1 - cosine, or 0 where it is rounding; NaN for a gradient of zeros."""
    a, b = first.double().flatten(), second.double().flatten()
    found = 1 - float(a @ b) / (float(a.norm() * b.norm()) or math.nan)
    return 0.0 if found < 1e-4 else found


def _is_like(model: nn.Module, other: nn.Module) -> bool:
    return {name: x.shape for name, x in model.named_parameters()} == {
        name: x.shape for name, x in other.named_parameters()
    }


class Measured(TorchFunctionMode):
    """Hands each row to `seen`, and each series to `register`, which returns its position."""

    def __init__(self, register: Callable[[Series], int], seen: Callable[[Row], object]) -> None:
        super().__init__()
        self._register = register
        self._seen = seen
        self._places: dict[str, int] = {}
        self._numbers: dict[int, tuple[float, float]] = {}  # of the step that runs
        self._step = 0
        self._order = 0
        self._path: list[str] = []
        self._counts: dict[str, int] = {}
        self._after: dict[str, Tensor] = {}  # weights and buffers, when the last step had ended
        self._before: dict[str, Tensor] = {}
        self._models: list[tuple[str, nn.Module]] = []
        self._inside = False  # what this class computes is not measured
        self._weights: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}  # when the last backward had ended
        self._scaled: dict[int, Tensor] = {}
        self._backward = Tensor.backward
        self._scale = torch.amp.GradScaler.scale

    # Beginning and end

    def __enter__(self) -> Measured:
        measured = self

        def backward(loss: Tensor, *args: Any, **options: Any) -> None:
            if measured._inside:
                return measured._backward(loss, *args, **options)
            line = sys._getframe(1).f_lineno
            measured._inside, before = True, measured._inside
            root = measured._scaled.pop(id(loss), loss)
            measured._note("loss", f"loss of line {line}", float(root.detach()))
            try:
                measured._backward(loss, *args, **options)
            finally:
                for name, weight in measured._weights.items():
                    if weight.grad is not None:
                        measured._gradients[name] = weight.grad.detach().clone()
                measured._inside = before

        def scale(scaler: torch.amp.GradScaler, loss: Tensor) -> Tensor:
            measured._inside, before = True, measured._inside
            found = measured._scale(scaler, loss)
            measured._inside = before
            measured._scaled[id(found)] = loss
            return found

        Tensor.backward = backward  # type: ignore[assignment, method-assign]
        torch.amp.GradScaler.scale = scale  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        Tensor.backward = self._backward  # type: ignore[method-assign]
        torch.amp.GradScaler.scale = self._scale  # type: ignore[method-assign]

    def started(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Follow a model and its optimizer."""
        prefix = ""
        if self._models and not _is_like(self._models[-1][1], model):
            prefix = f"model{len(self._models)}."
        elif self._models:
            self._models, self._after = [], {}  # a run that is resumed
        self._models.append((prefix, model))
        for name, module in model.named_modules():
            module.register_forward_pre_hook(
                lambda _, args, path=prefix + name, root=not name: self._enters(path, args, root)
            )
            module.register_forward_hook(lambda *_: self._leaves(), always_call=True)
        self._weights |= {prefix + name: weight for name, weight in model.named_parameters()}
        names = {id(weight): prefix + name for name, weight in model.named_parameters()}
        optimizer.register_step_pre_hook(lambda used, *_: self._begins(used, names))
        optimizer.register_step_post_hook(lambda used, *_: self._ends(used, names))

    # What runs

    def _enters(self, path: str, args: tuple[Any, ...], root: bool) -> None:
        self._path.append(path)
        if root and torch.is_grad_enabled():
            self._counts = {}
            for place, value in enumerate(args):
                if isinstance(value, Tensor):
                    self._data("input", f"input {place}", value)

    def _leaves(self) -> None:
        self._path.pop()

    def _data(self, kind: Kind, name: str, value: Tensor) -> None:
        self._inside, before = True, self._inside
        value = value.detach()
        number = value.float()
        self._note(kind, name, *magnitudes(value))
        self._note(kind, name, float(number.mean()), detail="mean")
        self._note(kind, name, float((value == 0).float().mean()), detail="share of zeros")
        if value.is_floating_point():
            logarithms = number.abs()[number != 0].log2()
            self._note(kind, name, float(logarithms.mean().exp2()), detail="typical")
        else:
            self._note(kind, name, float(value.unique().numel()), detail="distinct")
        rows = len(value) if value.dim() else 1
        self._note(kind, name, float(rows), detail="number of rows")
        self._note(kind, name, value.numel() / rows, detail="size of a row")
        self._inside = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside or not torch.is_grad_enabled():
            return result
        name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        if name in MOVES or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if not (result.requires_grad or self._path):
            return result
        self._inside = True
        try:
            module = self._path[-1] if self._path else "loss"
            if not self._path:
                for value in args:
                    if isinstance(value, Tensor) and not value.requires_grad:
                        self._data("target", "targets", value)
            key = f"{module} {name.strip('_')}".strip()
            count = self._counts[key] = self._counts.get(key, 0) + 1
            self._note("operation", key if count == 1 else f"{key} #{count}", *magnitudes(result))
        finally:
            self._inside = False
        return result

    def _note(
        self, kind: Kind, what: str, low: float, high: float | None = None, *, detail: str = ""
    ) -> None:
        high = low if high is None else high
        name = f"{kind} {what} {detail}".strip()
        place = self._places.get(name)
        if place is None:
            self._order += 1
            series = Series(name, kind, what, order=self._order, detail=detail)
            place = self._places[name] = self._register(series)
        known = self._numbers.get(place)
        if known and kind in ("operation", "input", "target") and not detail:
            low, high = min(low, known[0]), max(high, known[1])
        elif known and kind == "loss":
            low = high = high + known[1]  # of parts of a batch
        self._numbers[place] = low, high

    # Around a step

    def _held(self, optimizer: Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
        stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
        weights = {names[id(weight)]: weight for weight in stepped}
        for prefix, model in self._models:
            if all(name.startswith(prefix) for name in weights):
                buffers = ((prefix + name, buffer) for name, buffer in model.named_buffers())
                weights |= {name: buffer for name, buffer in buffers if buffer.is_floating_point()}
        return weights

    def _begins(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        self._inside = True
        with torch.no_grad():
            for name, value in self._held(optimizer, names).items():
                size = norm(value)
                known = self._after.get(name)
                if known is not None:
                    self._note("drift", name, norm(value - known) / max(norm(known), 1e-12))
                if isinstance(value, nn.Parameter):
                    self._note("weight", name, size)
                    self._before[name] = value.clone()
                    if value.grad is not None:
                        self._note("gradient", name, norm(value.grad))
                        given = self._gradients.get(name)
                        if given is not None:
                            turned = turn(given, value.grad)
                            self._note("gradient", name, turned, detail="turned")
        self._inside = False

    def _ends(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        self._inside = True
        kind = type(optimizer).__name__
        largest: dict[str, float] = {}
        with torch.no_grad():
            for name, value in self._held(optimizer, names).items():
                self._after[name] = value.detach().clone()
                if isinstance(value, nn.Parameter) and name in self._before:
                    moved = norm(value - self._before[name])
                    self._note("step", name, moved / max(norm(self._before[name]), 1e-12))
                    for state, held in optimizer.state.get(value, {}).items():
                        if state != "step" and isinstance(held, Tensor):
                            largest[state] = max(largest.get(state, 0.0), magnitudes(held)[1])
            prefix = next(iter(names.values())).partition(".")[0] if len(self._models) > 1 else ""
            place = f"{kind}'s step {prefix}".strip()
            for option, value in optimizer.param_groups[0].items():
                spelled = "learning rate" if option == "lr" else option.replace("_", " ")
                parts = value if isinstance(value, tuple) else (value,)
                for number in parts:
                    if isinstance(number, float):
                        self._note("setting", f"{spelled} of {place}", number)
            for state, value in largest.items():
                self._note("state", f"{state} of {place}", value)
        self._note("time", "step", time.perf_counter())
        self._inside = False
        size = len(self._places)
        low, high = [math.nan] * size, [math.nan] * size
        for position, (smallest, most) in self._numbers.items():
            low[position], high[position] = smallest, most
        self._numbers = {}
        self._seen(Row(self._step, low, high))
        self._step += 1
