"""What the random operations of a compiled graph drew, for second runs in Python.

A compiler draws other random numbers than Python does, but the same ones in each run of a graph
that begins with the same state of the generators, also where the graph returns more. So the graph
runs once more as compiled, and returns what it drew; in all other second runs the random operations
give that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.draws import RANDOM, Draws, Found, Repeated, Result
from fxguard.batch.events import GraphRun, expect_rows
from fxguard.forgiving import theirs
from fxguard.graph import nodes, tables
from fxguard.graph.operations import Call
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged, is_float
from fxguard.plan.plan import Place
from fxguard.rerun.differences import TOLERANCE, comparable, same_magnitude

__all__ = ["UNLIKE", "Drawn", "drawn_in", "run_as_compiled"]

NOT_RUN = f"{RANDOM}, and a second compiled run failed"
UNLIKE = f"{RANDOM}, and a second compiled run did not repeat its numbers"

Begin = Callable[[], AbstractContextManager[list[Any]]]


def drawn_in(run: GraphRun, draws: Draws, begin: Begin) -> Found:
    """What a graph drew, or why that is unknown: from a second compiled run, made once.

    Args:
        run: the graph run, still open.
        draws: its draws.
        begin: begins a second run, and gives the arguments.
    """
    if draws.found is None:
        draws.found = _found_in(run, draws, begin)
    return draws.found


def _found_in(run: GraphRun, draws: Draws, begin: Begin) -> Found:
    try:
        repeated = run_as_compiled(run, draws, begin)
    except NotJudged as reason:
        return str(reason)
    except theirs():  # no memory for more outputs
        return NOT_RUN
    return repeated.drawn if _repeats(run, repeated.statistics) else UNLIKE


def run_as_compiled(run: GraphRun, draws: Draws, begin: Begin, *, needed: bool = False) -> Repeated:
    """Run a graph again as it was compiled.

    Args:
        run: the graph run, still open.
        draws: its draws.
        begin: begins a second run, and gives the arguments.
        needed: whether the numbers of its checks are needed too.

    Raises:
        NotJudged: when no second run may begin, or when it has returned something else.
        Exception: whatever the graph raises.
    """
    assert run.args is not None
    again = draws.compiled(run.args, needed)
    with begin() as given:
        repeated = again(given)
        for position, output in draws.returned():
            if not _is_same(output, repeated.outputs[position]):
                raise NotJudged(UNLIKE)
        numbers = repeated.statistics.cpu()
    expect_rows(numbers, len(run.plan.checks))
    return repeated._replace(statistics=numbers, outputs=())


def _repeats(run: GraphRun, statistics: Tensor) -> bool:
    """Whether everything that the graph made has the same range in both runs."""
    pairs = zip(run.statistics.tolist(), statistics.tolist(), strict=True)
    compared = comparable(run.plan)
    return all(
        same_magnitude(low, low_now) and same_magnitude(high, high_now)
        for slot, ((low, high), (low_now, high_now)) in enumerate(pairs)
        if slot in compared
    )


def _is_same(output: Tensor, again: Any) -> bool:
    """Whether an output of a graph has the same numbers in both runs, but for roundings."""
    if not isinstance(again, Tensor) or output.shape != again.shape:
        return False
    if type(output) is not Tensor or not is_float(output) or output.layout is not torch.strided:
        return True  # nothing is known
    bad, finite = ~output.isfinite(), output.isfinite()
    if not torch.equal(bad, ~again.isfinite()):
        return False
    size = output.abs().where(finite, 0).amax() if output.numel() else 0
    apart = (output - again).abs().where(finite, 0)
    return bool(torch.equal(output.isnan(), again.isnan()) and (apart <= TOLERANCE * size).all())


class Drawn:
    """The results of random operations in a second run: what the first run drew.

    Args:
        found: what is known.

    Attributes:
        anew: places of operations that have drawn other numbers for the gradient.
    """

    def __init__(self, found: Found) -> None:
        self.anew: set[Place] = set()
        self.reason = found if isinstance(found, str) else RANDOM
        self.results: Mapping[Place, Result] = {} if isinstance(found, str) else found

    def knows(self, place: Place) -> bool:
        """Whether it is known what was drawn at a place."""
        return place in self.results

    def again(
        self, place: Place, call: Call, args: Any, kwargs: Any, run: Callable[[], Any] | None
    ) -> Result:
        """The result of the operation at a place.

        If a gradient goes back through an operation that is no dropout, that gradient is of other
        random numbers, and :attr:`anew` has its place.

        Args:
            place: the place, which is known.
            call: the operation there.
            args: its arguments.
            kwargs: likewise.
            run: runs the operation itself; None if the arguments are not those of the first run.

        Raises:
            NotJudged: when what it draws depends on its arguments, and these are others.
        """
        found, operands = self.results[place], [*args, *kwargs.values()]
        first = next((x for x in operands if isinstance(x, Tensor)), None)
        if call.kind in tables.DROPOUTS:
            assert isinstance(found, Tensor)
            assert first is not None
            scale = _scale(float(args[1] if len(args) > 1 else kwargs.get("p", 0.5)))
            factor = found.to(first.dtype) * scale
            return first.mul_(factor) if call.in_place else first * factor
        if not (call.kind.endswith("_like") or not call.reads):  # these ask for sizes alone
            has_gradient = torch.is_grad_enabled() and any(map(_needs_gradient, operands))
            if run is None or (has_gradient and call.in_place):
                raise NotJudged(f"{call.kind} draws random numbers")
            if has_gradient:
                self.anew.add(place)
                return _with_values(run(), found)
        if not isinstance(found, Tensor):
            return tuple(None if x is None else x.clone() for x in found)
        if call.in_place:
            assert first is not None
            return first.copy_(found)
        return found.clone()

    def function(self, place: Place, call: Call) -> Callable[..., Result]:
        """The operation at a place as a function of other arguments."""

        def run(*args: Any, **kwargs: Any) -> Result:
            return self.again(place, call, args, kwargs, None)

        return run

    @contextlib.contextmanager
    def nothing_else(self, given: Any) -> Iterator[None]:
        """A block in which an operation runs that should draw nothing.

        Raises:
            NotJudged: at the end, if it has drawn something.
        """
        before = RandomState.now(given)
        yield
        if not before.is_same(RandomState.now(given)):
            raise NotJudged(self.reason)


class _Values(torch.autograd.Function):
    """The values of one tensor, whose gradient goes back to another one."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _with_values(made: Any, found: Result) -> Result:
    """What an operation has made in another run, with the values that are known."""
    if isinstance(found, Tensor):
        return _Values.apply(made, found)  # type: ignore[no-untyped-call,no-any-return]
    pairs = zip(made, found, strict=True)
    return tuple(
        None if values is None else _Values.apply(each, values)  # type: ignore[no-untyped-call]
        for each, values in pairs
    )


def _scale(p: float) -> float:
    """What a dropout multiplies the elements with that it keeps."""
    return 1 / (1 - p) if p < 1 else 0.0


def _needs_gradient(value: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in nodes.leaves(value))
