"""Tells models that were written in two ways from models that compute different things."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fxguard.comparison._aligned import Aligned
from fxguard.comparison._arguments import Arguments
from fxguard.comparison._blame import Blame
from fxguard.comparison._graphs import Graphs
from fxguard.comparison._outputs import OutputPair
from fxguard.comparison._programs import program_of
from fxguard.comparison._rounding import apart, distance_of, unit_of
from fxguard.comparison._runs import ModelRun
from fxguard.comparison._sides import Key
from fxguard.graph.wide_form import NotJudged, is_float
from fxguard.trace.elements import Compared

__all__ = ["Settled", "settled"]


@dataclass(slots=True)
class Settled:
    """What became of the operations that are another program in B."""

    found: list[Compared]  # the operations, those to blame among them
    apart: frozenset[Key]  # operations of B whose partner turned out to be another operation
    said: dict[int, str] = field(default_factory=dict)  # of outputs: why they differ, by number


def settled(
    a: ModelRun,
    b: ModelRun,
    both: Aligned,
    known: Arguments,
    graphs: Graphs,
    pairs: Sequence[OutputPair],
    output_tolerance: float,
) -> Settled:
    """Decide by what the models return.

    If both programs return the same in float64, of the same inputs and weights, they are one
    program that was written in two ways. If not, the operations are to blame that lie between the
    last values that are the same and the outputs that differ.

    Args:
        a: a model that has run.
        b: likewise.
        both: their operations.
        known: what A has for what B's graphs read.
        graphs: what was compared.
        pairs: the outputs.
        output_tolerance: how far apart outputs may be that float64 cannot judge.
    """
    differing = [pair for pair in pairs if pair.is_judged and not pair.is_one_program]
    beyond = [pair for pair in differing if not pair.is_within_roundings]
    open_ = [
        pair
        for pair in pairs
        if not pair.is_judged and not distance_of(pair.a, pair.b) <= output_tolerance
    ]
    if not pairs or (open_ and not differing):
        return Settled(list(_with_shapes(graphs)), frozenset())
    if not differing or not (graphs.suspects or beyond):
        return _without(graphs, set())
    try:
        blame = _blame(a, b, both, known)
    except NotJudged:
        return Settled(list(_with_shapes(graphs)), frozenset())
    reached = {key for pair in differing for key in blame.behind(pair.b)}
    guilty = {at for at, key in graphs.suspects.items() if key in reached}
    result = _without(graphs, guilty)
    if any(each.is_significant for each in result.found):
        return result
    reached = {key for pair in beyond for key in blame.behind(pair.b)}
    result.found += list(blame.named(reached))[:1]
    for number, pair in enumerate(pairs):
        if pair in beyond:
            result.said[number] = _said(blame, pair, pairs)
    return result


def _blame(a: ModelRun, b: ModelRun, both: Aligned, known: Arguments) -> Blame:
    kept = program_of(a, keep=True), program_of(b, known, keep=True)
    unit = min(unit_of(*a.outputs), unit_of(*b.outputs))
    return Blame(both, kept[0].values, kept[1].values, unit)


def _with_shapes(graphs: Graphs) -> Iterator[Compared]:
    """All suspects are to blame; different shapes are if something else differs as well."""
    others = any(each.is_significant for each in graphs.found)
    for at, each in enumerate(graphs.found):
        shapes = graphs.misshapen.get(at, "")
        yield replace(each, reason=shapes) if shapes and others else each


def _without(graphs: Graphs, guilty: set[int]) -> Settled:
    """Leave out the suspects that are not guilty: they are not one operation in two models."""
    innocent = graphs.suspects.keys() - guilty
    found = [
        replace(each, reason=graphs.misshapen.get(at, each.reason))
        for at, each in enumerate(graphs.found)
        if at not in innocent
    ]
    keys = (graphs.suspects[at] for at in innocent)
    return Settled(found, frozenset(key for key in keys if key is not None))


def _said(blame: Blame, pair: OutputPair, pairs: Sequence[OutputPair]) -> str:
    """Why an output differs though no operation does."""
    assert pair.wide_a is not None
    assert pair.wide_b is not None
    gap = ""
    if is_float(pair.wide_a) and is_float(pair.wide_b) and pair.a.shape == pair.b.shape:
        relative = apart(pair.wide_a, pair.wide_b).relative
        gap = f"not roundings: in float64, too, the two outputs are {relative:.2g} apart. "
    one, other = blame.maker(blame.both.a, pair.a), blame.maker(blame.both.b, pair.b)
    said = f"{gap}A returns {one}; B returns {other}"
    for each in pairs:
        if each is not pair and replace(each, wide_a=pair.wide_a).is_one_program:
            return f"{said}, and what A returns here as {each.title}"
    return said
