"""Runs the step of an optimizer that is not torch's own again, on copies, and looks inside.

Before such a step its weights, gradients and states are copied: before each step if they are at
most 4 MB, before the first steps if they are at most 64 MB. If the step makes a weight bad, its
code runs once more on the copies, and each operation is looked at: the first one that turned finite
numbers into a bad one, of which the weight became bad, is to blame.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.optimizer import Optimizer

from fxguard.forgiving import theirs, where_theirs_may_raise
from fxguard.graph import nodes
from fxguard.graph.random_state import random_state_kept
from fxguard.steps.first_bad import FirstBad, Looks
from fxguard.torch_names import DisableTorchFunction, copy_each

__all__ = ["OwnStep", "is_own"]

FEW_BYTES = 2**22  # copied before each step
MOST_BYTES = 2**26  # copied before a step
FIRST_STEPS = 8  # before which more than FEW_BYTES are copied

NOT_COPIED = "its weights, gradients and states could not be copied"
TOO_LARGE = "its weights, gradients and states are more than 64 MB"
TOO_LATE = (
    "its weights, gradients and states are more than 4 MB, of which only the first 8 steps are"
)


def is_own(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer is not one of torch's."""
    module = getattr(type(optimizer).step, "__module__", None) or ""
    return not module.startswith("torch.")


@dataclass(slots=True)
class OwnStep:
    """What the last step of one optimizer began with."""

    copies: dict[int, Tensor] = field(default_factory=dict)  # id of a tensor to its copy
    gradients: dict[int, Tensor] = field(default_factory=dict)  # id of a weight to a copy
    states: dict[Any, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)  # other attributes of the optimizer
    live: list[Tensor] = field(default_factory=list)  # the tensors that were copied
    why_not: str = ""  # why the step cannot run again
    count: int = 0  # of steps that have begun

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Copy what the step is about to read.

        Args:
            optimizer: the optimizer.
            args: arguments of its step.
            kwargs: likewise.
        """
        if self.why_not in (TOO_LARGE, TOO_LATE):  # it does not become smaller
            return
        self.why_not = _why_not(optimizer, args, kwargs)
        if not self.why_not:
            self.why_not = NOT_COPIED
            with where_theirs_may_raise():  # no memory, or a tensor that supports little
                self.why_not = self._begin(optimizer)
        if self.why_not:
            self.copies, self.live = {}, []

    def _begin(self, optimizer: Optimizer) -> str:
        """Copy everything; why not, if it was not copied."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        given = [weight.grad for weight in weights if weight.grad is not None]
        tensors = [*weights, *given, *_tensors_in(optimizer)]
        size = sum(x.numel() * x.element_size() for x in tensors)
        self.count += 1
        if size > MOST_BYTES:
            return TOO_LARGE
        if size > FEW_BYTES and self.count > FIRST_STEPS:
            return TOO_LATE
        if any(type(x) not in (Tensor, Parameter) for x in tensors):
            return "it holds tensors of a subclass"
        self._copy(tensors)
        self.gradients = {
            id(weight): self.copies[id(weight.grad)]
            for weight in weights
            if weight.grad is not None
        }
        self.states = {key: _shallow(state) for key, state in optimizer.state.items()}
        self.groups = [dict(group) for group in optimizer.param_groups]
        self.others = _shallow(dict(_own_attributes(optimizer)))
        return ""

    def end(self) -> None:
        """Let everything go but the memory of the copies."""
        self.live, self.gradients, self.states, self.groups, self.others = [], {}, {}, [], {}

    @torch.no_grad()
    def _copy(self, tensors: list[Tensor]) -> None:
        known = self.copies
        with DisableTorchFunction():
            if len(tensors) == len(known) and all(map(_fits, tensors, known.values())):
                copy_each(list(known.values()), tensors)
                self.copies = dict(zip(map(id, tensors), known.values(), strict=True))
            else:
                self.copies = {id(x): x.detach().clone() for x in tensors}
        self.live = tensors

    def gradient_of(self, weight: Tensor) -> Tensor | None:
        """The gradient of a weight when the step began; None if it was not copied."""
        return self.gradients.get(id(weight))

    def first_bad(self, optimizer: Optimizer, weight: Tensor) -> FirstBad | None:
        """The operation that made a weight bad; None if the step cannot run again or repeat it.

        Args:
            optimizer: the optimizer, after its step.
            weight: one of its weights.
        """
        if self.why_not or id(weight) not in self.copies:
            return None
        memo: dict[int, Any] = {}
        for tensor in self.live:
            memo[id(tensor)] = _again(tensor, self.copies[id(tensor)])
        for key, gradient in self.gradients.items():
            memo[key].grad = memo.get(id(gradient), gradient)
        twin: Any = object.__new__(type(optimizer))
        memo[id(optimizer)] = twin
        try:
            twin.__dict__.update(copy.deepcopy(self.others, memo))
            twin.state = type(optimizer.state)(dict)
            for key, state in self.states.items():
                twin.state[memo.get(id(key), key)] = copy.deepcopy(state, memo)
            twin.param_groups = copy.deepcopy(self.groups, memo)
        except theirs() as error:  # an object of the script's that refuses to be copied
            self.why_not = f"it cannot be copied ({type(error).__name__})"
            return None
        looks = Looks([memo[id(tensor)] for tensor in self.live], self.live)
        step = type(optimizer).step
        step = getattr(step, "__wrapped__", step)  # without hooks
        with _alone(self.live):
            try:
                with looks:
                    step(twin)
            except theirs() as error:  # of the script, or what was refused
                self.why_not = looks.refused or f"it raised {type(error).__name__} the second time"
        return looks.behind(memo[id(weight)])


def _why_not(optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> str:
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        return "it was given a closure"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "it may wait for other ranks"
    if any(isinstance(x, (Optimizer, Module)) for x in vars(optimizer).values()):
        return "it holds a model or another optimizer"
    return ""


def _own_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The attributes of an optimizer beside its states and groups; without its hooks."""
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups") and not inspect.ismethod(value):
            yield key, OrderedDict() if key.startswith("_optimizer_") else value


def _tensors_in(optimizer: Optimizer) -> list[Tensor]:
    """The tensors among an optimizer's states, settings and attributes, but for its weights."""
    states, own = list(optimizer.state.values()), dict(_own_attributes(optimizer))
    settings = [
        x for group in optimizer.param_groups for key, x in group.items() if key != "params"
    ]
    weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    found = {id(x): x for x in nodes.leaves((states, settings, own)) if isinstance(x, Tensor)}
    return [x for key, x in found.items() if key not in weights]


def _shallow(state: Any) -> Any:
    """The state of one weight, so that later changes of it do not show."""
    if not isinstance(state, dict):
        return state
    return {key: copy.copy(x) if type(x) in _CONTAINERS else x for key, x in state.items()}


_CONTAINERS = (list, dict)


def _fits(tensor: Tensor, known: Tensor) -> bool:
    return (
        tensor.shape == known.shape
        and tensor.dtype is known.dtype
        and tensor.device == known.device
        and tensor.layout is known.layout is torch.strided
    )


def _again(tensor: Tensor, known: Tensor) -> Tensor:
    """A tensor of the same kind that holds a copy."""
    values = known.clone()
    if isinstance(tensor, Parameter):
        return Parameter(values, tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad) if tensor.is_leaf else values


@contextlib.contextmanager
def _alone(given: list[Tensor]) -> Iterator[None]:
    """Run in silence, and restore the state of random generators."""
    nothing = io.StringIO()
    with (
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
        warnings.catch_warnings(),
        random_state_kept((tuple(given), {})),
    ):
        warnings.simplefilter("ignore")
        yield
