"""Masks are known by their use: what a softmax turns into zeros is a mask, whoever made it.

An infinity that is on its way to a linear layer is none, though somebody gave it to the model.
Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from fxguard.batch.dataflow import DataFlow
from fxguard.graph.poles import SOFTMAXES, plain
from fxguard.graph.tables import ADDITIONS, CASTS, LIMITERS, LOSSES, MOVES, RANDOM, SELECTS
from fxguard.measure.details import Detail
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step
from fxguard.records import Role, Severity
from fxguard.verdict.origins import Verdict

__all__ = ["emptied_rows", "features", "made_masks", "summed_masks"]

# Where -inf becomes 0.
ENDS = SOFTMAXES | {"exp", "exp2", "sigmoid"}

# These make -inf of finite numbers that are exact.
AT_POLES = frozenset(["div", "log", "log10", "log1p", "log2", "logit", "reciprocal"])

_SCALED = frozenset(["div", "div_", "dropout", "mul", "mul_"])
_CHOSEN = frozenset(["amax", "amin", "max", "maximum", "min", "minimum"])
_MASKED = frozenset(["masked_fill", "masked_fill_", "setitem", "where"])
# These make logarithms of probabilities, of which a sum is -inf where one of them is.
LOGARITHMS = frozenset(
    [
        *("lgamma", "log", "log1p", "log_ndtr", "log_sigmoid", "log_softmax", "logsigmoid"),
        *("logsumexp", "special_xlogy", "xlogy"),
    ]
)
_ARITHMETIC = frozenset(["add", "div", "mul", "neg", "rsub", "sub", "where"])
_TOTALS = frozenset(["mean", "nanmean", "nansum", "sum"])
MOST_STEPS = 64  # in one walk

# A mask passes these on its way.
PASSED = MOVES | SELECTS | CASTS | LIMITERS | ADDITIONS | _SCALED | _CHOSEN | _MASKED


def made_masks(
    flow: DataFlow, verdict: Verdict, detail: Callable[[Blame], Detail | None]
) -> set[int]:
    """Origins that are masks: ``torch.log(torch.tril(ones))``, ``(1 - mask) * -1e9`` in float16.

    They hold -inf alone, depend on no weight and on nothing drawn, and end in softmaxes. A number
    that overflowed is what to blame for a row that it masks entirely; a logarithm of 0 is not.

    Args:
        flow: the data flow of a batch.
        verdict: its verdict.
        detail: gives the details of a blamed tensor.
    """
    use = _Use(flow)
    found: dict[Blame, Step] = {}
    for blame in verdict.origins:
        if blame.step is None or blame.severity is not Severity.INF:
            continue
        if not use.is_free(blame.step) or not use.is_of_mask(blame.value):
            continue
        seen = detail(blame)
        if seen is not None and seen.neginf_count and not (seen.posinf_count or seen.nan_count):
            found[blame] = flow.steps[blame.step]
    others = (blame for blame in verdict.origins if blame not in found)
    if any(found.keys().isdisjoint(_behind(flow, verdict, blame)) for blame in others):
        return {blame.value for blame in found}
    return {blame.value for blame, step in found.items() if plain(step.kind) in AT_POLES}


def summed_masks(
    flow: DataFlow, verdict: Verdict, detail: Callable[[Blame], Detail | None]
) -> set[int]:
    """Sums of logarithms that are -inf because one of them is on purpose.

    A product of probabilities is 0 where one of them is. They hold -inf alone, and end where that
    becomes 0.

    Args:
        flow: the data flow of a batch.
        verdict: its verdict.
        detail: gives the details of a blamed tensor.
    """
    use = _Use(flow)
    found: set[int] = set()
    for blame in verdict.origins:
        step = None if blame.step is None else flow.steps[blame.step]
        if step is None or plain(step.kind) != "sum" or blame.severity is not Severity.INF:
            continue
        if not verdict.intended.issuperset(step.inputs) or not use.is_of_mask(blame.value):
            continue
        seen = detail(blame) if use.is_of_logarithms(step) else None
        if seen is not None and seen.neginf_count and not (seen.posinf_count or seen.nan_count):
            found.add(blame.value)
    return found


def emptied_rows(
    flow: DataFlow,
    verdict: Verdict,
    detail: Callable[[Blame], Detail | None],
    *,
    returned: bool = False,
) -> set[int]:
    """What ``logsumexp`` made of rows of -inf alone, if a mean or a sum of it is an origin.

    Args:
        flow: the data flow of a batch.
        verdict: its verdict.
        detail: gives the details of a tensor; it is left out where nobody has looked at it.
        returned: whether the same of what left the model counts.
    """
    use = _Use(flow)
    read = list(flow.reached) if returned else []
    for blame in verdict.origins:
        step = None if blame.step is None else flow.steps[blame.step]
        if step is not None and plain(step.kind) in _TOTALS:
            read += step.inputs
    found = use.emptied_of([value for value in read if value in verdict.intended])
    return {
        value
        for value in found & verdict.intended
        if detail(Blame(value, use.maker[value], Severity.INF)) is not None
    }


def _behind(flow: DataFlow, verdict: Verdict, blame: Blame) -> Iterator[Blame]:
    """The origins from which another one was made."""
    for value in () if blame.step is None else flow.steps[blame.step].inputs:
        yield from verdict.sources.get(value, ())


def features(flow: DataFlow, verdict: Verdict) -> set[int]:
    """Inputs whose -inf is no mask: an operation mixed them, and no softmax reads them.

    Args:
        flow: the data flow of a batch.
        verdict: its verdict.
    """
    use = _Use(flow)
    found: set[int] = set()
    for blame in verdict.origins:
        step = None if blame.step is None else flow.steps[blame.step]
        if step is None or step.kind in LOSSES or plain(step.kind) in SOFTMAXES:
            continue
        roots = use.inputs_alone(step, verdict.intended)
        ends = SOFTMAXES if use.is_of_loss(step) else ENDS  # exp(k * log(t)) is no softmax
        is_masked = any(use.is_of_mask(root, at_all=True, ends=ends) for root in roots)
        if not is_masked and not use.is_of_mask(blame.value, at_all=True):
            found |= roots
    return found


class _Use:
    """How the values of a batch are made and used."""

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow
        self.maker = {value: i for i, step in enumerate(flow.steps) for value in step.outputs}
        self.left = set(flow.reached)
        self.readers: dict[int, list[Step]] = {}
        for step in flow.steps:
            for value in dict.fromkeys(step.inputs):
                self.readers.setdefault(value, []).append(step)

    def is_of_mask(self, value: int, *, at_all: bool = False, ends: Collection[str] = ENDS) -> bool:
        """Whether all that reads a value, directly or passed on, is a softmax or the like.

        Args:
            value: the value.
            at_all: whether one such reader is enough.
            ends: those readers.
        """
        todo, seen, count, others = [value], {value}, 0, value in self.left
        while todo:
            for step in self.readers.get(todo.pop(), ()):
                if plain(step.kind) in ends:
                    count += 1
                elif not step.counts or step.kind in PASSED:
                    new = [v for v in step.outputs if v not in seen]
                    others = others or not self.left.isdisjoint(new)
                    seen.update(new)
                    todo += new
                else:
                    others = True
        return bool(count) and (at_all or not others)

    def is_of_logarithms(self, step: Step) -> bool:
        """Whether what an operation reads was computed of logarithms, elementwise."""
        todo, seen = list(step.inputs), set(step.inputs)
        while todo and len(seen) <= MOST_STEPS:
            index = self.maker.get(todo.pop(0))
            maker = None if index is None else self.flow.steps[index]
            if maker is None:
                continue
            name = plain(maker.kind)
            if name in LOGARITHMS:
                return True
            if not maker.counts or name in _ARITHMETIC or maker.kind in PASSED:
                todo += [value for value in maker.inputs if value not in seen]
                seen.update(maker.inputs)
        return False

    def emptied_of(self, values: Collection[int]) -> set[int]:
        """The results of ``logsumexp`` that these values are, at most passed on."""
        todo, seen, found = list(values), set(values), set[int]()
        while todo and len(seen) <= MOST_STEPS:
            value = todo.pop(0)
            index = self.maker.get(value)
            step = None if index is None else self.flow.steps[index]
            if step is None:
                continue
            if plain(step.kind) == "logsumexp":
                found.add(value)
            elif not step.counts or step.kind in PASSED or plain(step.kind) == "neg":
                todo += [each for each in step.inputs if each not in seen]
                seen.update(step.inputs)
        return found

    def is_of_loss(self, step: Step) -> bool:
        """Whether an operation is computed from what a model returned to a loss."""
        behind = [self.maker[value] for value in step.inputs if value in self.maker]
        read = {v for i in behind for j in self._behind(i) for v in self.flow.steps[j].inputs}
        return any(self._is_returned(value) for value in (*step.inputs, *read))

    def _is_returned(self, value: int) -> bool:
        found = self.flow.values[value]
        return found.role is Role.INPUT and found.needs_gradient

    def is_free(self, step: int) -> bool:
        """Whether the result of an operation depends on no weight and on nothing drawn."""
        behind = list(self._behind(step))
        if any(self.flow.steps[index].kind in RANDOM for index in behind):
            return False
        read = (value for index in behind for value in self.flow.steps[index].inputs)
        return all(self.flow.values[value].role is not Role.WEIGHT for value in read)

    def inputs_alone(self, step: Step, intended: Collection[int]) -> set[int]:
        """The inputs of the model that an operation's infinite operands are, at most passed on.

        On the way they may meet weights and numbers, but no other data of the batch, except in a
        loss: there they meet what a model returned, and targets. An empty set if they do, or if
        the infinity is a number of the program.
        """
        found: set[int] = set()
        todo = [value for value in dict.fromkeys(step.inputs) if value in intended]
        others = [value for value in step.inputs if value not in intended]
        seen = set(todo)
        while todo:
            value = todo.pop()
            if self.flow.values[value].role is Role.INPUT:
                found.add(value)
                continue
            index = self.maker.get(value)
            if index is None or self.flow.steps[index].infinite_literal:
                return set()  # a buffer, a constant, or a number
            maker = self.flow.steps[index]
            bad = [v for v in maker.inputs if v in intended]
            others += [v for v in maker.inputs if v not in intended]
            todo += [v for v in bad if v not in seen]
            seen.update(bad)
        if self.is_of_loss(step) or all(self._is_of(value, found) for value in others):
            return found
        return set()

    def _is_of(self, value: int, inputs: Collection[int]) -> bool:
        """Whether a value is a weight or a number, or made of some inputs and of those."""
        role = self.flow.values[value].role
        if role is not Role.MADE:
            return role is not Role.INPUT or value in inputs
        index = self.maker.get(value)
        if index is None:
            return False
        read = [self.flow.steps[i] for i in self._behind(index)]
        roots = [v for each in read for v in each.inputs if v not in self.maker]
        return all(
            v in inputs or self.flow.values[v].role in (Role.BUFFER, Role.CONSTANT) for v in roots
        )

    def _behind(self, step: int) -> Iterator[int]:
        """An operation, and all that computed what it read."""
        todo, seen = [step], {step}
        while todo:
            index = todo.pop()
            yield index
            for value in self.flow.steps[index].inputs:
                maker = self.maker.get(value)
                if maker is not None and maker not in seen:
                    seen.add(maker)
                    todo.append(maker)
