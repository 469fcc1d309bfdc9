"""The loss of a script, as a function of what one of its models returned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxguard import trees
from fxguard.batch.observer import function_modes, set_function_modes
from fxguard.batch.tape_graph import replaced
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import has_effects, name_of, read_call
from fxguard.graph.tables import RANDOM
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure.at_hand import version_of

__all__ = ["LossOfStep"]

WIDE = torch.float64
NEAR = 0.02  # of the loss: how far off it may be when it is computed once more, in float64


@dataclass(slots=True, eq=False)
class _Noted:
    """An operation of the script that read what a model returned; or a model that did."""

    func: Any  # None for a model
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    written: tuple[Any, ...]  # of its arguments
    read: frozenset[int]  # tensors of the models among its arguments, and what was made of them
    versions: dict[int, int | None]  # of all others


class LossOfStep(TorchFunctionMode):
    """Notes the operations between the models of a step and its backward.

    While a model runs, nothing is noted: see :meth:`paused`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[_Noted] = []
        self._of_models: dict[int, Tensor] = {}  # what models returned, and what was made of it
        self._roots: list[Tensor] = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block of code that is not the script's."""
        modes = function_modes()
        others = [mode for mode in modes if mode is not self]
        if len(others) == len(modes):
            yield
            return
        set_function_modes(others)
        try:
            yield
        finally:
            set_function_modes([self, *function_modes()])

    def restart(self) -> None:
        """Forget a step, and note nothing until a model returns."""
        self._noted, self._of_models, self._roots = [], {}, []
        set_function_modes([mode for mode in function_modes() if mode is not self])

    def returned(self, given: Any, output: Any) -> None:
        """Called when a model has returned.

        Args:
            given: its arguments.
            output: what it returned.
        """
        made = [x for x in trees.tree_leaves(output) if is_float(x)]
        read = self._among(trees.tree_leaves(given))
        if read:
            self._noted.append(_Noted(None, (), {}, made, (), read, {}))
        self._of_models |= {id(x): x for x in made}
        if self not in function_modes() and any(x.requires_grad for x in made):
            set_function_modes([self, *function_modes()])

    def ends_with(self, roots: Any) -> None:
        """Called when a backward begins."""
        self._roots = [x for x in leaves(roots) if isinstance(x, Tensor)]

    def _among(self, values: Sequence[Any]) -> frozenset[int]:
        return frozenset(id(x) for x in values if id(x) in self._of_models)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        read = self._among(given)
        if not read or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        written = read_call(func, args, kwargs).written
        before_args, before_kwargs = args, kwargs
        if has_effects(func):  # what it may write is needed as it was
            before_args, before_kwargs = replaced(
                (args, kwargs), lambda x: x if id(x) in read else x.detach().clone()
            )
        before = [x for x in leaves((before_args, before_kwargs)) if isinstance(x, Tensor)]
        versions = {id(x): version_of(x) for x in before if id(x) not in read}
        result = func(*args, **kwargs)
        made = [x for x in (*leaves(result), *written) if isinstance(x, Tensor)]
        if made:
            self._of_models |= {id(x): x for x in made}
            self._noted.append(
                _Noted(func, before_args, before_kwargs, result, written, read, versions)
            )
        return result

    def of(self, output: Any) -> Callable[[Any], Any] | None:
        """What the backward began with, as a function of what a model returned.

        Args:
            output: what the model has returned.

        Returns:
            A function of what the model returns in float64. None if there was no backward, if it
            began with several numbers, if another model or a random number stands between, and if
            the function does not give the loss of the script.
        """
        if len(self._roots) != 1 or self._roots[0].numel() != 1:
            return None
        given = [x for x in trees.tree_leaves(output) if is_float(x)]

        def loss(returned: Any) -> Tensor:
            now = [x for x in trees.tree_leaves(returned) if is_float(x)]
            return self._again(dict(zip(map(id, given), now, strict=True)))

        try:
            with torch.no_grad():
                found, true = float(loss(output)), float(self._roots[0])
        except NotJudged:
            return None
        return loss if abs(found - true) <= NEAR * abs(true) else None

    def _again(self, given: dict[int, Tensor]) -> Tensor:
        """The loss of these numbers in place of those that a model has returned.

        Raises:
            NotJudged: when it cannot be computed.
        """
        values: dict[int, Tensor] = {
            key: widened(x, WIDE, differentiable=True).clone() for key, x in given.items()
        }
        lost = set[int]()
        for each in self._noted:
            if not (each.read & (values.keys() | lost)):
                continue
            made = [x for x in leaves((each.result, each.written)) if isinstance(x, Tensor)]
            try:
                if each.read & lost or each.func is None:
                    raise NotJudged("a model stands between")
                values |= self._run(each, values)
                lost -= set(map(id, made))
            except NotJudged:
                lost |= set(map(id, made))
        root = self._roots[0]
        if id(root) in lost or id(root) not in values:
            raise NotJudged("the loss is made of something else")
        return values[id(root)]

    def _run(self, each: _Noted, values: dict[int, Any]) -> dict[int, Any]:
        """What an operation makes of other numbers, by the tensors that it made in the script."""
        if name_of(each.func) in RANDOM:
            raise NotJudged("it draws random numbers")

        def other(x: Tensor) -> Any:
            if id(x) in values:
                return values[id(x)]
            if id(x) in each.versions and each.versions[id(x)] != version_of(x):
                raise NotJudged("it was written since")
            return widened(x, WIDE) if is_float(x) else x

        args, kwargs = replaced((each.args, each.kwargs), other)
        call = read_call(each.func, each.args, each.kwargs)
        ran = Ran(call, each.func, each.func, each.args, each.kwargs, each.result)
        made = wide_result(ran, args, kwargs, WIDE, differentiable=True)
        wide = zip(leaves(each.result), leaves(made), strict=True)
        found = {id(low): x for low, x in wide if is_float(low)}
        pairs = zip(leaves((each.args, each.kwargs)), leaves((args, kwargs)), strict=True)
        operands = {id(low): x for low, x in pairs if is_float(low)}
        for target, at in zip(each.written, call.written, strict=True):
            found[id(target)] = operands[id(at)]
        return found
