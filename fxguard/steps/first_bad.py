"""Looks at every operation of some Python code, and finds the one that made a tensor bad.

The code runs on copies. An operation that would write anything else is refused, which ends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxguard import trees
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph import nodes
from fxguard.graph.evidence import Evidence
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.operations import Call, is_collective, is_custom, name_of, read_call
from fxguard.graph.tables import NOT_OPERATIONS
from fxguard.graph.wide_form import NotJudged, is_float
from fxguard.measure.at_hand import dtype_of
from fxguard.source.lines import Place, calling_line
from fxguard.steps._variances import Differences, is_rounded_away

__all__ = ["FirstBad", "Looks"]

MOST_LOOKS = 64  # at operations that made something bad out of good numbers
FOREACH = "_foreach_"
NORM = "norm"
NORMS = frozenset({NORM, "vector_norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm"})


BOUNDS = frozenset({"add", "clamp", "clamp_min"})  # they take a number that keeps a divisor from 0
KEEPS_NORMS = frozenset(["add", "maximum", "minimum"])  # of norms alone
KEEP_ZERO = frozenset({"sqrt", "mul", "div", "to", "type", "float", "half"})


@dataclass(frozen=True, slots=True)
class LostEps:
    """A number that was added to a tensor, or bounds it, and that is 0 in the tensor's dtype."""

    number: float
    dtype: str


@dataclass(frozen=True, slots=True)
class FirstBad:
    """An operation that turned finite numbers into a bad one; or a number that was bad."""

    kind: str  # "div"
    place: Place | None  # the user's line
    evidence: Evidence | None  # its numbers; None if it could not run alone
    made_by: tuple[str, ...] = ()  # the operations that made its operands; "norm" for any norm
    # Whether it takes the root of a difference that looks like a variance: `sq - mean ** 2`.
    is_of_variance: bool = False
    is_of_roundings: bool = False  # whether that is no more than what roundings leave
    number: float | None = None  # a Python number among its arguments that is not finite
    lost_eps: LostEps | None = None  # in its divisor


class Looks(TorchFunctionMode):
    """Looks at operations while it is on the stack.

    Args:
        copies: tensors that may be written.
        live: tensors of the training, which may not even be read.

    Attributes:
        refused: why an operation was not run; "" if none was refused.
    """

    def __init__(self, copies: Iterable[Tensor], live: Iterable[Tensor]) -> None:
        super().__init__()
        self.refused = ""
        self._kept: list[Any] = []  # so that no id and no memory is used twice
        self._ours: set[int] = set()  # memory that may be written
        self._live = {id(x) for x in live}
        self._bad: dict[int, FirstBad] = {}  # by memory
        self._number: FirstBad | None = None  # behind the last bad number that was read
        self._made_by: dict[int, str] = {}
        self._lost_eps: dict[int, LostEps] = {}  # by id of a tensor
        self._differences = Differences()
        self._looks = 0
        for each in copies:
            self._keep(each)
            self._keep(each.grad)

    def behind(self, tensor: Tensor) -> FirstBad | None:
        """The operation of which a tensor became bad; None if it did not."""
        return None if _is_finite(tensor) else self._bad.get(_memory(tensor))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in nodes.leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(id(x) in self._live for x in given):
            self._refuse("it reads a tensor of the training")
        kind = name_of(func)
        if kind in NOT_OPERATIONS and kind != "__set__":
            result = func(*args, **kwargs)
            self._keep(result)
            if isinstance(result, float) and not math.isfinite(result) and given:
                self._number = self._bad.get(_memory(given[0]))
            return result
        return self._run(func, kind, args, kwargs, given)

    def _run(
        self, func: Any, kind: str, args: Any, kwargs: Mapping[str, Any], given: list[Tensor]
    ) -> Any:
        if is_collective(func):
            self._refuse("it waits for other ranks")
        if kind == "__set__":
            result = func(*args, **kwargs)
            if isinstance(args[1], Tensor):
                self._keep(args[0])
            return result
        call = read_call(func, args, kwargs)
        if any(_memory(x) not in self._ours for x in _written(call, kind, args)):
            self._refuse("it writes a tensor that was not copied")
        sources = [found for x in given if (found := self._bad.get(_memory(x))) is not None]
        numbers = [x for x in nodes.leaves((args, kwargs)) if isinstance(x, float)]
        number = next((x for x in numbers if not math.isfinite(x)), None)
        before = trees.tree_map_only(Tensor, lambda x: x, (args, dict(kwargs)))
        written = {id(x) for x in _written(call, kind, args)}
        if written:
            before = trees.tree_map_only(
                Tensor, lambda x: x.detach().clone() if id(x) in written else x, before
            )
        result = func(*args, **kwargs)
        self._keep(result)
        made = [x for x in nodes.leaves(result) if isinstance(x, Tensor)]
        read = {_memory(x) for x in given} if not written else set()
        for index, tensor in enumerate(made or _written(call, kind, args)):
            self._made_by[id(tensor)] = self._maker(kind, given, tensor)
            own = _at(args, index) if kind.startswith(FOREACH) else args
            squares = [self._differences.square_in(x) for x in own if isinstance(x, Tensor)]
            self._note(kind, own, kwargs, tensor)
            if _memory(tensor) in read:
                continue  # a view
            if not is_float(tensor) or _is_finite(tensor):
                if _fills_memory(tensor):
                    self._bad.pop(_memory(tensor), None)
            elif sources:
                self._bad[_memory(tensor)] = sources[0]
            elif number is not None:
                bad = FirstBad(kind, calling_line(), None, number=number)
                self._bad[_memory(tensor)] = self._number or bad
            else:
                found = self._found(func, call, before, index)
                self._bad[_memory(tensor)] = _with_variance(found, squares)
        return result

    def _note(self, kind: str, args: Any, kwargs: Mapping[str, Any], made: Tensor) -> None:
        given = [x for x in nodes.leaves((args, kwargs)) if isinstance(x, Tensor)]
        numbers = [x for x in args if not isinstance(x, Tensor)]
        self._differences.note(kind.removeprefix(FOREACH), given, numbers, kwargs, made)
        name = kind.removeprefix(FOREACH).removesuffix("_")
        before = self._lost_eps.get(id(given[0])) if given else None
        lost = _lost_eps(name, args, kwargs, made) or (before if name in KEEP_ZERO else None)
        self._lost_eps.pop(id(made), None)
        if lost is not None:
            self._lost_eps[id(made)] = lost

    def _maker(self, kind: str, given: list[Tensor], made: Tensor) -> str:
        """The operation that made a tensor; norms that are bounded, scaled or added up stay one."""
        makers = {self._made_by.get(id(each), "") for each in given}
        is_one = len(given) == 1 or kind in KEEPS_NORMS
        before = makers.pop() if len(makers) == 1 and is_one else ""
        if kind in NORMS or (made.numel() == 1 and (before == NORM or kind == "sqrt")):
            return NORM
        return kind

    def _found(self, func: Any, call: Call, before: Any, index: int) -> FirstBad:
        found = FirstBad(call.kind, calling_line(), None)
        self._looks += 1
        if self._looks > MOST_LOOKS or is_custom(func):
            return found
        args, kwargs = before
        if call.kind.startswith(FOREACH):
            kind = call.kind.removeprefix(FOREACH)
            args = _at(args, index)
            operation = OneOperation(kind, kind, args, kwargs)
            found = replace(found, kind=kind)
        else:
            operation = OneOperation(call.kind, func, args, kwargs)
        made_by = tuple(self._made_by.get(id(x), "") for x in operation.tensors)
        lost = [self._lost_eps.get(id(x)) for x in operation.tensors[-1:]]  # the divisor
        found = replace(found, made_by=made_by, lost_eps=next(iter(lost), None))
        with where_theirs_may_raise():  # then only its name is known
            return replace(found, evidence=operation.evidence())
        return found

    def _keep(self, value: Any) -> None:
        for x in nodes.leaves(value):
            if isinstance(x, Tensor):
                self._kept.append(x)
                self._ours.add(_memory(x))

    def _refuse(self, why: str) -> None:
        self.refused = why
        raise NotJudged(why)


def _with_variance(found: FirstBad, squares: Sequence[Tensor | None]) -> FirstBad:
    """The same, with what is known of the difference that it read, by the square in that."""
    square = next((each for each in squares if each is not None), None)
    seen = found.evidence
    number = seen.operands[0].number if seen is not None and seen.operands else None
    if square is None or seen is None or number is None:
        return replace(found, is_of_variance=square is not None)
    is_rounded = is_rounded_away(square, seen.index, number)
    return replace(found, is_of_variance=True, is_of_roundings=is_rounded)


def _at(args: Any, index: int) -> tuple[Any, ...]:
    """The arguments of one of the operations that a ``_foreach`` function stands for."""
    return tuple(x[index] if isinstance(x, (list, tuple)) else x for x in args)


def _lost_eps(kind: str, args: Any, kwargs: Mapping[str, Any], made: Tensor) -> LostEps | None:
    """The number that an operation adds, or bounds by, if its dtype rounds it to 0."""
    if kind not in BOUNDS or not is_float(made):
        return None
    number = kwargs.get("min", kwargs.get("other", args[1] if len(args) > 1 else None))
    if not isinstance(number, float) or not math.isfinite(number) or number == 0:
        return None
    is_lost = float(torch.tensor(number, dtype=made.dtype)) == 0
    return LostEps(number, dtype_of(made)) if is_lost else None


def _written(call: Call, kind: str, args: Any) -> list[Tensor]:
    written = [x for x in call.written if isinstance(x, Tensor)]
    if kind.startswith(FOREACH) and kind.endswith("_") and args:
        written = [x for x in nodes.leaves(args[0]) if isinstance(x, Tensor)]
    return written


def _memory(tensor: Tensor) -> int:
    """What a tensor shares with its views; its id if it has no memory of its own."""
    memory = nodes.memory_of(tensor)
    return -id(tensor) if memory is None else memory


def _fills_memory(tensor: Tensor) -> bool:
    with where_theirs_may_raise():  # a tensor without memory of its own
        return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
    return True


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.is_sparse else values.values()
    return bool(torch.isfinite(values).all())
