"""How the processes of one run communicate: a folder of notes, and variables that name it.

The process that the user started owns the folder; its child processes leave a note there. Child
processes read the folder's name and the options from their environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxguard.cli._summary import Summary
from fxguard.report.quiet_fault import QuietFault
from fxguard.report.strict_json import strict_json

__all__ = ["FOLDER", "OPTIONS", "SWITCH", "Note", "Notes", "is_on"]

SWITCH = "FXGUARD"
OPTIONS = "FXGUARD_OPTIONS"  # JSON
FOLDER = "FXGUARD_SESSION"


def is_on(value: str | None) -> bool:
    """Whether a value of the variable ``FXGUARD`` switches fxguard on."""
    return (value or "").strip().lower() not in ("", "0", "false", "no", "off")


@dataclass(slots=True)
class Note:
    """What one process has found."""

    summary: Summary
    # What to look at: one line for each detection that ends a run.
    detections: list[str] = field(default_factory=list)
    report: dict[str, Any] | None = None  # of the last detection, as JSON holds it
    quiet_faults: list[QuietFault] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """What is told at the end of a run."""
        noted = [f"note: {fault.line}" for fault in self.quiet_faults]
        return [*noted, self.summary.line(len(noted))]

    @property
    def of_this_machine(self) -> list[str]:
        """What is told on each rank for itself."""
        own = [fault for fault in self.quiet_faults if fault.kind == "does not repeat"]
        return [f"note: {fault.line}" for fault in own]

    def add_faults(self, faults: Iterable[QuietFault]) -> None:
        """Add quiet faults, each once, whichever process saw it."""
        known = {(each.kind, each.source or each.what) for each in self.quiet_faults}
        for fault in faults:
            if (key := (fault.kind, fault.source or fault.what)) not in known:
                known.add(key)
                self.quiet_faults.append(fault)


class Notes:
    """The folder of one run: the one that the environment names, or a new one."""

    def __init__(self) -> None:
        given = os.environ.get(FOLDER, "")
        if not os.path.isdir(given):
            given = tempfile.mkdtemp(prefix=f"fxguard-{os.getpid()}-")
        self.folder = Path(given)

    @property
    def is_owner(self) -> bool:
        """Whether this is the process that the user started."""
        return self.folder.name.startswith(f"fxguard-{os.getpid()}-")

    def tell_children(self, settings: Mapping[str, Any]) -> None:
        """Switch fxguard on, with these settings, in child processes started from now on."""
        os.environ[SWITCH] = "1"
        os.environ[OPTIONS] = json.dumps(settings, default=os.fspath)
        os.environ[FOLDER] = str(self.folder)

    @contextlib.contextmanager
    def told_to_children(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Switch fxguard on in child processes that are started while the block runs."""
        before = {name: os.environ.get(name) for name in (SWITCH, OPTIONS, FOLDER)}
        self.tell_children(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def leave(self, note: Note) -> None:
        """Leave the note of this process, in place of an earlier one."""
        summary = note.summary.to_dict()
        data = {
            "summary": summary,
            "detections": note.detections,
            "report": note.report,
            "quiet_faults": [fault.to_dict() for fault in note.quiet_faults],
        }
        part = self.folder / f"{os.getpid()}.part"
        with contextlib.suppress(OSError):  # the owner has ended already
            part.write_text(strict_json(data), encoding="utf-8")
            part.replace(part.with_suffix(".json"))

    def read(self) -> Note:
        """The notes of the other processes, merged into one."""
        found = Note(Summary())
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                data = json.loads(file.read_text(encoding="utf-8"))
                found.summary.merge(Summary.from_dict(data["summary"]))
                found.detections += data["detections"]
                found.report = data["report"] or found.report
                found.add_faults(map(QuietFault.from_dict, data["quiet_faults"]))
        return found

    def remove(self) -> None:
        """Take the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)
