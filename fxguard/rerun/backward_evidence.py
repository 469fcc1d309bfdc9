"""A closer look at one operation whose backward made something bad, also in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.kept_run import KeptRun
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph import tables
from fxguard.graph.closer_look import evidence_alone, evidence_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.nodes import leaves
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.own_gradients import gradient_in_float64
from fxguard.graph.poles import plain
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.spectra import degeneracy
from fxguard.graph.wide_form import NotJudged, is_float
from fxguard.measure.at_hand import dtype_of
from fxguard.measure.details import Detail, describe
from fxguard.plan.plan import Place
from fxguard.rerun.edges import BackwardOf, Edge, Gradients, Look
from fxguard.rerun.gradients import gradients_of
from fxguard.rerun.inside_function import Inside, inside_of, is_random
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Ended, Walk
from fxguard.rerun.wide_run import WideForm

__all__ = ["BackwardEvidence", "evidence_of_backward"]

WIDE = torch.float64
MOST_STEPS = 16  # from a bad operand back to its origin; each is a second run


@dataclass(frozen=True, slots=True)
class BackwardEvidence:
    """The evidence on a backward that made a bad gradient from good ones."""

    # The forward operation at the first bad element of the gradient: `number` is that element,
    # `same` and `wide` are the gradient in float64, on the model's operands and on those of the
    # wide form.
    gradient: Evidence
    detail: Detail  # of the gradient
    computed_in: str  # the dtype of the incoming gradient, such as autocast's
    # The incoming gradient of the result at that element; None if its shape differs.
    came_in: float | None = None
    # If something bad was already made in the forward: by the operation, or earlier by `made_by`.
    forward: Evidence | None = None
    made_by: BackwardOf | None = None
    inside: Inside | None = None  # of an autograd function's own backward
    operation: OneOperation | None = None  # with its original operands and gradients
    of_exponent: bool = False  # whether the gradient is that of the exponent of a power


def evidence_of_backward(
    kept: KeptRun, gradients: Gradients, operation: BackwardOf, edge: Edge, scale: float = 1.0
) -> BackwardEvidence | None:
    """Look at one operand of an operation whose backward made a bad gradient.

    Args:
        kept: the graph run.
        gradients: the gradients of its second run.
        operation: the operation.
        edge: the operand.
        scale: the divisor of the incoming gradients in that run.

    Returns:
        None if another second run did not repeat it.
    """
    place = operation.place
    look = Look(place, edge.position)
    gradients_of(kept, scale, look)
    if look.outgoing is None:
        return None
    ran = look.seen
    wide_args = wide_kwargs = None
    with where_theirs_may_raise(), kept.settings():  # otherwise the wide form stays unknown
        wide_args, wide_kwargs = _wide_arguments(kept, place)
    same = _gradient_in_float64(look, ran.args, ran.kwargs)
    wide = None
    if wide_args is not None:
        wide = _gradient_in_float64(look, wide_args, wide_kwargs)
    is_another_throw = same is None and is_random(ran)
    made = look.outgoing
    evidence = evidence_of(
        ran.call,
        ran.args,
        ran.kwargs,
        made,
        same=same,
        wide_args=wide_args,
        wide_kwargs=wide_kwargs,
        wide=wide,
        not_judged=f"{ran.call.kind} draws random numbers" if is_another_throw else "",
    )
    if evidence is None:
        return None
    with where_theirs_may_raise():  # otherwise that stays unknown
        why = degeneracy(ran.call.kind, ran.result, evidence.index)
        evidence = replace(evidence, degeneracy=why)
    maker, forward = _made_bad(kept, gradients, operation, look)
    came_in = look.incoming.get(0)
    fits = came_in is not None and came_in.shape == made.shape
    return BackwardEvidence(
        gradient=evidence,
        detail=describe(made),
        computed_in=dtype_of(made if came_in is None else came_in),
        came_in=float(came_in[evidence.index].detach()) if fits and came_in is not None else None,
        forward=forward,
        made_by=None if maker is operation else maker,
        inside=None if is_another_throw else _inside(kept, look),
        operation=_alone(operation.node, look),
        of_exponent=_is_exponent(look),
    )


def _is_exponent(look: Look) -> bool:
    """Whether the operand is ``p`` of ``x ** p``."""
    ran = look.seen
    if plain(ran.call.kind) not in ("float_power", "pow") or len(ran.args) < 2:
        return False
    return look.position == (1 if isinstance(ran.args[0], Tensor) else 0)


def _alone(node: Node, look: Look) -> OneOperation | None:
    """The backward of the operation, in a form that can run by itself."""
    if node.op == "call_module":
        return None
    return OneOperation(
        look.seen.call.kind,
        node.target,
        look.seen.args,
        look.seen.kwargs,
        autocast=look.autocast,
        incoming=dict(sorted(look.incoming.items())),
        operand=look.position,
    )


def _inside(kept: KeptRun, look: Look) -> Inside | None:
    with where_theirs_may_raise(), kept.settings():  # then only the whole is known
        return inside_of(look)
    return None


def _made_bad(
    kept: KeptRun, gradients: Gradients, operation: BackwardOf, look: Look
) -> tuple[BackwardOf, Evidence | None]:
    """The forward operation that made an operand bad, or else the operation; with operands."""
    makers = {value: each for each in gradients.operations for value in each.made}
    suspect, before = operation, look
    for _ in range(MOST_STEPS):
        read = (before.seen.args, before.seen.kwargs)
        given = [x for x in trees.tree_leaves(read) if _is_tensor(x)]
        if not any(map(_is_bad, given)):
            return suspect, _forward_evidence(before)
        bad = [edge.value for edge in suspect.edges if _is_bad(given[edge.position])]
        maker = makers.get(bad[0]) if bad else None
        if maker is None or maker.call.infinite_literal:
            break  # it is intended
        suspect, before = maker, Look(maker.place, maker.edges[0].position)
        gradients_of(kept, look=before)
    return operation, _forward_evidence(look)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_bad(operand: Tensor) -> bool:
    return is_float(operand) and not bool(torch.isfinite(operand).all())


def _forward_evidence(look: Look) -> Evidence | None:
    """What an operation read in the forward, if its result is bad."""
    ran = look.seen
    for path, value in enumerate(leaves(ran.result)):
        if is_float(value) and not bool(torch.isfinite(value.detach()).all()):
            indices = (path,) if isinstance(ran.result, (tuple, list)) else ()
            return evidence_alone(ran.call, ran.run, _detached(ran.result), indices)
    return None


def _detached(value: Any) -> Any:
    return trees.tree_map_only(Tensor, lambda x: x.detach(), value)


def _gradient_in_float64(look: Look, args: Any, kwargs: Any) -> Tensor | None:
    """The gradient of the operand, computed entirely in float64; None if that is impossible."""
    ran = look.seen
    if ran.call.casts:
        return next((gradient.to(WIDE) for gradient in look.incoming.values()), None)
    if is_random(ran) and ran.call.kind not in tables.DROPOUTS:
        return None

    def run(*given: Any, **named: Any) -> Any:
        if ran.before is None:
            return ran.run(*given, **named)
        ran.before.restore()
        result = ran.run(*given, **named)
        made = [x for x in leaves(result) if isinstance(x, Tensor)]
        if not _drops_the_same(made, leaves(ran.result)):
            raise NotJudged("another throw of the dice")
        return result

    with random_state_kept(ran.args):
        given = (args, kwargs)
        return gradient_in_float64(ran.call.kind, run, given, look.position, look.incoming)


def _drops_the_same(made: Iterable[Tensor], before: Iterable[Any]) -> bool:
    """Whether two runs of a dropout drew the same: some generators depend on the dtype."""
    pairs = zip(made, before, strict=True)
    return all(torch.equal(one == 0, other == 0) for one, other in pairs)


class _Arguments(WideForm):
    """The wide form up to one operation, to get its arguments."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.wanted = place
        self.found: tuple[Any, Any] = (None, None)

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return walk.place(node) == self.wanted or super().wants(walk, node, differs)

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        if walk.place(node) == self.wanted:
            self.found = walk.other_of(node.args, node), walk.other_of(node.kwargs, node)
            raise Ended


def _wide_arguments(kept: KeptRun, place: Place) -> tuple[Any, Any]:
    form = _Arguments(place)
    with contextlib.suppress(Ended):
        Start(kept.opened()).again(form)
    return form.found
