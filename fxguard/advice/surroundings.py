"""The surroundings of a blamed operation: what made its operands, what reads its result.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property

from fxguard.graph.poles import DEFAULT_EPS, plain
from fxguard.graph.tables import CASTS, LIMITERS, LOSSES, MOVES, SELECTS
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step, Value
from fxguard.records import Range, Role, Severity, Source

__all__ = ["CREATES", "ROOTS", "Surroundings", "is_passed", "is_scaling", "names_of"]

MOST_STEPS = 64  # in one walk
MOST_VALUES = 1 << 14  # in one walk to what is learned
MOST_ALIKE = 4  # other turns of a loop that are looked at

# The root of a number that a dtype cannot hold may be a number that it can hold.
ROOTS = ("norm", "rsqrt", "sqrt", "std", "vector_norm")

# Operations that make constants.
CREATES = frozenset(["arange", "eye", "full", "linspace", "one_hot", "ones", "tensor", "zeros"])

# Norms of something else than their operand: of weights, or of earlier batches in evaluation.
OTHER_NORMS = ("batch_norm", "weight_norm")

_PASSED = MOVES | SELECTS | CASTS | {"dropout", "masked_fill", "neg"}
_OF_NUMBERS = frozenset(
    {"add", "sub", "rsub", "maximum", "minimum", "eq", "ne", "gt", "lt", "ge", "le"}
)


def names_of(steps: Iterable[Step]) -> set[str]:
    """The plain names of operations."""
    return {plain(step.kind) for step in steps}


def _is_by_number(step: Step) -> bool:
    """Whether an operation reads one tensor and Python numbers: ``x + 1e-6``."""
    return len(set(step.inputs)) == 1 and bool(step.literals)


def is_passed(step: Step) -> bool:
    """Whether an operation passes on its operand, possibly with a number added or a bound."""
    name = plain(step.kind)
    if not step.counts or step.kind in LIMITERS or name in _PASSED or step.kind in _PASSED:
        return True
    return name in _OF_NUMBERS and _is_by_number(step)


def _keeps_scale(step: Step) -> bool:
    """Whether its result has the scale of its operand: true for a residual, not for a norm."""
    return is_passed(step) or plain(step.kind) in ("add", "sub") or is_scaling(step)


def is_scaling(step: Step) -> bool:
    """Whether an operation multiplies or divides by a Python number."""
    return plain(step.kind) in ("mul", "div") and _is_by_number(step)


class Surroundings:
    """The graph around one blamed operation.

    Args:
        steps: operations in order of execution, of one batch.
        values: what they read and made.
        blame: the origin, made by an operation.
        intended: values that are infinite on purpose.
        features: inputs that are infinite, and not on purpose.
        made_before: gives the operation of an earlier batch, such as a model's, that made a value
            which this batch was given.
        range_of: gives the range of a value; None where it is not known.

    Attributes:
        step: the blamed operation.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        values: Sequence[Value],
        blame: Blame,
        intended: Collection[int] = (),
        features: Collection[int] = (),
        made_before: Callable[[int], Step | None] = lambda value: None,
        range_of: Callable[[int], Range | None] = lambda value: None,
    ) -> None:
        assert blame.step is not None
        self.step = steps[blame.step]
        self.values = values
        self.made = blame.value
        self.intended = intended
        self.features = features
        self.made_before = made_before
        self.range_of = range_of
        self.steps = steps

    @classmethod
    def of_nothing(cls, kind: str, dtype: str, source: Source | None = None) -> Surroundings:
        """The surroundings of an operation of which only the numbers are known.

        Args:
            kind: kind of the operation.
            dtype: dtype of its result.
            source: its line, if that is known.
        """
        value = Value(Role.MADE, "", dtype)
        return cls([Step(kind, "", (), (0,), source=source)], [value], Blame(0, 0, Severity.NAN))

    @cached_property
    def _maker(self) -> dict[int, Step]:
        return {value: step for step in self.steps for value in step.outputs}

    @cached_property
    def _readers(self) -> dict[int, list[Step]]:
        readers: dict[int, list[Step]] = {}
        for step in self.steps:
            for value in dict.fromkeys(step.inputs):
                readers.setdefault(value, []).append(step)
        return readers

    def behind(self, value: int) -> list[Step]:
        """The operations that computed a value, nearest first.

        The walk continues through operations that pass on their operand: casts, moves, selections,
        bounds, and added numbers.
        """
        return self._walk([value], self._made_by, lambda step: step.inputs, is_passed)

    def ahead(
        self, values: Iterable[int], passed: Callable[[Step], bool] = is_passed
    ) -> list[Step]:
        """The operations that read values, found in the same way, nearest first.

        Args:
            values: what they read.
            passed: the operations through which the walk continues.
        """
        return self._walk(values, self._read_by, lambda step: step.outputs, passed)

    def _made_by(self, value: int) -> list[Step]:
        return [self._maker[value]] if value in self._maker else []

    def _read_by(self, value: int) -> list[Step]:
        return self._readers.get(value, [])

    def maker_of(self, value: int) -> Step | None:
        """The operation that made a value; None if it was given."""
        return self._maker.get(value)

    def steps_of(self, kind: str) -> list[Step]:
        """All operations of a kind."""
        return [step for step in self.steps if step.kind == kind]

    def readers_of(self, value: int) -> list[Step]:
        """The operations that read a value."""
        return self._read_by(value)

    @staticmethod
    def _walk(
        values: Iterable[int],
        following: Callable[[int], list[Step]],
        values_of: Callable[[Step], Iterable[int]],
        passed: Callable[[Step], bool],
    ) -> list[Step]:
        found: list[Step] = []
        todo = list(values)
        seen: set[int] = set()
        while todo and len(found) < MOST_STEPS:
            value = todo.pop(0)
            if value in seen:
                continue
            seen.add(value)
            for step in following(value):
                if not any(step is each for each in found):
                    found.append(step)
                    if passed(step):
                        todo += values_of(step)
        return found

    def behind_all_of(self, values: Iterable[int]) -> list[Step]:
        """The operations that computed some values."""
        return [step for value in values for step in self.behind(value)]

    def behind_all(self, steps: Iterable[Step]) -> list[Step]:
        """The operations that computed the operands of others."""
        return [each for step in steps for value in step.inputs for each in self.behind(value)]

    def ahead_all(self, steps: Iterable[Step]) -> list[Step]:
        """The operations that read the results of others."""
        return [each for step in steps for each in self.ahead(step.outputs)]

    def alike(self) -> Iterator[Surroundings]:
        """These, and those of the same operation in other turns, whose operands may be known."""
        yield self
        source = self.step.source
        same = [
            step
            for step in self.steps
            if source is not None and (step.kind, step.source) == (self.step.kind, source)
        ]
        yield from map(self.of, [step for step in same if step is not self.step][:MOST_ALIKE])

    def of(self, step: Step) -> Surroundings:
        """Those of another operation."""
        index = next(i for i, each in enumerate(self.steps) if each is step)
        blame = Blame(step.outputs[0], index, Severity.NAN)
        return Surroundings(
            self.steps,
            self.values,
            blame,
            self.intended,
            self.features,
            self.made_before,
            self.range_of,
        )

    @property
    def culprit(self) -> int | None:
        """The operand that matters for poles and domains: the divisor, or the only one.

        Of a loss it is the one that is masked, or not finite. None if it is a number, or a tensor
        of integers.
        """
        inputs, name = self.step.inputs, plain(self.step.kind)
        if not inputs or (name == "div" and len(inputs) == 1 and not self.step.number_first):
            return None
        if name in LOSSES:
            bad = next(filter(self._is_bad, inputs), inputs[0])
            return next(filter(self.is_masked, inputs), bad)
        return inputs[-1] if name in ("div", "addcdiv", "xlogy") else inputs[0]

    @property
    def bad_operand(self) -> int | None:
        """The first operand that is not finite, if one before it is; None for the first of all."""
        inputs = self.step.inputs
        found = next(filter(self._is_bad, inputs), None)
        return None if found is None or found == inputs[0] else found

    def _is_bad(self, value: int) -> bool:
        found = self.range_of(value)
        return found is not None and not math.isfinite(found.abs_max)

    @property
    def culprit_made_by(self) -> list[Step]:
        """The operations that computed that operand."""
        return [] if self.culprit is None else self.behind(self.culprit)

    @property
    def culprit_roots(self) -> list[Step]:
        """The operations that computed it, also behind a root or a norm."""
        made_by = self.culprit_made_by
        roots = [step for step in made_by if plain(step.kind) in ROOTS]
        return [*made_by, *self.behind_all(roots)]

    @property
    def read_by(self) -> list[Step]:
        """The operations that read the result."""
        return self.ahead([self.made])

    def is_given(self, value: int) -> bool:
        """Whether a value was given to the model, and since at most moved, cast or compared.

        Constants that the model creates, such as ones, count as given.
        """
        behind = self.behind(value)
        roots = {value, *(each for step in behind for each in step.inputs)}
        created = (step for step in behind if not step.inputs and plain(step.kind) in CREATES)
        passed = (step for step in behind if is_passed(step))
        made = {each for step in (*passed, *created) for each in step.outputs}
        kept = (Role.INPUT, Role.BUFFER, Role.CONSTANT)
        return all(self.values[root].role in kept for root in roots - made)

    def is_differentiated(self, value: int) -> bool:
        """Whether a gradient flows to a value, or to what it was moved or cast from, if given."""
        roots = {value, *(each for step in self.behind(value) for each in step.inputs)}
        return any(self.values[root].needs_gradient for root in roots)

    def is_learned(self, value: int) -> bool:
        """Whether anything that a value was computed from needs a gradient, or is a weight."""
        todo, seen = [value], {value}
        while todo and len(seen) <= MOST_VALUES:
            each = todo.pop()
            found, step = self.values[each], self._maker.get(each)
            if found.needs_gradient or found.role is Role.WEIGHT:
                return True
            if step is None or step.kind.endswith("_like"):  # which reads a shape alone
                continue
            if step.kind == "requires_grad_":  # of torch.func as well
                return True
            new = [read for read in step.inputs if read not in seen]
            todo += new
            seen.update(new)
        return bool(todo)

    def is_masked(self, value: int) -> bool:
        """Whether a value holds an intended infinity, or one that was given to the model."""
        if value in self.intended:
            return True
        behind = self._walk([value], self._made_by, lambda step: step.inputs, _keeps_scale)
        if any(each in self.features for each in (value, *(v for s in behind for v in s.inputs))):
            return False
        return self.is_given(value) or any(step.infinite_literal for step in behind)

    def norm_ahead(self) -> Step | None:
        """The norm that removes any scale of the result: ``layer_norm``, ``rms_norm``."""
        for step in self.ahead([self.made], _keeps_scale):
            name = plain(step.kind)
            if name.endswith("_norm") and name in DEFAULT_EPS and name not in OTHER_NORMS:
                return step
            if name in ("pow", "square", "mul") and self.is_mean_square(step):
                return step
        return None

    def sums_ahead(self) -> list[Step]:
        """The sums that its result goes through; many of them are a residual stream."""
        steps = self.ahead([self.made], _keeps_scale)
        return [s for s in steps if plain(s.kind) in ("add", "sub") and not _is_by_number(s)]

    def is_mean_square(self, square: Step) -> bool:
        """Whether a square is averaged and a root taken of the mean: ``rsqrt(x.pow(2).mean())``."""
        means = [s for s in self.ahead(square.outputs) if plain(s.kind) in ("mean", "sum")]
        roots = [s for mean in means for s in self.ahead(mean.outputs)]
        return any(plain(step.kind) in ("rsqrt", "sqrt") for step in roots)
