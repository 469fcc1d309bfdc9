"""Writes traces to files of JSON lines; :mod:`fxguard.trace.file` describes their contents.

Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import weakref
from pathlib import Path
from typing import Any

from fxguard.report.frames_json import as_json, layout_of, numbers_of
from fxguard.trace.file import SCHEMA
from fxguard.trace.fingerprints import fingerprints_of
from fxguard.trace.trace import TracedBatch

__all__ = ["TraceWriter"]

LONGEST = 50  # characters of a class name in a file name, which has at most 255 bytes


class TraceWriter:
    """Writes the batches of one guarded model to its own file.

    A batch is in the file completely or not at all. If it cannot be written, earlier batches stay
    readable, and the next batch is tried again. Threads write one after the other. A forked process
    writes its own file.

    Args:
        folder: where to write; created when the first batch is written.
        model: name of the model's class.
        torch: its version.
    """

    def __init__(self, folder: Path, model: str, torch: str) -> None:
        self.folder, self.model, self.torch = folder, model, torch
        self._begin()
        self.lock = threading.Lock()  # a model may be called in several threads
        _writers.add(self)

    def _begin(self) -> None:
        """Start without a file."""
        self.path: Path | None = None  # set once a batch is in it
        self._size = 0  # of the complete batches, in bytes
        self._plans: dict[str, int] = {}  # a plan's text in the file to its number

    def after_fork(self) -> None:
        """Start anew: the file is the parent's, and one of its threads may have held the lock."""
        self._begin()
        self.lock = threading.Lock()

    def write(self, batch: TracedBatch, rank: int | None, *, is_later: bool = False) -> None:
        """Add a batch to the file.

        Args:
            batch: a batch with all of its frames.
            rank: rank of this process; None without a process group.
            is_later: whether these frames belong to a batch that is already in the file.

        Raises:
            OSError: when that is not possible; the file is unchanged.
        """
        with self.lock:
            self._write(batch, rank, is_later)

    def _write(self, batch: TracedBatch, rank: int | None, is_later: bool) -> None:
        plan = as_json(layout_of(batch.frames))
        lines = []
        if self._is_gone():
            self._begin()
        if self.path is None:
            head = {"fxguard_trace": SCHEMA, "model": self.model, "rank": rank, "torch": self.torch}
            lines.append(as_json(head))
        of_plan = self._plans.get(plan, len(self._plans))
        if of_plan == len(self._plans):
            lines.append(f'{{"plan": {of_plan}, {plan[1:]}')
        entry: dict[str, Any] = {"batch": batch.number, "of_plan": of_plan}
        if is_later:
            entry["later"] = 1
        if batch.optimizer_step is not None:
            entry["optimizer_step"] = batch.optimizer_step
        if batch.verdict:
            entry["verdict"] = batch.verdict
            entry["blamed"] = batch.blamed
        rows = [row for frame in batch.frames for row in frame.rows]
        entry["rows"] = numbers_of(rows)
        if masks := [place for place, row in enumerate(rows) if row.mask]:
            entry["masks"] = masks
        if (fingerprints := fingerprints_of(rows)) is not None:
            entry["fingerprints"] = fingerprints
        lines.append(as_json(entry))
        self._append("".join(f"{line}\n" for line in lines).encode(), rank)
        self._plans[plan] = of_plan

    def _is_gone(self) -> bool:
        """Whether somebody else has removed the file or a part of it."""
        try:
            return self.path is not None and self.path.stat().st_size < self._size
        except OSError:
            return True

    def _append(self, text: bytes, rank: int | None) -> None:
        """Write the whole text, or leave the file unchanged."""
        path = self._new_file(rank) if self.path is None else self.path
        try:
            with path.open("r+b") as file:
                file.truncate(self._size)  # removes what an earlier try may have left
                file.seek(self._size)
                file.write(text)
            self.path, self._size = path, self._size + len(text)
        except BaseException:  # including an interrupt
            with contextlib.suppress(OSError):
                if self.path is None:
                    path.unlink()
                else:
                    os.truncate(path, self._size)
            raise

    def _new_file(self, rank: int | None) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if rank is None else f"-rank{rank}"
        # A class may have any name: none may lead out of the folder or be too long.
        name = re.sub(r"[^\w.-]", "_", self.model)[:LONGEST].strip(".") or "model"
        for number in itertools.count():
            path = self.folder / f"{name}-{number}{suffix}.jsonl"
            with contextlib.suppress(FileExistsError):
                path.open("xb").close()  # nothing is overwritten
                return path
        raise AssertionError  # the counter never ends


_writers: weakref.WeakSet[TraceWriter] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in _writers:
        writer.after_fork()


if hasattr(os, "register_at_fork"):  # if the system can fork
    os.register_at_fork(after_in_child=_after_fork)
