"""Distributions check their arguments as in plain Python, although TorchDynamo is in use.

The first ``torch.compile`` of a process turns the checks of ``torch.distributions`` off for all of
it. What nobody compiles must raise what it raises in plain Python. Only inside a captured graph no
check is made: each would end the graph, to read whether all is well.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``eval_frame.TorchPatcher.patch`` turns the checks off. Without it they stay off from the first
  capture on.
- What :mod:`~fxguard.capture.decisions` uses of jumps. Without it a distribution ends the graph
  that it is in.
"""

from __future__ import annotations

import contextlib
import functools
import os.path
import threading
from collections.abc import Iterator
from typing import Any

from torch._dynamo.eval_frame import TorchPatcher
from torch._dynamo.variables.constant import ConstantVariable
from torch.distributions import Distribution, distribution

from fxguard.capture.decisions import Jump, wrap_jumps
from fxguard.capture.plain_python import follows_python

__all__ = ["own_compilation"]

FOLDER = os.path.dirname(distribution.__file__) + os.sep


class _Here(threading.local):
    is_own = False  # whether the compilation that begins is fxguard's, and not the user's


_here = _Here()


@contextlib.contextmanager
def own_compilation() -> Iterator[None]:
    """A block in which ``torch.compile`` is called for a capture that nobody asked for."""
    _tell_apart()
    before, _here.is_own = _here.is_own, True
    try:
        yield
    finally:
        _here.is_own = before


@functools.cache
def _tell_apart() -> None:
    patch = TorchPatcher.patch

    @functools.cache
    def of_the_user() -> None:
        Distribution.set_default_validate_args(False)

    def stand_in() -> None:
        if not _here.is_own:
            patch()
            of_the_user()
            return
        before = Distribution._validate_args
        patch()
        Distribution.set_default_validate_args(before)

    if not Distribution._validate_args:  # somebody has compiled, or does not want them
        of_the_user()
    patcher: Any = TorchPatcher
    patcher.patch = staticmethod(stand_in)
    wrap_jumps(_without_checks)


def _without_checks(jump: Jump) -> Jump:
    """What traces a jump, with no in answer to whether a distribution checks its arguments."""

    def jump_as_told(tx: Any, instruction: Any) -> None:
        if tx.f_code.co_filename.startswith(FOLDER) and follows_python(tx):
            at = tx.indexof[instruction]
            if any(each.argval == "_validate_args" for each in tx.instructions[at - 2 : at]):
                tx.stack[-1] = ConstantVariable.create(False)
        jump(tx, instruction)

    return jump_as_told
