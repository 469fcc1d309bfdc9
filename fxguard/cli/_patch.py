"""``fxguard run --patch FILE``: the fix as a change of the user's own file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fxguard.cli._ending import say
from fxguard.errors import FxguardError
from fxguard.patch.made import Patch, patch_of
from fxguard.patch.program_trial import MAY_WRITE, Program, run_patched
from fxguard.report.report import Report

__all__ = ["RunOfProgram", "write_patch"]


class RunOfProgram:
    """A run of a program.

    Args:
        module: of ``-m``; None for a script.
        words: the script, unless there is a module, and its arguments.
        options: of ``fxguard run``.
        began: when the run began, by the monotonic clock.
    """

    def __init__(
        self, module: str | None, words: Sequence[str], options: Sequence[str], began: float
    ) -> None:
        self.module, self.words, self.options = module, words, options
        self._began = began

    def ended(self) -> Program:
        """The program, with the time that it took until now."""
        return Program(self.module, self.words, self.options, time.monotonic() - self._began)


def write_patch(report: Report | None, file: Path, program: Program | None) -> None:
    """Write the patch of a run, and try it if that was asked for.

    Args:
        report: the last report of this process; None if it has none.
        file: where to write.
        program: to run with the patch; None to try nothing.
    """
    if report is None:
        say(f"nothing was found in this process, so nothing was written to {file}")
        return
    try:
        patch = patch_of(report)
        file.write_text(str(patch), encoding="utf-8", newline="")
    except (FxguardError, OSError) as error:
        say(f"{error}")
        return
    say(f"{patch.fix}: the patch is in {file}; patch -p1 < {file}")
    say(patch.was_tried)
    if program is not None:
        _try(patch, program)


def _try(patch: Patch, program: Program) -> None:
    say(f"the program runs again with the patch: {MAY_WRITE}")
    try:
        say(run_patched(program, patch.file, patch.new))
    except FxguardError as error:
        say(f"the patch was not tried: {error}")
