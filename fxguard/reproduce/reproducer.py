"""Keeps a failing operation with its operands, to be written as a test on request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxguard.errors import UsageError
from fxguard.graph.collectives import none_issued_by
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.wide_form import NotJudged, is_float
from fxguard.reproduce._as_test import operands_of, text_of
from fxguard.reproduce._drawn import drawn_like
from fxguard.reproduce.shrinking import Sameness, Shrinker, size_of

__all__ = ["KeptOperation", "NotKept", "kept"]

MOST_BYTES = 64 * 2**20  # of copied operands

WHOLE = "the operands that the operation had, as they were."
REAL = (
    "the operands that the operation had: the smallest slice, and the simplest numbers, that were "
    "found to fail in the same way."
)
DRAWN = (
    "random numbers of the ranges that the operands had, and none of the model's: as few and as "
    "simple as were found to fail in the same way."
)


def kept(operation: OneOperation, sameness: Sameness, problem: str) -> KeptOperation:
    """Keep a failing operation: slice its operands, then copy them to the CPU.

    Args:
        operation: an operation that has just failed; its operands are unwritten since.
        sameness: the identity of its failure, which has to stay the same.
        problem: what it made, "inf" or "nan".

    Raises:
        NotJudged: when it does not fail by itself or cannot be kept, with the reason.
    """
    for x in operation.tensors:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
            raise NotJudged(f"an operand is a {type(x).__name__} of layout {x.layout}")
    with none_issued_by(operation.target):
        return _kept(operation, sameness, problem)


def _kept(operation: OneOperation, sameness: Sameness, problem: str) -> KeptOperation:
    if operation.is_compiled:
        return _kept_whole(operation, sameness, problem)
    shrinker = Shrinker(operation, sameness)
    if not shrinker.fails:
        raise NotJudged(f"by itself {operation.kind} does not fail")
    if size_of(operation) > MOST_BYTES:
        # An index out of range ends a CUDA process, so indexed tensors are not sliced.
        if not (any(x.is_cuda for x in operation.tensors) and _has_indices(operation)):
            shrinker.cut(MOST_BYTES)
        if size_of(shrinker.operation) > MOST_BYTES:
            raise NotJudged("its operands have more than 64 MB, and could not be cut")
    device, cut = operation.device, shrinker.operation
    copied = cut.with_tensors([x.detach().cpu().clone() for x in cut.tensors])
    if device != "cpu" and Shrinker(copied, sameness).failure == shrinker.failure:
        device = "cpu"
    return KeptOperation(copied, sameness, problem, device)


def _kept_whole(operation: OneOperation, sameness: Sameness, problem: str) -> KeptOperation:
    """Keep an operation that fails when compiled; slicing would need a compilation per try."""
    if size_of(operation) > MOST_BYTES:
        raise NotJudged("its operands have more than 64 MB")
    copied = operation.with_tensors([x.detach().cpu().clone() for x in operation.tensors])
    return KeptOperation(copied, sameness, problem, operation.device)


def _has_indices(operation: OneOperation) -> bool:
    return any(not is_float(x) and x.dtype is not torch.bool for x in operation.tensors)


@dataclass(frozen=True, slots=True)
class NotKept:
    """Why there is no reproducer."""

    reason: str

    def __call__(self, folder: Any, story: Sequence[str], *, ranges_only: bool = False) -> Path:
        raise UsageError(self.reason)


class KeptOperation:
    """An operation that can be written as a test.

    Args:
        operation: the operation, with operands on the CPU.
        sameness: the identity of its failure, which has to stay the same.
        problem: what it makes, "inf" or "nan".
        device: the device where it fails.
    """

    def __init__(
        self,
        operation: OneOperation,
        sameness: Sameness,
        problem: str,
        device: str = "cpu",
    ) -> None:
        self.operation = operation
        self.sameness = sameness
        self.problem = problem
        self.device = device

    def __reduce__(self) -> Any:
        """Drop the tensors when a report is copied or sent."""
        return NotKept, ("the operands of this report are in the process that made it",)

    def __call__(
        self, folder: str | os.PathLike[str], story: Sequence[str], *, ranges_only: bool = False
    ) -> Path:
        """Write the test and its operands, and run it in a separate process.

        Args:
            folder: where to write; created if needed. Existing files are kept.
            story: the report, as lines.
            ranges_only: whether to write random numbers of the same ranges instead of the operands.

        Returns:
            The path of the test.

        Raises:
            FxguardError: when the operation cannot be written, or the test did not fail.
            OSError: when the folder cannot be written.
        """
        try:
            operation = self._smallest(ranges_only)
            with tempfile.TemporaryDirectory() as scratch:
                return self._written(operation, Path(scratch), Path(folder), story, ranges_only)
        except NotJudged as reason:
            raise UsageError(f"no reproducer: {reason}") from reason

    def _smallest(self, ranges_only: bool) -> OneOperation:
        if self.operation.is_compiled:
            if ranges_only:
                raise NotJudged("numbers are not drawn for what fails in its compiled form only")
            return self.operation
        start = self._on_device(self.operation)
        wanted = Shrinker(start, self.sameness).failure
        if ranges_only:
            for drawn in drawn_like(self.operation):
                shrinker = Shrinker(self._on_device(drawn), self.sameness)
                if shrinker.failure == wanted:
                    break
            else:
                raise NotJudged("random numbers of the same ranges do not fail in the same way")
        else:
            shrinker = Shrinker(start, self.sameness)
        shrinker.shrink()
        found = shrinker.operation
        return found.with_tensors([x.cpu().contiguous().clone() for x in found.tensors])

    def _what_it_holds(self, ranges_only: bool) -> str:
        if self.operation.is_compiled:
            return WHOLE
        return DRAWN if ranges_only else REAL

    def _on_device(self, operation: OneOperation) -> OneOperation:
        if self.device == "cpu":
            return operation
        return operation.with_tensors([x.to(self.device) for x in operation.tensors])

    def _written(
        self,
        operation: OneOperation,
        scratch: Path,
        folder: Path,
        story: Sequence[str],
        ranges_only: bool,
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        stem = _free_name(folder, re.sub(r"\W", "_", operation.kind).strip("_") or "operation")
        text = text_of(
            operation,
            name=f"test_{stem}",
            file=f"{stem}.pt",
            story=story,
            origin=self._what_it_holds(ranges_only),
            problem="NaN" if self.problem == "nan" else "inf",
            device=self.device,
        )
        (scratch / f"test_{stem}.py").write_text(text, encoding="utf-8")
        torch.save(operands_of(operation), scratch / f"{stem}.pt")
        expect_failure(scratch / f"test_{stem}.py")
        for name in (f"{stem}.pt", f"test_{stem}.py"):
            (folder / name).write_bytes((scratch / name).read_bytes())
        return folder / f"test_{stem}.py"


def _free_name(folder: Path, stem: str) -> str:
    """The name itself, or with a number if a test with that name exists."""
    names = (stem, *(f"{stem}_{number}" for number in range(2, 10_000)))
    return next(name for name in names if not (folder / f"test_{name}.py").exists())


FAILED = 41  # an exit status that no interpreter uses by itself

RUNNER = f"""
import runpy, sys
names = runpy.run_path(sys.argv[1])
[test] = [value for name, value in names.items() if name.startswith("test_")]
try:
    test()
except AssertionError:
    sys.exit({FAILED})
"""

MOST_SECONDS = 300


def expect_failure(path: Path) -> None:
    """Run a test in a separate process.

    Raises:
        NotJudged: when it does not fail there, or cannot run.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FXGUARD")
    }
    command = [sys.executable, "-c", RUNNER, str(path)]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NotJudged(f"the test could not be run: {error}") from error
    if ended.returncode != FAILED:
        last = (ended.stderr.strip().splitlines() or ["it ended well"])[-1]
        raise NotJudged(f"in a process of its own the test does not fail: {last}")
