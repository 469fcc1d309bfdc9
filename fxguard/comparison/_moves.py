"""How far two programs move in float64 with roundings of the weights that only one of them has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxguard.comparison._arguments import Arguments
from fxguard.comparison._programs import Program, Values, program_of
from fxguard.comparison._rounding import gap_of, in_double, rms_of, unit_of
from fxguard.comparison._runs import ModelRun
from fxguard.comparison._sides import Key
from fxguard.graph.wide_form import is_float, widened

__all__ = ["Moves", "moved_weights", "moves_of"]

TRIALS = 2  # how many times weights are rounded up or down


@dataclass(slots=True)
class Moves:
    """How far a program moves when its own weights move by one rounding each.

    Weights that were computed from others, such as a norm that was folded into a convolution, hold
    the roundings of that, and float64 cannot take them back.
    """

    outputs: dict[int, Tensor] = field(default_factory=dict)  # each element, by identity
    # Of each tensor that an operation makes, root mean square, in each turn of a loop.
    values: dict[Key, list[list[float]]] = field(default_factory=dict)


class _Meter:
    """Hears what each operation makes of moved weights, and keeps how far that is away.

    Args:
        values: what it makes of weights that have not moved.
        found: gets the larger one of what is known and what is heard.
    """

    def __init__(self, values: Values, found: Moves) -> None:
        self.values = values
        self.found = found
        self.turns: dict[Key, int] = defaultdict(int)

    def __call__(self, key: Key, made: list[Tensor]) -> None:
        turn, before = self.turns[key], self.values.get(key, [])
        self.turns[key] += 1
        if turn >= len(before):
            return
        sizes = [_moved(*pair) for pair in zip(before[turn], made, strict=False)]
        known = self.found.values.setdefault(key, [])
        if turn < len(known):
            sizes = [max(pair) for pair in zip(known[turn], sizes, strict=False)]
        known[turn : turn + 1] = [sizes]


def moves_of(
    model: ModelRun, known: Arguments, program: Program, values: Values | None = None
) -> Moves:
    """How far a program moves with the weights that the other model does not have.

    Args:
        model: A or B.
        known: what A has for what B's graphs read.
        program: what the model makes of weights that have not moved.
        values: likewise each operation; None if nobody asks about operations.

    Raises:
        NotJudged: when it cannot run again.
    """
    is_a = model is known.a
    weights = known.weights if is_a else known.weights_of_b
    names = known.unshared[0 if is_a else 1]
    found = Moves()
    for trial in range(TRIALS if names else 0):
        again = program_of(
            model,
            None if is_a else known,
            keep=None if values is None else _Meter(values, found),
            moved=moved_weights(weights, names, trial),
        )
        for output in model.outputs:
            before, after = program.of(output), again.of(output)
            if before is None or after is None or before.shape != after.shape:
                continue
            gap = gap_of(in_double(before), in_double(after)).nan_to_num(0.0, posinf=0.0)
            already = found.outputs.get(id(output))
            found.outputs[id(output)] = gap if already is None else torch.maximum(already, gap)
    return found


def moved_weights(
    weights: Mapping[str, Tensor], names: Collection[str], seed: int
) -> dict[str, Tensor]:
    """Some weights in float64, each element a rounding up or down.

    An element may be a sum whose terms have cancelled. So it moves by a rounding of itself and by
    one of the root mean square of its row.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in sorted(names):
        weight = weights[name]
        if not is_float(weight) or weight.is_complex() or not weight.numel():
            continue
        wide = widened(weight, torch.float64)
        signs = torch.randint(0, 2, wide.shape, generator=generator, dtype=torch.int8) * 2 - 1
        row = tuple(range(1, wide.dim())) if wide.dim() > 1 else (0,) * wide.dim()
        size = wide.abs() + wide.square().mean(row, keepdim=True).sqrt()
        found[name] = wide + unit_of(weight) * signs.to(wide.device) * size
    return found


def _moved(before: Tensor, after: Tensor) -> float:
    if before.shape != after.shape or not is_float(before):
        return 0.0
    return rms_of(gap_of(in_double(before), in_double(after)))
