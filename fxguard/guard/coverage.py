"""How much of a model is checked: the counts of ``coverage()``, and their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.nn import Module

from fxguard import globs
from fxguard.batch.assemble import operations_of
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import joined
from fxguard.findings import Origin
from fxguard.measure.at_hand import own_arithmetic
from fxguard.plan.plan import Plan

__all__ = ["Coverage", "coverage_of", "idle_globs", "not_judged_in"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was captured of a model, and what its last batch ran between graphs."""

    graphs: int
    operations: int  # in graphs and between them
    between: int  # those of them that ran outside every graph
    unchecked: Counter[str]  # reason why operations of graphs are not checked, to their number
    unmeasured: int  # operations of the last batch whose results cannot be measured

    @property
    def checked(self) -> int:
        """How many operations are checked, according to the graphs."""
        return self.operations - self.unchecked.total()

    def in_words(self, when: str = "") -> str:
        """The counts as one line.

        Args:
            when: text on when operations are checked; "" for in each batch.
        """
        unchecked = Counter(self.unchecked)
        if self.unmeasured:
            unchecked["that made what cannot be measured"] = self.unmeasured
        graphs = f"{self.graphs} graph" + ("" if self.graphs == 1 else "s")
        checked = self.operations - unchecked.total()
        line = f"checked {checked} of {self.operations} operations in {graphs}"
        if self.between:
            line += f" and {self.between} between graphs"
        line += when
        if unchecked:
            reasons = ", ".join(f"{count} {why}" for why, count in sorted(unchecked.items()))
            line += f"; not checked: {reasons}"
        return line


NOTHING_YET = "no batch has finished yet: nothing was checked"


def coverage_of(plans: Sequence[Plan], last: Batch | None) -> Coverage:
    """Count the operations of captured graphs, and those that a batch ran between them.

    Args:
        plans: the plan of every graph that was captured.
        last: the last batch that finished, if any.
    """
    between = 0 if last is None else last.uncaptured()
    unchecked: Counter[str] = Counter()
    known = between
    for plan in plans:
        times = 1 if last is None else max(1, len(last.runs_of(plan)))
        known += times * plan.operations
        unchecked.update({why: times * count for why, count in plan.unchecked})
    with own_arithmetic():  # a model may be dropped in the middle of a script, which is followed
        unmeasured = 0 if last is None else last.unmeasured()
    return Coverage(len(plans), known, between, unchecked, unmeasured)


def not_judged_in(notes: Iterable[Origin]) -> str:
    """Text, to end the line, on what could not be judged; "" if there is nothing of the kind.

    Args:
        notes: origins whose bad values reached no output.
    """
    reasons = Counter(origin.not_judged for origin in notes if origin.not_judged)
    if not reasons:
        return ""
    listed = ", ".join(f"{count} ({why})" for why, count in sorted(reasons.items()))
    return f"; absorbed and not judged: {listed}"


def idle_globs(patterns: Iterable[str], model: Module | None, batch: Batch) -> list[str]:
    """The globs that name no module of a model and no operation of a batch.

    Only globs with a colon can name operations. Names may begin with that of the model.
    """
    modules = [] if model is None else [name for name, _ in model.named_modules()]
    ran = operations_of(batch)
    if batch.held_as:
        modules += [joined(batch.held_as, name) for name in modules]
        ran |= {(joined(batch.held_as, module), kind) for module, kind in ran}
    return [
        pattern
        for pattern in patterns
        if not any(globs.matches(pattern, *operation) for operation in ran)
        and (":" in pattern or not any(globs.matches(pattern, module, "") for module in modules))
    ]
