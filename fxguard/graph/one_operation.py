"""One operation with its operands, which can run again by itself, in full or on a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.graph import tables
from fxguard.graph.closer_look import evidence_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.operations import Call, read_call
from fxguard.graph.own_gradients import gradient_in_float64, gradient_of
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.torch_names import DisableTorchFunction

__all__ = ["OneOperation", "autocast_around"]

SEED = 0  # for operations that draw random numbers


@dataclass(frozen=True, slots=True)
class OneOperation:
    """One operation of a model, in a form that can run anywhere.

    Example:
        >>> x = torch.tensor([512.5], dtype=torch.float16)
        >>> OneOperation("mul", operator.mul, (x, x)).run()
        tensor([inf], dtype=torch.float16)
    """

    kind: str
    target: Any  # a function, an operator, or the name of a tensor's method
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[int, ...] = ()  # of the requested item of its result
    written: int | None = None  # the argument that holds its result, as in ``x[0] = y``
    autocast: torch.dtype | None = None  # the dtype of the autocast around it
    # If its backward is requested: the gradient of each tensor of the result, by position, and the
    # position, among the tensors of the arguments, of the one whose gradient is wanted.
    incoming: Mapping[int, Tensor] = field(default_factory=dict)
    operand: int | None = None
    is_compiled: bool = False  # whether it fails only when compiled, not in eager mode

    @classmethod
    def now(
        cls, call: Call, target: Any, path: tuple[int, ...] = (), written: int | None = None
    ) -> OneOperation:
        """An operation that runs now, or has just run, under the current autocast.

        Args:
            call: the call, with its tensors.
            target: the called function.
            path: see the attribute.
            written: likewise.
        """
        operation = cls(call.kind, target, call.args, call.kwargs, path, written)
        return replace(operation, autocast=autocast_around(operation.tensors))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments, then the incoming gradients."""
        given = trees.tree_leaves((self.args, dict(self.kwargs)))
        return [*(x for x in given if isinstance(x, Tensor)), *self.incoming.values()]

    @property
    def is_backward(self) -> bool:
        """Whether its backward is requested."""
        return self.operand is not None

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers, which it does with seed 0."""
        return self.kind in tables.RANDOM or self.call.random

    @property
    def call(self) -> Call:
        """What it reads, writes and draws."""
        return replace(read_call(self.target, self.args, self.kwargs), kind=self.kind)

    def with_tensors(self, tensors: Sequence[Tensor]) -> OneOperation:
        """The same operation with other tensors, in the order of :attr:`tensors`."""
        others = iter(tensors)
        args, kwargs = trees.tree_map_only(
            Tensor, lambda _: next(others), (self.args, dict(self.kwargs))
        )
        incoming = {position: next(others) for position in self.incoming}
        return replace(self, args=args, kwargs=kwargs, incoming=incoming)

    def with_numbers(self, change: Callable[[Any], Any]) -> OneOperation:
        """The same operation with other Python numbers among its arguments."""
        args, kwargs = trees.tree_map(
            lambda x: x if isinstance(x, Tensor) else change(x), (self.args, dict(self.kwargs))
        )
        return replace(self, args=args, kwargs=kwargs)

    def run(self) -> Tensor:
        """Run it: the result, or the gradient of an operand, with the operand's shape.

        Its operands and the state of random generators stay unchanged.

        Raises:
            Exception: what the operation raises.
        """
        with self._alone():
            if self.operand is not None:
                with self._autocast():
                    found = gradient_of(self._called, *self._given, self.operand, self.incoming)
                if found is None:
                    raise NotJudged(f"no gradient comes back from {self.kind}")
                return found
            args, result = self._computed()
            if self.written is not None:
                result = args[self.written]
        for index in self.path:
            result = result[index]
        if not is_float(result):
            raise NotJudged(f"{self.kind} makes no floating-point tensor")
        return result.detach()  # type: ignore[no-any-return]

    def result(self) -> Any:
        """Run it, and return all of its results.

        Raises:
            Exception: what the operation raises.
        """
        with self._alone():
            return self._computed()[1]

    def in_float64(self) -> Tensor | None:
        """The result in float64 on the same operands; None if that is impossible."""
        with self._alone():
            if self.operand is not None:
                return self._gradient_in_float64()
            result: Any
            try:
                args, kwargs = trees.tree_map_only(
                    Tensor, torch.clone, widened(self._given, torch.float64)
                )
                ran = Ran(self.call, self.target, self._called, *self._given, self._computed()[1])
                with torch.no_grad():
                    result = wide_result(ran, args, kwargs, torch.float64)
            except (NotJudged, ValueError):
                return None
            if self.written is not None:
                result = args[self.written]
        for index in self.path:
            result = result[index]
        return result if is_float(result) else None

    def evidence(self) -> Evidence | None:
        """The numbers at the first bad element of its result; None if no element is bad.

        Raises:
            Exception: what the operation raises.
        """
        made = self.run()
        if bool(torch.isfinite(made).all()):
            return None
        args, kwargs = trees.tree_map_only(Tensor, torch.Tensor.detach, self._given)
        return evidence_of(self.call, args, kwargs, made, same=self.in_float64())

    @property
    def _given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, dict(self.kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def _computed(self) -> tuple[Any, Any]:
        """Copies of its arguments after the run, and what it returned."""
        args, kwargs = trees.tree_map_only(Tensor, _copy, self._given)
        with torch.no_grad(), self._autocast():
            return args, self._called(*args, **kwargs)

    def _gradient_in_float64(self) -> Tensor | None:
        if self.call.casts:
            return next((x.to(torch.float64) for x in self.incoming.values()), None)
        assert self.operand is not None
        return gradient_in_float64(
            self.kind, self._called, self._given, self.operand, self.incoming
        )

    @property
    def device(self) -> str:
        """The type of its operands' device."""
        return _device_of(self.tensors)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        enabled = self.autocast is not None
        with torch.autocast(self.device, dtype=self.autocast, enabled=enabled):
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run unobserved, with the same random numbers each time, restoring the random state."""
        with DisableTorchFunction(), random_state_kept(self._given):
            if self.is_random:
                torch.default_generator.manual_seed(SEED)
                for device in {x.device for x in self.tensors if x.is_cuda}:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(SEED)
            yield


def autocast_around(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """The dtype of the current autocast for some tensors; None if it is off."""
    device = _device_of(tensors)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _device_of(tensors: Iterable[Tensor]) -> str:
    return next((x.device.type for x in tensors), "cpu")


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()
