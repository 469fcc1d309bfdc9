"""Whether an exception came of bad numbers: those that an operation read, or those in view."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import resolve_name

from fxguard.forgiving import theirs
from fxguard.graph.operations import name_of
from fxguard.graph.random_state import random_state_kept
from fxguard.measure.at_hand import own_arithmetic, range_of
from fxguard.records import Range
from fxguard.script.operations import pair_of
from fxguard.source.lines import Place, is_internal
from fxguard.trees import tree_map

__all__ = [
    "OF_NO_NUMBER",
    "Seen",
    "chain_of",
    "full_name",
    "in_view_of",
    "is_bad",
    "raised_because_of",
    "speaks_of_bad",
]

# What a conversion to integers makes of NaN on a CPU.
OF_NO_NUMBER = frozenset({-(2**63), -(2**31)})

WORDS = re.compile(r"\b(nans?|infs?|infinity|infinite|(non-?|not )?finite)\b", re.IGNORECASE)
VALIDATION = torch.distributions.distribution.__file__
MOST_LINKS = 16  # of exceptions that came of one another


def is_bad(tensor: Tensor) -> bool:
    """Whether a tensor holds inf or NaN."""
    pair = pair_of(tensor)
    if pair is not None:
        return not math.isfinite(pair[1])
    found = range_of(tensor)
    return isinstance(found, Range) and bool(found.severity)


def raised_because_of(
    bad: Collection[int], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether an operation that raised returns with healthy numbers in place of bad ones.

    A wrong shape, dtype or index raises with any numbers. The operation runs on copies.

    Args:
        bad: the ids of the arguments with bad numbers.
        func: what raised.
        args: its arguments.
        kwargs: likewise.
    """
    return any(
        _returns(_with(healthy, bad), func, args, kwargs)
        for healthy in (torch.ones_like, _identity)
    )


def _with(healthy: Callable[[Tensor], Tensor], bad: Collection[int]) -> Callable[[Any], Any]:
    def instead(value: Any) -> Any:
        if type(value) is int:
            return 0 if value in OF_NO_NUMBER else value
        if not isinstance(value, Tensor):
            return value
        if id(value) not in bad:
            return value.detach().clone()
        return healthy(value.detach()) if value.is_floating_point() else torch.zeros_like(value)

    return instead


def _identity(tensor: Tensor) -> Tensor:
    """Matrices with ones on their diagonals, which every decomposition and solver takes."""
    if tensor.ndim < 2:
        return torch.ones_like(tensor)
    return torch.eye(*tensor.shape[-2:], dtype=tensor.dtype, device=tensor.device).expand_as(tensor)


def _returns(
    instead: Callable[[Any], Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    with own_arithmetic(), random_state_kept((args, kwargs)):
        try:
            func(*tree_map(instead, args), **tree_map(instead, kwargs))
        except theirs():  # it raised before
            return False
    return True


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it came of."""
    for _ in range(MOST_LINKS):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def speaks_of_bad(error: BaseException) -> bool:
    """Whether the text of an exception says that something is not finite."""
    return WORDS.search(str(error)) is not None


class Seen(NamedTuple):
    """A bad tensor that code of a library held when it raised."""

    tensors: list[Tensor]
    place: Place  # the line of the script that called it


def in_view_of(error: BaseException) -> Seen | None:
    """What code of torch held when it raised, and said why; that of the innermost frame."""
    frames: list[FrameType] = []
    place, trace = ("", 0), error.__traceback__
    while trace is not None:
        frame, trace_line = trace.tb_frame, trace.tb_lineno
        if is_internal(frame.f_code.co_filename):
            frames.append(frame)
        else:
            frames, place = [], (frame.f_code.co_filename, trace_line)
        trace = trace.tb_next
    if not frames or not (speaks_of_bad(error) or frames[-1].f_code.co_filename == VALIDATION):
        return None
    for frame in reversed(frames):
        for each in frame.f_locals.values():
            if isinstance(each, Tensor) and is_bad(each):
                return Seen([each], place)
    return None


def full_name(func: Callable[..., Any]) -> str:
    """``torch.multinomial``."""
    return resolve_name(func) or name_of(func)
