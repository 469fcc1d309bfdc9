"""What a run of Weights & Biases in offline mode has written: its file, read by its own format.

The file is a log as LevelDB writes it: blocks of 32 kB, records with a header of seven bytes, and
records that do not fit into a block in parts. Each record is a protocol buffer.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.needs import needs

__all__ = ["axes", "pages", "rows", "summary"]

BLOCK = 32 * 1024
HEADER = struct.Struct("<IHB")  # checksum, length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the history, with W&B's own step as ``_step``."""
    found = []
    for record in _records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {_key(item): json.loads(item.value_json) for item in record.history.item}
            found.append({**row, "_step": record.history.step.num})
    return found


def summary(folder: Path) -> dict[str, Any]:
    """The last value of each name."""
    found: dict[str, Any] = {}
    for row in rows(folder):
        found |= row
    return found


def axes(folder: Path) -> dict[str, str]:
    """Which names have which x axis."""
    kinds = [each.metric for each in _records(folder) if each.WhichOneof("record_type") == "metric"]
    return {each.glob_name: each.step_metric for each in kinds if each.glob_name}


def pages(folder: Path) -> list[str]:
    """The HTML files of a run."""
    return [
        file.read_text(encoding="utf-8") for file in sorted(folder.rglob("media/html/**/*.html"))
    ]


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _records(folder: Path) -> list[Any]:
    """All records. The process that writes them may end a moment after the run has."""
    [file] = folder.rglob("*.wandb")
    internal = needs("wandb.proto.wandb_internal_pb2")
    for _ in range(300):
        records = []
        for data in _parts(file.read_bytes()):
            records.append(internal.Record())
            records[-1].ParseFromString(data)
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def _parts(data: bytes) -> Iterator[bytes]:
    at, whole = 7, b""  # behind the header of the file
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:  # the end of a block, in which no header fits
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at + length > len(data):
            return
        whole += data[at : at + length]
        at += length
        if kind in (FULL, LAST):
            yield whole
            whole = b""
