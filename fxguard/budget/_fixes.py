"""What to compute in float32, tried: lines with the largest shares, up to what amplifies them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fxguard import trees
from fxguard.budget._form import WIDE
from fxguard.budget._graphs import Graphs, Operation
from fxguard.budget._measured import Measured, numbers_of, relative
from fxguard.budget._rows import Amplified, Line
from fxguard.errors import UsageError
from fxguard.graph.wide_form import is_float, widened
from fxguard.in_dtype.trials import Trials
from fxguard.report.error_budget import percent

__all__ = ["candidates", "fix_for"]

ENOUGH = 4.0  # units of roundoff: such an error needs no fix
MOST = 4  # lines
SHARE = 0.02  # of a line: one with less is left as it is
HALF = 0.5  # of the error: a fix that leaves more is not worth a line
AS_GOOD = 1.3  # times the least error: fewer lines are as good


def fix_for(
    trials: Trials,
    of: Callable[[Any], Any] | None,
    graphs: Graphs,
    lines: list[Line],
    amplified: Amplified,
    number: Measured,
) -> str:
    """What to compute in float32, and the error then; "" if that does not help, or need not be.

    Args:
        trials: runs the model.
        of: gives the number that matters.
        graphs: of the model.
        lines: by share.
        amplified: how much each error is amplified.
        number: the number that matters.
    """
    if not ENOUGH * trials.unit < number.error < math.inf:
        return ""

    def error_with(operations: Iterable[Operation]) -> float:
        globs = [f"{x.step.module}:{x.step.kind}#{x.number}" for x in operations]
        try:
            with trials.kept(globs):
                output = trials.returned()
        except UsageError:  # what has bodies cannot be kept
            return math.inf
        made = numbers_of(
            trees.tree_map(lambda x: widened(x, WIDE) if is_float(x) else x, output), of
        )
        return relative([made[at] for at in number.kept], number.itself)

    chosen: dict[Operation, None] = {}
    tried: list[tuple[float, list[Operation]]] = []
    for more in itertools.islice(candidates(graphs, lines, amplified), MOST):
        chosen |= dict.fromkeys(more)
        if chosen and (not tried or list(chosen) != tried[-1][1]):
            tried.append((error_with(chosen), list(chosen)))
    if not tried:
        return ""
    least = min(error for error, _ in tried)
    if not least <= HALF * number.error:
        return ""
    error, operations = next(each for each in tried if each[0] <= AS_GOOD * least)
    places = ", ".join(_places(operations))
    return f"compute {places} in float32 (tried): {percent(error)}" if places else ""


def candidates(
    graphs: Graphs, lines: list[Line], amplified: Amplified
) -> Iterator[list[Operation]]:
    """For each line of code, what to compute in float32 if it is to be: the largest share first."""
    for keys in _by_source(lines):
        found: dict[Operation, None] = {}
        for key in keys:
            operation = graphs.operations.get(key)
            if operation is not None:
                found |= dict.fromkeys([operation, *amplified.region(key)])
        yield list(found)


def _by_source(lines: list[Line]) -> Iterator[list[Any]]:
    """The keys of all operations of one line of code, in all modules; the largest share first."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        if line.source is not None:
            found.setdefault(line.source.position, []).append(line)
    shares = [(sum(line.share for line in each), each) for each in found.values()]
    for share, each in sorted(shares, key=lambda x: -x[0]):
        if share >= SHARE:
            yield [key for line in each for key in line.keys]


def _places(operations: Iterable[Operation]) -> Iterator[str]:
    """Lines as people name them: ``rope.py:14 to 15``."""
    by_file: dict[str, set[int]] = {}
    for each in operations:
        if each.step.source is not None:
            by_file.setdefault(each.step.source.file, set()).add(each.step.source.line)
    for file, numbers in by_file.items():
        name = file.replace("\\", "/").rpartition("/")[2]
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number - runs[-1][-1] <= 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        said = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
        yield f"{name}:{', '.join(said)}"
