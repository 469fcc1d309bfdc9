"""Tells models that were written in two ways from models that compute different things."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fxguard.comparison._aligned import Aligned
from fxguard.comparison._blame import Blame
from fxguard.comparison._ends import Ends
from fxguard.comparison._graphs import Graphs
from fxguard.comparison._outputs import OutputPair, Tolerance
from fxguard.comparison._rounding import apart, unit_of
from fxguard.comparison._sides import Key
from fxguard.comparison.elements import Compared
from fxguard.graph.wide_form import NotJudged, is_float

__all__ = ["Settled", "settled"]


@dataclass(slots=True)
class Settled:
    """What became of the operations that are another program in B."""

    found: list[Compared]  # the operations, those to blame among them
    apart: frozenset[Key]  # operations of B whose partner turned out to be another operation
    said: dict[int, str] = field(default_factory=dict)  # of outputs: why they differ, by number
    # Weights of B that are others than A's, as the operations around them are.
    rewritten: frozenset[str] = frozenset()


def settled(both: Aligned, graphs: Graphs, ends: Ends, output_tolerance: Tolerance) -> Settled:
    """Decide by what the models return.

    If both programs return the same in float64, of the same inputs and weights, they are one
    program that was written in two ways. If not, the operations are to blame that lie between the
    last values that are the same and the outputs that differ. If each program needs its own weights
    for that, these belong to how it is written. But a weight that makes no difference where it is
    read makes none later: it differs all the same.

    Args:
        both: the operations of two models that have run.
        graphs: what was compared.
        ends: the outputs.
        output_tolerance: how far apart outputs may be that float64 cannot judge.
    """
    pairs = ends.pairs
    differing = ends.differing
    beyond = [pair for pair in differing if not pair.is_within_roundings]
    open_ = [pair for pair in pairs if not pair.is_judged and output_tolerance.is_exceeded(pair)]
    if not pairs or (open_ and not differing):
        return Settled(list(_with_shapes(graphs)), frozenset())
    asks = bool(differing) and bool(graphs.suspects or beyond)
    if not asks and not ends.known.own:
        result = _without(graphs, set(graphs.suspects))
        result.rewritten = frozenset() if differing or open_ else _reshaped(ends)
        return result
    try:
        blame = _blame(both, ends)
    except NotJudged:
        return Settled(list(_with_shapes(graphs)), frozenset())
    reached = {key for pair in differing for key in blame.behind(pair.b)}
    guilty = set() if ends.only_weights else reached
    innocent = {at for at, key in graphs.suspects.items() if key not in guilty}
    dead = set(ends.known.own & ends.lone)
    dead.update(*(_without_effect(graphs.found[at]) for at in graphs.reweighed))
    rewritten = {
        name
        for name, readers in both.b.readers_of(ends.known.own - dead).items()
        if readers and not reached.intersection(readers)
    }
    if ends.only_weights and rewritten >= ends.known.own - dead:
        rewritten = set()  # one of them is to blame, and no reader tells which
    innocent |= {
        at for at in graphs.reweighed if rewritten.issuperset(_weights_of(graphs.found[at]))
    }
    result = _without(graphs, innocent)
    result.rewritten = frozenset(rewritten) if reached else frozenset(rewritten) | _reshaped(ends)
    if any(each.is_significant for each in result.found) or not beyond:
        return result
    reached = {key for pair in beyond for key in blame.behind(pair.b)}
    result.found += list(blame.named(reached))[:1]
    for number, pair in enumerate(pairs):
        if pair in beyond:
            result.said[number] = _said(blame, pair, pairs)
    return result


def _blame(both: Aligned, ends: Ends) -> Blame:
    known = ends.known
    return Blame(both, ends.inside(), min(unit_of(*known.a.outputs), unit_of(*known.b.outputs)))


def _weights_of(each: Compared) -> set[str]:
    """The names of the differing weights that an operation is the first to read."""
    return {said.partition(":")[0] for said in each.weights}


def _without_effect(each: Compared) -> set[str]:
    """Those of its weights that change nothing on the same operands."""
    return _weights_of(each) if each.own is not None and each.own.absolute == 0 else set()


def _reshaped(ends: Ends) -> frozenset[str]:
    """Weights of one name in two shapes that both models read, and return the same."""
    known = ends.known
    return frozenset(known.weights.keys() & (known.weights_of_b.keys() - known.twins.keys()))


def _with_shapes(graphs: Graphs) -> Iterator[Compared]:
    """All suspects are to blame; different shapes are if something else differs as well."""
    others = any(each.is_significant for each in graphs.found)
    for at, each in enumerate(graphs.found):
        shapes = graphs.misshapen.get(at, "")
        yield replace(each, reason=shapes) if shapes and others else each


def _without(graphs: Graphs, innocent: set[int]) -> Settled:
    """Leave out what is not one operation in two models, and is not to blame for anything."""
    found = [
        replace(each, reason=graphs.misshapen.get(at, each.reason))
        for at, each in enumerate(graphs.found)
        if at not in innocent
    ]
    keys = ({**graphs.suspects, **graphs.reweighed}[at] for at in innocent)
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
