"""What two models return in float64: of A's weights, or each of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fxguard.comparison._arguments import Arguments
from fxguard.comparison._moves import Moves, moves_of
from fxguard.comparison._outputs import OutputPair, paired_outputs, with_moves
from fxguard.comparison._programs import Program, Values, kept_values, program_of
from fxguard.comparison._rounding import SAME_PROGRAM, distance_of
from fxguard.comparison._runs import ModelRun
from fxguard.graph.wide_form import NotJudged

__all__ = ["Ends", "Inside", "ends_of"]

MOST = 32  # weights that are put back one by one
WORSE = 4  # how many times further apart outputs are without a weight that belongs to the others


@dataclass(frozen=True, slots=True)
class Inside:
    """What every operation of both models makes in float64, and how far it moves with roundings."""

    values: tuple[Values, Values]
    moves: tuple[Moves, Moves]


@dataclass(frozen=True, slots=True)
class Ends:
    """The outputs of both models in float64."""

    known: Arguments  # with the weights of B that keep their own values
    programs: tuple[Program, Program] | None  # None if they cannot run again
    pairs: Sequence[OutputPair]
    only_weights: bool = False  # whether they are the same if B has A's weights
    lone: frozenset[str] = frozenset()  # weights of B that differ and belong to nothing

    @property
    def differing(self) -> list[OutputPair]:
        """The outputs that are others in float64, too."""
        return [pair for pair in self.pairs if pair.is_judged and not pair.is_one_program]

    def inside(self) -> Inside:
        """Run both programs again, and keep what operations make.

        Raises:
            NotJudged: when they cannot run again.
        """
        known = self.known
        (of_a, keep_a), (of_b, keep_b) = kept_values(), kept_values()
        a, b = program_of(known.a, keep=keep_a), program_of(known.b, known, keep=keep_b)
        moves = moves_of(known.a, known, a, of_a), moves_of(known.b, known, b, of_b)
        return Inside((of_a, of_b), moves)


def ends_of(a: ModelRun, b: ModelRun, known: Arguments) -> Ends:
    """What both models return in float64.

    B's program has A's weights: then only what the models do can differ. But weights that are not
    A's may belong to what B does, as when a norm was folded into the layer before it. They do if
    both programs return the same with their own weights, to what roundings of those explain, and if
    a weight of A in the place of one of them returns something else.
    """
    try:
        programs = program_of(a), program_of(b, known)
    except NotJudged as reason:
        return Ends(known, None, paired_outputs(a, b, None, str(reason)))
    ends = Ends(known, programs, paired_outputs(a, b, programs, ""))
    own = known.keeping(known.differing)
    if not (ends.differing and any(own.unshared)) and not known.differing:
        return ends
    try:
        others = _with_own(ends, own)
        if others.differing:
            return replace(others, only_weights=not ends.differing)
        apart, without_effect = _put_back(others)
        if ends.differing:
            return replace(others, lone=without_effect)
        if not any(x > WORSE * apart[""] for x in apart.values()):
            return ends
        nearer = {name for name, x in apart.items() if name and x < apart[""] / 2}
        return replace(others, lone=without_effect | nearer)
    except NotJudged:
        return ends


def _with_own(ends: Ends, own: Arguments) -> Ends:
    """The same, but weights of B that are not A's keep their own values.

    Raises:
        NotJudged: when B cannot run again.
    """
    assert ends.programs is not None
    programs = ends.programs[0], program_of(own.b, own)
    pairs = paired_outputs(own.a, own.b, programs, "")
    moves = moves_of(own.a, own, programs[0]), moves_of(own.b, own, programs[1])
    return Ends(own, programs, with_moves(pairs, *moves))


def _put_back(ends: Ends) -> tuple[dict[str, float], frozenset[str]]:
    """How far apart the outputs are with A's weight in the place of one of B's, for each of them.

    Second come weights that change nothing.
    """
    known = ends.known
    before = [(pair.wide_a, pair.wide_b) for pair in ends.pairs]
    found, without_effect = {"": _apart(before)}, set()
    assert ends.programs is not None
    for name in sorted(known.own)[:MOST]:
        program = program_of(known.b, known.keeping(known.own - {name}))
        after = [program.of(pair.b) for pair in ends.pairs]
        found[name] = _apart((x, z) for (x, _), z in zip(before, after, strict=True))
        moved = _apart((y, z) for (_, y), z in zip(before, after, strict=True))
        if moved <= SAME_PROGRAM:
            without_effect.add(name)
    return found, frozenset(without_effect)


def _apart(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> float:
    """How far some outputs are apart, relative to their size."""
    known = [(x, y) for x, y in pairs if x is not None and y is not None and x.shape == y.shape]
    return math.hypot(*(distance_of(x, y) for x, y in known))
