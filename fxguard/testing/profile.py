"""How far each operation of a model is from the limits of its dtype, kept in a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxguard.batch.assemble import assemble
from fxguard.budget.budget import budget_as_it_is
from fxguard.errors import UsageError
from fxguard.formats import FORMATS
from fxguard.guard.guard import GuardedModel
from fxguard.records import Range
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.errors import NumericsError
from fxguard.report.in_words import percent
from fxguard.testing import settings
from fxguard.testing.watch import Model, as_call, as_module, watch

__all__ = ["check_profile"]

FIRST_LINE = "# fxguard profile 2"
NOT_CHECKED = "# not checked: "
OFF = "# error of the output: "
UNKNOWN = "not known"
ROWS = 3  # of an error budget, where the output has got worse
COLUMNS = "#  abs min   abs max   over  under  dtype     operation"


@dataclass(frozen=True, slots=True)
class Headroom:
    """One operation, and by how many bits its results could still grow or shrink."""

    operation: str  # "encoder.block.0 mul"; "… #2" for the second one of that name
    dtype: str
    abs_min: float  # the smallest magnitude that it made; not compared
    abs_max: float  # the largest one; inf or NaN if it is bad
    over: float  # log2(largest number of the dtype / abs_max); 0 for bad values and for zeros
    under: float  # log2(abs_max / smallest normal number); 0 likewise

    @property
    def is_bad(self) -> bool:
        return not math.isfinite(self.abs_max)

    def __str__(self) -> str:
        headroom = f"{self.over:6.1f} {self.under:6.1f}  {self.dtype:<8}"
        return f"{self.abs_min:10.2e}{self.abs_max:10.2e} {headroom}  {self.operation}"

    @classmethod
    def of_line(cls, line: str) -> Headroom:
        least, largest, over, under, dtype, operation = line.split(None, 5)
        return cls(operation, dtype, float(least), float(largest), float(over), float(under))


@dataclass(frozen=True, slots=True)
class Profile:
    """Every operation of one batch."""

    lines: tuple[Headroom, ...]
    unchecked: int  # operations that no check reached
    error: float | None = None  # of the output, against float64; None if that is not known
    budget: ErrorBudget | None = None  # where it comes from; not in the file

    def __str__(self) -> str:
        off = UNKNOWN if self.error is None else f"{self.error:.2e}"
        head = [FIRST_LINE, f"{NOT_CHECKED}{self.unchecked}", f"{OFF}{off}", COLUMNS]
        return "\n".join([*head, *map(str, self.lines), ""])

    @classmethod
    def of_file(cls, path: Path) -> Profile:
        """Read a profile from a file.

        Raises:
            FxguardError: when it is not a profile.
        """
        try:
            first, second, third, _, *lines = path.read_text(encoding="utf-8").splitlines()
            if first != FIRST_LINE:
                raise ValueError(f"it begins with {first[:40]!r}")
            unchecked = int(second.removeprefix(NOT_CHECKED))
            off = third.removeprefix(OFF)
            error = None if off == UNKNOWN else float(off)
            return cls(tuple(map(Headroom.of_line, lines)), unchecked, error)
        except ValueError as error:
            raise UsageError(
                f"{path} is not a profile of this version of fxguard: {error}"
            ) from error

    @classmethod
    def of_last_batch(cls, guard: GuardedModel, budget: ErrorBudget | None) -> Profile:
        """The profile of the last batch of a guard.

        Args:
            guard: of the model.
            budget: of the model with the same inputs; None if there is none.
        """
        batch = guard.recorder.last_batch
        assert batch is not None
        if batch.postponed:
            raise UsageError(
                "the model was instrumented with replay=True or full_every, which measures too "
                "little of this batch"
            )
        flow = assemble(batch)
        found = []
        count: Counter[str] = Counter()
        for step in flow.steps:
            made = [(flow.values[v].dtype, flow.ranges[v]) for v in step.outputs]
            ranges = [(dtype, stat) for dtype, stat in made if isinstance(stat, Range)]
            if not ranges or ranges[0][0] not in FORMATS:
                continue
            name = step.title
            count[name] += 1
            numbered = name if count[name] == 1 else f"{name} #{count[name]}"
            found.append(headroom(numbered, ranges[0][0], [stat for _, stat in ranges]))
        unchecked = sum(n for plan in guard.plans for _, n in plan.unchecked)
        error = None if budget is None or math.isnan(budget.error) else budget.error
        return cls(tuple(found), unchecked, error, budget)


def headroom(operation: str, dtype: str, made: Sequence[Range]) -> Headroom:
    """How far the results of an operation are from the limits of a dtype."""
    limit = FORMATS[dtype]
    worst = max(made, key=lambda stat: (stat.severity, stat.abs_max))
    least, largest = min(stat.abs_min for stat in made), worst.abs_max
    over = under = 0.0
    if 0 < largest < math.inf:
        over, under = limit.bits_below_max(largest), limit.bits_above_min(largest)
    return Headroom(operation, dtype, least, largest, over, under)


def losses(before: Profile, now: Profile, bits: float) -> Iterator[str]:
    """What got worse."""
    found = {line.operation: line for line in now.lines}
    for old in before.lines:
        new = found.get(old.operation)
        if new is None:
            yield f"  {old.operation}: is no longer there, or no longer checked"
        elif new.is_bad or old.is_bad:
            if new.is_bad and not old.is_bad:
                yield f"  {old.operation}: made {new.abs_max:g}, and {old.abs_max:.2e} before"
        elif old.abs_max and new.abs_max:
            for what, was, left in (("over", old.over, new.over), ("under", old.under, new.under)):
                if left < was - bits:
                    yield (
                        f"  {old.operation}: {what} {was:.1f} -> {left:.1f} bits, largest "
                        f"{old.abs_max:.2e} -> {new.abs_max:.2e} in {new.dtype}"
                    )
        elif old.abs_max:
            yield f"  {old.operation}: made zeros, and {old.abs_max:.2e} before"
    known = {line.operation for line in before.lines}
    for new in now.lines:
        if new.is_bad and new.operation not in known:
            yield f"  {new.operation}: is new, and made {new.abs_max:g}"
    if now.unchecked > before.unchecked:
        yield f"  {now.unchecked} operations are not checked, {before.unchecked} before"
    yield from _lost_digits(before.error, now, bits)


def _lost_digits(before: float | None, now: Profile, bits: float) -> Iterator[str]:
    """How much worse the output is, and which lines that comes from."""
    if before is None:
        return
    if now.error is None or now.budget is None:
        yield f"  the error of the output is not known, and was {percent(before)}"
    elif now.error > before * 2**bits and not now.budget.is_rounding:
        size = "not finite" if now.error == math.inf else f"{percent(now.error)} off"
        yield f"  the output is {size}, and was {percent(before)} off:"
        yield from (f"    {row}" for row in now.budget.rows[:ROWS])


def check_profile(
    model: Model, inputs: Any, path: str | Path, *, bits: float = 1.0, update: bool | None = None
) -> None:
    """Compare the headroom of every operation with the headroom in a file.

    The file has one line per operation: the smallest and the largest magnitude that it made, how
    many bits the largest is below the largest number of its dtype (``over``) and above its smallest
    normal number (``under``), the dtype and the operation. Numbers are rounded to three digits and
    a tenth of a bit: differences between machines and versions of torch are far below one bit.

    Above them stands how far the output is from a run in float64, as
    :func:`fxguard.error_budget` measures it.

    Args:
        model: any module, or a function of tensors, in the mode it is to be checked in.
        inputs: one batch: a dict is passed by name, a tuple or list by position.
        path: path of the file. Keep it under version control.
        bits: how much of its headroom an operation may lose, and how much the error of the output
            may grow. An error of four units of roundoff is any output's, and may always be.
        update: write the file instead of reading it; the default is pytest's option
            ``--fxguard-update``.

    Raises:
        NumericsError: an ``AssertionError``, when an operation has lost more than ``bits`` of
            headroom, newly makes bad values, or is no longer there or no longer checked; when the
            output has lost digits, with the lines that this comes from; and when there is no such
            file.
        FxguardError: when the file is not a profile.

    Example:
        >>> check_profile(model, batch, "tests/numerics/model.txt")
    """
    __tracebackhide__ = True
    args, kwargs = as_call(inputs)
    budget = budget_as_it_is(as_module(model), args, kwargs)
    outcome = watch(model, args, kwargs)
    now = Profile.of_last_batch(outcome.guard, budget)
    path = Path(path)
    if settings.update if update is None else update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(now), encoding="utf-8")
        return
    if not path.exists():
        raise NumericsError(
            f"there is no profile {path}: run pytest with --fxguard-update to write it, look at "
            "it, and keep it under version control"
        )
    problems = list(losses(Profile.of_file(path), now, bits))
    if problems:
        hint = "if that is as it should be, write the file again with --fxguard-update"
        raise NumericsError("\n".join([f"{path}:", *problems, hint]), outcome.report)
