"""A model that is asked: its output for its own inputs and for others, and what leaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.dependence._because import Reasons
from fxguard.dependence._change import changed, limit_for
from fxguard.dependence._inputs import Inputs
from fxguard.dependence._path import Leak, leak_between, leak_of_length
from fxguard.dependence._places import Places
from fxguard.dependence._recording import Recorder, Recording
from fxguard.forgiving import theirs
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import is_float
from fxguard.in_dtype.trials import Trials
from fxguard.report.dependencies import Dependence, Question

__all__ = ["Asked", "NotRepeatable"]


class NotRepeatable(Exception):  # noqa: N818 - an answer
    """Two runs on the same inputs differ."""


class Asked:
    """A model, with its output for its own inputs.

    Args:
        trials: runs it.
        inputs: its inputs.

    Attributes:
        output: the tensors that it returns for them.
        why_not: why it gave nothing to compare for other inputs, the last time.

    Raises:
        NotRepeatable: when two runs differ.
    """

    def __init__(self, trials: Trials, inputs: Inputs) -> None:
        self.trials, self.inputs = trials, inputs
        self.why_not = "the inputs have no other contents"
        self._fresh = False  # whether each run needs a copy of its own: it keeps more than buffers
        self._limit: float | None = None
        self.output = self._run(inputs.tensors)
        if self._differs(self._run(inputs.tensors)):
            self._fresh = True
            self.output = self._run(inputs.tensors)
            if self._differs(self._run(inputs.tensors)):
                raise NotRepeatable

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        given = self.inputs.rebuilt(tensors)
        output = self.trials.on(given).returned() if self._fresh else self.trials.returned(given)
        return [x.detach() for x in trees.tree_leaves(output) if isinstance(x, Tensor)]

    def _differs(self, other: Sequence[Tensor]) -> bool:
        pairs = zip(self.output, other, strict=True)
        return any(each is None or bool(each.any()) for each in (changed(x, y) for x, y in pairs))

    def output_for(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """What the model returns for other inputs; None if it refuses them."""
        try:
            output = self._run(tensors)
        except theirs() as error:  # the model may refuse them
            self.why_not = f"the model does not run with other inputs: {_first_line(error)}"
            return None
        if len(output) != len(self.output):
            self.why_not = "the model returns something else for other inputs"
            return None
        return output

    def draws(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the output is another one with other random numbers."""
        first = self.output_for(tensors)
        with random_state_kept(tensors):
            for device in {x.device for x in (*tensors, *self.output)}:
                torch.rand(1, device=device)
            second = self.output_for(tensors)
        if first is None or second is None:
            return False
        return any(not torch.equal(x, y) for x, y in zip(first, second, strict=True))

    @property
    def limit_of_length(self) -> float:
        """The relative change that roundings make in runs of another length."""
        if self._limit is None:
            made = [x.tensor for x in self._recorded(self.inputs.tensors).values if x.step]
            dtypes = [x.dtype for x in (*made, *self.output) if is_float(x)]
            self._limit = limit_for(max(dtypes, key=lambda x: torch.finfo(x).eps))
        return self._limit

    def found(
        self,
        question: Question,
        evidence: str,
        tensors: Sequence[Tensor],
        places: Places,
        own: Sequence[Tensor] | None = None,
    ) -> Dependence:
        """The answer yes, with the leak between the runs on its own inputs and on others.

        Args:
            question: which one.
            evidence: what was replaced, and what changed.
            tensors: the other inputs.
            places: where changes belong.
            own: what they are compared with; its own inputs by default.
        """

        def leak() -> Leak | str:
            one = self._recorded(self.inputs.tensors if own is None else own)
            two = self._recorded(tensors)
            return leak_between(one, two, places, self._reasons(one, question))

        return _answer(question, evidence, leak)

    def found_by_length(
        self,
        evidence: str,
        long: Sequence[Tensor],
        short: Sequence[Tensor],
        cut: Callable[[Tensor, Tensor], Tensor | None],
    ) -> Dependence:
        """The same for padding, with the leak between runs with it and without it.

        Args:
            evidence: what changed.
            long: the inputs with padding.
            short: those without.
            cut: gives what of a tensor with padding corresponds to one without.
        """

        def leak() -> Leak | str:
            one, two = self._recorded(long), self._recorded(short)
            reasons = self._reasons(one, "padding")
            return leak_of_length(one, two, cut, self.limit_of_length, reasons)

        return _answer("padding", evidence, leak)

    def _recorded(self, tensors: Sequence[Tensor]) -> Recording:
        """A run with all its values."""
        given = self.inputs.rebuilt(tensors)
        trials = self.trials.on(given) if self._fresh else self.trials
        recorders = list[Recorder]()

        def seen_by(started: Any) -> Recorder:
            own = [x for x in trees.tree_leaves(started) if isinstance(x, Tensor)]
            recorders.append(Recorder(trials.low, list(zip(own, self.inputs.names, strict=True))))
            return recorders[0]

        try:
            output = trials.returned(given, seen_by)
            return recorders[0].of(output)
        finally:
            for recorder in recorders:
                recorder.end()

    def _reasons(self, recording: Recording, question: Question) -> Reasons:
        inputs = self.inputs
        data = {name for i, name in enumerate(inputs.names) if inputs.is_data(i)}
        return Reasons(
            self.trials.low,
            recording.values,
            data.__contains__,
            hides=question != "samples",
        )


def _answer(question: Question, evidence: str, leak: Callable[[], Leak | str]) -> Dependence:
    found: Leak | str
    try:
        found = leak()
    except theirs() as error:  # no memory for all values of a run
        found = _first_line(error)
    if isinstance(found, str):
        return Dependence(question, True, evidence, why_no_path=found)
    path, others = found.path, found.others
    return Dependence(question, True, evidence, found.step, found.because, path, others)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
