"""Makes the patch of a report, or says why there is none."""

from __future__ import annotations

import ast
import linecache
import os
import sysconfig
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path

from fxguard.errors import InternalError, UsageError
from fxguard.findings import Fix, Origin
from fxguard.graph.evidence import Evidence
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS
from fxguard.patch._definitions import Definitions
from fxguard.patch._operations import Imports
from fxguard.patch._rewriting import Refused, Rewriter
from fxguard.patch._text import FileText, changed, unified
from fxguard.records import Source
from fxguard.report.report import Report
from fxguard.source.frame_variables import is_of_library
from fxguard.source.lines import is_internal
from fxguard.source.running_code import STARTED, RunningCode, is_still

__all__ = ["Patch", "Patcher", "patch_of"]

STDLIB = sysconfig.get_path("stdlib") + os.sep
MOST_LINES = 6  # that a patch changes
NOT_RUN = "the same function and gradient in exact arithmetic; it was not run"
ON_BATCH = "tried on this batch, which was run with it"


@dataclass(frozen=True)
class Patch:
    """A change of one file. ``str(patch)`` is the diff, below what it was tried on."""

    fix: Fix
    was_tried: str  # "tried on the numbers of the first bad element: it is 1 there"
    file: str
    new: str  # the whole text of the file
    diff: str

    def __str__(self) -> str:
        return f"fix: {self.fix}\n{self.was_tried}\n{self.diff}"


def patch_of(report: Report) -> Patch:
    """The patch of a report.

    Raises:
        FxguardError: why there is none.
    """
    if isinstance(report.patcher, Patcher):
        return report.patcher.made(report)
    report.patch()  # which raises
    raise InternalError("a report has another patcher")


@dataclass(frozen=True)
class Patcher:
    """Makes patches of one report.

    Args:
        evidence: the blamed operation at the first bad element, if it is known.
        codes: the functions that hold the lines to change, as Python has loaded them.
    """

    evidence: Evidence | None
    codes: tuple[RunningCode, ...] = ()

    def __call__(self, report: Report) -> str:
        """The text of the patch."""
        return str(self.made(report))

    def made(self, report: Report) -> Patch:
        """The patch of the report.

        Raises:
            FxguardError: why there is none.
        """
        try:
            return self._patch(report)
        except Refused as reason:
            raise UsageError(f"no patch: {reason}") from None

    def _patch(self, report: Report) -> Patch:
        if report.grown or not report.origins:
            raise Refused("the fix is not in an expression of the program")
        origin = report.origins[0]
        fixes = [fix for fix in origin.fixes if fix.rewrites]
        if not fixes:
            told = f": {origin.fixes[0].text}" if origin.fixes else ""
            raise Refused(f"the fix does not rewrite one expression{told}")
        reasons = list[str]()
        for fix in fixes:
            source = fix.at or origin.frame.source
            if source is None:
                raise Refused("the line of the operation is not known")
            text = self._text(source)
            try:
                return self._of_fix(fix, origin, source, text)
            except Refused as reason:
                reasons.append(str(reason))
        raise Refused(reasons[0])

    def _expect_half(self, origin: Origin) -> None:
        """A trial in float32 has looked at values, and not at gradients."""
        operands = () if self.evidence is None else self.evidence.operands
        dtypes = {each.dtype for each in operands if each.dtype}
        if origin.what in CASTS or dtypes != {origin.dtype}:
            raise Refused("a cast failed, and not what it casts")
        if origin.cause != "overflow":
            raise Refused("its gradient was not tried, and may be too large")

    @property
    def _has_only_tensors(self) -> bool:
        """Whether the failing operation read tensors of one dtype, and no Python number."""
        operands = () if self.evidence is None else self.evidence.operands
        return len({each.dtype for each in operands}) == 1 and bool(operands[0].dtype)

    def _text(self, source: Source) -> FileText:
        """The user's file, which still is the one that ran."""
        if is_internal(source.file) or not os.path.isfile(source.file):
            raise Refused(f"{source.file} is no file that could be changed")
        if is_of_library(source.file) or source.file.startswith(STDLIB):
            raise Refused(f"{source.place} is the code of a library, not yours")
        try:
            with tokenize.open(source.file) as file:
                encoding = file.encoding
            text = FileText(Path(source.file).read_bytes().decode(encoding))
            ast.parse(text.text)
        except (OSError, SyntaxError, UnicodeDecodeError, ValueError) as error:
            raise Refused(f"{source.file} cannot be read: {error}") from None
        is_line = text.line(source.line) == source.code.strip() or not source.code
        known = [code for code in self.codes if code.file == source.file]
        is_old = bool(known) or os.stat(source.file).st_mtime < STARTED
        if not (is_line and is_old and all(is_still(code, text.text) for code in known)):
            raise Refused(f"{source.file} was changed since it was run")
        linecache.checkcache(source.file)
        return text

    def _of_fix(self, fix: Fix, origin: Origin, source: Source, text: FileText) -> Patch:
        from fxguard.patch._trial import can_be_tried, is_pure, tried

        tree = ast.parse(text.text)
        rewriter = Rewriter(text, Definitions(source.file, tree), Imports.of(tree), is_pure)
        operation = fix.of or plain(origin.what)
        if fix.kind == "tried":
            self._expect_half(origin)
        for rule in fix.rewrites:
            changes = rewriter.changes(
                rule, operation, source.line, both_tensors=self._has_only_tensors
            )
            if changes is None:
                continue
            was_tried = ON_BATCH if fix.kind == "tried" else NOT_RUN
            if fix.kind == "advice" or can_be_tried(rule, self.evidence):
                in_step = origin.phase == "optimizer"
                was_tried = tried(rule, self.evidence, in_step=in_step)
            new = changed(text, changes)
            if new is None:
                raise Refused("a comment or a layout in the expression would be lost")
            return _checked(Patch(fix, was_tried, source.file, new, ""), text.text)
        raise Refused(f"the line does not write {' or '.join(map(_old, fix.rewrites))} itself")


def _checked(patch: Patch, old: str) -> Patch:
    """The patch with its diff, if it is short, and Python can read what it makes."""
    compile(patch.new, patch.file, "exec", dont_inherit=True)
    diff = unified(old, patch.new, _name(patch.file))
    count = sum(line.startswith(("+", "-")) for line in diff.splitlines()) - 2
    if count > 2 * MOST_LINES:
        raise Refused(f"it would change {count} lines")
    return replace(patch, diff=diff)


def _old(rule: str) -> str:
    return rule.partition(" -> ")[0]


def _name(file: str) -> str:
    """The path as a diff has it: relative where it is below the working directory."""
    try:
        return Path(os.path.realpath(file)).relative_to(os.path.realpath(os.curdir)).as_posix()
    except ValueError:
        return file
