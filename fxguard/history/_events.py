"""The events of a history: one JSON line each in ``events-rank0.jsonl``, written as they happen."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from fxguard.report.event import CAUSES, Event
from fxguard.report.frames_json import of_type
from fxguard.report.strict_json import strict_json

__all__ = ["add_event", "read_events"]

EVENTS = re.compile(r"events-rank(\d+)\.jsonl")


def add_event(folder: Path, run: int, rank: int, event: Event) -> None:
    """Write an event so that it outlives a crash of the machine.

    Raises:
        OSError: when it cannot be written.
    """
    path = folder / f"events-rank{rank}.jsonl"
    line = strict_json({"run": run, "rank": rank, **event.to_dict()}) + "\n"
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # a crash has cut off the line before
                line = f"\n{line}"
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_events(folder: Path) -> dict[int, list[Event]]:
    """The events of each rank that has seen any.

    An event that was written again, of the same step, about the same, replaces the earlier one.

    Raises:
        OSError: when a file cannot be read.
    """
    ranks = sorted(int(match[1]) for match in map(EVENTS.fullmatch, os.listdir(folder)) if match)
    found: dict[int, list[Event]] = {}
    for rank in ranks:
        of_rank: dict[tuple[int, str, str], Event] = {}
        for line in (folder / f"events-rank{rank}.jsonl").read_bytes().splitlines():
            if event := _event_of(line):
                of_rank[event.step, event.cause, event.what] = event
        found[rank] = list(of_rank.values())
    return found


def _event_of(line: bytes) -> Event | None:
    """The event of a line; None if a crash has cut the line off."""
    try:
        data = of_type(json.loads(line), dict)
        return Event(
            of_type(data["step"], int),
            next((cause for cause in CAUSES if cause == data["cause"]), "unknown"),
            of_type(data["what"], str),
            of_type(data.get("source", ""), str),
            of_type(data.get("lead", 0), int),
            _sentences(data.get("evidence", [])),
            _sentences(data.get("tried", [])),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _sentences(data: Any) -> tuple[str, ...]:
    return tuple(of_type(each, str) for each in of_type(data, list))
