"""Elements that an operation made 0, and that float64 does not make 0 of the same operands.

A captured graph runs once more. Each operation has the operands that the model had, so that what an
earlier underflow made 0 is counted there and not again. Where there is no number too small for the
dtype, the cost is that of one run in eager mode: an operation is computed in float64 only where
enough elements of its result are 0, and a graph runs again only where the first run has seen a 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.graph.closer_look import evidence_at
from fxguard.graph.evidence import Evidence
from fxguard.graph.nodes import leaves
from fxguard.graph.tables import MOVES, SELECTS
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure.at_hand import dtype_of
from fxguard.measure.func_levels import without_levels
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Place
from fxguard.rerun.evidence import samples_of
from fxguard.rerun.lockstep import Lockstep, SecondForm
from fxguard.rerun.other_dtype import VANISHES
from fxguard.rerun.same_start import as_before, copies_of

__all__ = ["Lost", "LostElements", "lost_elements_in"]

WIDE = torch.float64
CHECK = torch.float32  # what is no noise of roundings is the same there, or too small for it

# What these make is 0 by right, or where an operand was.
KEEPS_ZEROS = MOVES | SELECTS | {"embedding"}

NOT_COPIED = "there was no memory for copies of what the graph writes"


@dataclass(frozen=True, slots=True)
class Lost:
    """What one operation has lost."""

    share: float  # of the elements that are not 0 in float64
    largest: float  # magnitude of those that are lost, in float64
    evidence: Evidence  # what stood at the largest of them


@dataclass(slots=True)
class LostElements:
    """What the operations of one graph have lost, by where they stand, in order of execution."""

    found: dict[Place, Lost] = field(default_factory=dict)
    not_judged: dict[Place, str] = field(default_factory=dict)  # and why


def lost_elements_in(run: GraphRun, share: float) -> LostElements:
    """Run a graph once more, and look where elements became 0.

    Args:
        run: of the graph, still open.
        share: of the elements that are not 0 in float64: from here on an operation is listed.

    Returns:
        The operations that have lost so many, and those of which nobody can tell.
    """
    suspects = _suspects(run)
    if not suspects:
        return LostElements()
    if run.args is None or not run.may_repeat:
        return LostElements(not_judged=dict.fromkeys(suspects, NOT_COPIED))
    form = _SameOperands(share, suspects, samples_of(run))
    try:
        with as_before(run):
            # Of a weight that requires a gradient, autocast may keep the cast for the model's own
            # operations: one that was made here would have none.
            args = pytree.tree_map_only(Tensor, Tensor.detach, copies_of(run))
            Lockstep(without_marks(run.graph_module), form).run_both(args)
    except Exception as error:  # what was seen until then is true
        reason = str(error) if isinstance(error, NotJudged) else _reason(error)
        form.lost.not_judged |= dict.fromkeys(suspects.keys() - form.seen, reason)
    return form.lost


def _reason(error: Exception) -> str:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "out of memory"
    return f"a second run of the graph raised {type(error).__name__}"


def _suspects(run: GraphRun) -> dict[Place, None]:
    """The operations that may have made a 0, as far as the first run has measured."""
    lows = [] if run.postponed is not None else run.statistics[:, 0].tolist()
    suspects: dict[Place, None] = {}
    for step in run.plan.steps:
        if not step.node or step.kind in KEEPS_ZEROS:
            continue
        for value in map(run.plan.values.__getitem__, step.outputs):
            # One iteration of a loop says nothing of the others.
            is_seen = value.slot is not None and lows and not step.inside
            if value.can_be_bad and not (is_seen and lows[value.slot or 0] > 0):
                suspects[step.inside, step.node] = None
    return suspects


class _SameOperands(SecondForm):
    """Each operation in float64 on the operands that the model had; nothing goes on from there.

    Args:
        share: see :func:`lost_elements_in`.
        suspects: where operations stand that are to be looked at.
        samples: how many there are in the batch of the graph's inputs.
    """

    def __init__(self, share: float, suspects: Mapping[Place, None], samples: int | None) -> None:
        self.share = share
        self.suspects = suspects
        self.samples = samples
        self.lost = LostElements()
        self.seen: set[Place] = set()
        self._begun: dict[Place, tuple[Any, Any]] = {}  # arguments, as they were before

    def wants(self, step: Lockstep, node: Node, differs: bool) -> bool:
        return step.place(node) in self.suspects

    def copy_of(self, memory: Tensor) -> Tensor:
        return memory  # the second form of what is written is the model's own

    def before(self, step: Lockstep, node: Node, args: Any, kwargs: Any) -> None:
        step.others.clear()  # those are the same
        place = step.place(node)
        if place not in self.suspects:
            return
        if step.call_of(node).written:
            args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        self._begun[place] = args, kwargs

    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        place = step.place(node)
        begun = self._begun.pop(place)
        self.seen.add(place)
        if ran.call.kind in VANISHES:
            return ran.result
        made = [*leaves(ran.result), *(step.env[each] for each in ran.call.written)]
        if not any(is_float(low) and self.may_have_lost(low) for low in made):
            return ran.result
        try:
            self.look(step, node, ran, begun)
        except NotJudged as reason:
            self.lost.not_judged.setdefault(place, str(reason))
        except Exception as error:
            self.lost.not_judged.setdefault(place, _reason(error))
        return ran.result

    def may_have_lost(self, low: Tensor) -> bool:
        """Whether as many elements are 0 as could be the share of all that are finite."""
        low = without_levels(low)
        if low.is_complex() or low.dtype is WIDE or not low.numel():
            return False
        low = _comparable(low)
        zeros = int((low == 0).sum())
        return zeros > 0 and zeros >= self.share * int(low.isfinite().sum())

    def look(self, step: Lockstep, node: Node, ran: Ran, begun: tuple[Any, Any]) -> None:
        """Compute one operation in wide dtypes, and count what is 0 only in the model's."""
        place, (args, kwargs) = step.place(node), begun
        made = _results(step, node, ran, begun, WIDE)
        checked: list[tuple[Tensor, Tensor]] | None = None
        for position, (low, high) in enumerate(made):
            if not is_float(low) or not is_float(high) or not self.may_have_lost(low):
                continue
            low, high = without_levels(low), without_levels(high)
            sizes = high.abs().where(high.isfinite(), 0.0)
            lost = (_comparable(low) == 0) & (sizes > 0)
            if not bool(lost.any()) or self.share > _share_of(lost, sizes):
                continue
            if checked is None:
                checked = _results(step, node, ran, begun, CHECK)
            sizes = sizes.where(~lost | _is_no_noise(sizes, checked[position][1]), 0.0)
            lost &= sizes > 0
            share = _share_of(lost, sizes)
            count, known = int(lost.sum()), self.lost.found.get(place)
            if not count or share < self.share or (known and known.evidence.share >= count):
                continue
            sizes = sizes.where(lost, 0.0)
            at = torch.unravel_index(sizes.argmax(), sizes.shape)
            args, kwargs = pytree.tree_map_only(Tensor, without_levels, (args, kwargs))
            evidence = evidence_at(
                tuple(map(int, at)), ran.call, args, kwargs, low, same=high, samples=self.samples
            )
            evidence = replace(evidence, share=count)
            self.lost.found[place] = Lost(share, float(sizes.max()), evidence)


def _results(
    step: Lockstep, node: Node, ran: Ran, begun: tuple[Any, Any], dtype: torch.dtype
) -> list[tuple[Any, Any]]:
    """What an operation returned and, if that is nothing, wrote: in the model, and in a dtype."""
    args, kwargs = widened(begun, dtype)
    made = wide_result(ran, args, kwargs, dtype)
    if ran.has_floats:
        return list(zip(leaves(ran.result), leaves(made), strict=True))
    given = zip(node.args, args, strict=True)
    return [(step.env[x], other) for x, other in given if x in ran.call.written]  # type: ignore[index]


def _share_of(lost: Tensor, sizes: Tensor) -> float:
    return float(lost.sum()) / max(1, int((sizes > 0).sum()))


def _is_no_noise(sizes: Tensor, checked: Tensor) -> Tensor:
    """Where numbers are too small to be what roundings of float64 leave of larger ones.

    The instance norm of a constant row is 1e-13 there, and 0 by right. Float32 leaves something
    else.

    Args:
        sizes: magnitudes in float64.
        checked: what the operation makes in float32.
    """
    other = without_levels(checked).abs().to(WIDE)
    agrees = (other - sizes).abs() <= sizes / 2
    return agrees | (sizes < torch.finfo(CHECK).tiny)


def _comparable(low: Tensor) -> Tensor:
    """Of a dtype that can be compared: a float8 cannot."""
    return low.float() if dtype_of(low).startswith("float8") else low
