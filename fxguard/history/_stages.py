"""The guarded objects of a process whose histories are in one folder, or inside it.

A script that resumes in one process builds its model anew. Then the new object goes on with the run
of the one before, whose training had ended by then. Other models get a folder inside.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import Module

from fxguard.graph.nodes import class_name
from fxguard.history._run import Run

__all__ = ["Stage"]

_Form = tuple[str, dict[str, torch.Size]]  # the class, and the shapes of the weights

_stages: weakref.WeakSet[Stage] = weakref.WeakSet()  # that have not ended
_moments = itertools.count(1)  # when models were guarded, and called with gradients


class Stage:
    """One guarded object of a model, as long as its history is kept.

    Args:
        asked: the folder that the user has named.
        end_step: writes the row of the step that is over, before another object goes on.

    Attributes:
        run: its own; None before its first step has ended.
    """

    def __init__(self, asked: str | os.PathLike[str], end_step: Callable[[], object]) -> None:
        self.asked = Path(asked)
        self.run: Run | None = None
        self._end_step = end_step
        self._form: _Form = "", {}
        self._made, self._last_call = next(_moments), 0
        self._has_handed_over = False
        _stages.add(self)

    @property
    def has_run(self) -> bool:
        """Whether it was called with gradients: parts of a model that run inside it never are."""
        return self._last_call > 0

    def called(self, model: Module | None) -> None:
        """Hear that the model is called with gradients."""
        if not self.has_run:
            self._form = _form_of(model)
        self._last_call = next(_moments)

    def folder(self, name: str) -> Path:
        """Where its run is kept: the run of the object before ends, if it goes on with that.

        Args:
            name: of the model, for a folder inside the one that was asked for.
        """
        before = self._before()
        return self._free_folder(name) if before is None else before._hand_over()

    def end(self) -> None:
        """End the run and its files."""
        _stages.discard(self)
        if self.run is not None:
            self.run.close()

    def _before(self) -> Stage | None:
        """The object whose run this one goes on with."""
        alike = (
            each
            for each in _stages
            if each.run is not None
            and not self._has_handed_over
            and each.asked == self.asked
            and _goes_on(each._form, self._form)
            and each._last_call < self._made
        )
        return max(alike, key=lambda each: each._last_call, default=None)

    def _hand_over(self) -> Path:
        assert self.run is not None
        self._end_step()
        self.run.close()
        folder, self.run, self._has_handed_over = self.run.folder, None, True
        return folder

    def _free_folder(self, name: str) -> Path:
        """The folder that was asked for; one inside it while another model has it."""
        taken = {each.run.folder for each in _stages if each.run is not None}
        inside = (self.asked / (f"{name} {n}" if n > 1 else name) for n in itertools.count(1))
        return next(
            folder for folder in itertools.chain((self.asked,), inside) if folder not in taken
        )


def _form_of(model: Module | None) -> _Form:
    weights = () if model is None else model.named_parameters()
    return class_name(type(model)), {name: x.shape for name, x in weights}


def _goes_on(before: _Form, after: _Form) -> bool:
    """Whether an object is of the same model as one before.

    A few weights may have other shapes, and others may have been added, as where a network grows.
    """
    (name, weights), (other_name, others) = before, after
    same = sum(others.get(key) == shape for key, shape in weights.items())
    return name == other_name and 2 * same > len(weights)
