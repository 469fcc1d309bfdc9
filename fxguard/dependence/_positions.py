"""Whether the output at a position depends on later positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.dependence._asked import Asked
from fxguard.dependence._change import changed, size_of_change
from fxguard.dependence._contents import WAYS, drawn, spread
from fxguard.dependence._inputs import Inputs
from fxguard.dependence._places import OfLaterPositions
from fxguard.errors import UsageError
from fxguard.graph.wide_form import is_float
from fxguard.report.dependencies import Dependence
from fxguard.report.in_words import percent
from fxguard.report.late_progress import LateProgress

__all__ = ["positions"]

MOST = 128  # positions behind which the rest is replaced
CONVOLVES = (torch.nn.Conv1d, torch.nn.ConvTranspose1d)


@dataclass(frozen=True)
class _Positions:
    """The positions of an input, which outputs have as well."""

    dim: int  # of the input, and of outputs
    length: int
    of: int  # the input, by its index
    name: str  # " of tgt"; "" if there is no other one


def positions(model: Module, asked: Asked, dim: int | None, progress: LateProgress) -> Dependence:
    """Whether the output at a position depends on later positions.

    Args:
        model: the one that is asked.
        asked: its runs.
        dim: the dimension of positions; None if it is to be found.
        progress: shows how far the runs are.
    """
    found = _found(model, asked, dim)
    if isinstance(found, str):
        return Dependence("positions", None, f"not asked: {found}")
    # A decoder has its own tokens as its last input.
    answers = [
        _of(asked, each, partial(_advance, progress, at, len(found)))
        for at, each in enumerate(reversed(found))
    ]
    yes = [each for each in answers if each.depends]
    if not yes:
        return answers[0]
    more = [f"; {each.evidence.removeprefix('the output ')}" for each in yes[1:]]
    return replace(yes[0], evidence="".join([yes[0].evidence, *more]))


def _advance(progress: LateProgress, at: int, of: int, share: float) -> None:
    progress.advance((1 + (at + share) / of) / 3)


def _of(asked: Asked, where: _Positions, advance: Callable[[float], None]) -> Dependence:
    ends = spread(where.length - 1, MOST)
    leaking, first, ran = 0, None, False
    middle = where.length // 2  # where the layouts of values are told apart most clearly
    for at, end in enumerate(ends):
        advance(at / len(ends))
        leaks = False
        for way in range(WAYS):
            tensors = _with_others(asked.inputs, where, end + 1, where.length, way)
            output = asked.output_for(tensors)
            if output is None:
                continue
            ran = True
            if (change := _change_up_to(asked, where, output, end)) is not None:
                leaks = True
                if first is None or abs(end - middle) < abs(first[0] - middle):
                    first = end, tensors, change
        leaking += leaks
    if not ran:
        return Dependence("positions", None, f"not answered: {asked.why_not}")
    if first is None:
        count = f"{len(ends)} of {where.length - 1}"
        count = f"all {len(ends)}" if len(ends) == where.length - 1 else count
        what = f"no output depends on a later position{where.name}"
        evidence = f"{what} (what follows was replaced at {count} cuts)"
        return Dependence("positions", False, evidence)
    end, tensors, (position, size) = first
    what, they = f"positions{where.name} after {end}", "they are"
    nearest = _nearest(asked, where, position, end)
    if nearest is not None:
        what, they, size = f"position {nearest[0]}{where.name}", "that is", nearest[1]
    evidence = (
        f"the output at position {position} depends on {what}: it changes by {percent(size)} when "
        f"{they} replaced (at {leaking} of {len(ends)} cuts)"
    )
    return asked.found("positions", evidence, tensors, OfLaterPositions(where.length, end))


def _nearest(asked: Asked, where: _Positions, position: int, end: int) -> tuple[int, float] | None:
    """The first later position that alone changes the output at one, and by how much."""
    for later in range(end + 1, where.length):
        for way in range(WAYS):
            output = asked.output_for(_with_others(asked.inputs, where, later, later + 1, way))
            if output is None:
                continue
            found = _change_up_to(asked, where, output, position, first=position)
            if found is not None:
                return later, found[1]
    return None


def _with_others(inputs: Inputs, where: _Positions, start: int, end: int, way: int) -> list[Tensor]:
    """The inputs with other contents at some positions."""
    tensors = list(inputs.tensors)
    replaced = torch.zeros(tensors[where.of].shape, dtype=torch.bool)
    replaced.narrow(where.dim, start, end - start).fill_(True)
    tensors[where.of] = drawn(tensors[where.of], replaced, way)
    return tensors


def _change_up_to(
    asked: Asked, where: _Positions, output: Sequence[Tensor], last: int, first: int = 0
) -> tuple[int, float] | None:
    """The last position up to one at which an output changed, and by how much."""
    for one, two in zip(asked.output, output, strict=True):
        if not _has(one, where.dim, where.length) or one.shape != two.shape:
            continue
        a, b = (x.narrow(where.dim, first, last + 1 - first) for x in (one, two))
        found = changed(a, b)
        if found is not None and bool(found.any()):
            along = found.movedim(where.dim, 0).reshape(last + 1 - first, -1).any(1)
            at = int(along.nonzero().max())
            return first + at, size_of_change(*(x.select(where.dim, at) for x in (a, b)))
    return None


def _has(x: Tensor, dim: int, length: int) -> bool:
    return -x.dim() <= dim < x.dim() and x.shape[dim] == length


def _found(model: Module, asked: Asked, dim: int | None) -> list[_Positions] | str:
    """The inputs whose positions outputs have, or why there are none."""
    inputs = asked.inputs
    main = inputs.main
    if dim is not None and main is not None and not -main.dim() <= dim < main.dim():
        raise UsageError(f"positions={dim}: the first input has {main.dim()} dimensions")
    first = next((x for x in asked.output if is_float(x) and x.dim() > 1), None)
    if first is None:
        return "no output has a dimension of positions"
    found, why = list[_Positions](), "no input is of the form [batch, length, ...] (positions=)"
    for at, x in enumerate(inputs.tensors):
        if x.dim() < 2 or not inputs.is_data(at):
            continue
        for each in _candidates(model, inputs, x) if dim is None else [dim]:
            if not -x.dim() <= each < x.dim() or x.shape[each] < 2:
                continue
            if _has(first, each, x.shape[each]):
                found.append(_Positions(each, x.shape[each], at, f" of {inputs.names[at]}"))
                break
            why = f"no output has {x.shape[each]} positions in dimension {each}"
    if len(found) == 1:
        found = [_Positions(found[0].dim, found[0].length, found[0].of, "")]
    return found or why


def _candidates(model: Module, inputs: Inputs, x: Tensor) -> list[int]:
    """The dimensions of an input that may be that of positions, the likeliest first."""
    usual = 1 if inputs.samples == 0 else 0
    if x.dim() == 2:
        return [] if is_float(x) else [usual]
    if x.dim() != 3:
        return []
    return [-1, usual] if usual == 1 and _convolves(model, x) else [usual, -1]


def _convolves(model: Module, x: Tensor) -> bool:
    """Whether a convolution reads an input as ``[batch, channels, length]``."""
    read = {each.in_channels for each in model.modules() if isinstance(each, CONVOLVES)}
    return x.shape[1] in read and x.shape[2] not in read
