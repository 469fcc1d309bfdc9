"""The frames that transformers' own ``DebugUnderflowOverflow`` prints, as data."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Original

TITLE = re.compile(r"^ {18}(?P<name>\S*) (?P<kind>\S+)$")
ROW = re.compile(r"^(?P<numbers>.{17}) (?P<label>\S.*)$")


@dataclass
class ReferenceFrame:
    name: str
    kind: str
    weights: list[tuple[str, str]] = field(default_factory=list)  # label, the two numbers
    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)


def parse(text: str) -> list[ReferenceFrame]:
    """Frames out of printed text."""
    frames: list[ReferenceFrame] = []
    for line in text.splitlines():
        title = TITLE.match(line)
        row = ROW.match(line)
        if "***" in line or line.startswith(("abs min", "Detected", "Last")):
            continue
        if title:
            frames.append(ReferenceFrame(title["name"], title["kind"]))
        elif row:
            label = row["label"]
            frame = frames[-1]
            rows = frame.weights
            if label.startswith("input"):
                rows = frame.inputs
            elif label.startswith("output"):
                rows = frame.outputs
            rows.append((label, row["numbers"].strip()))
    return frames


def traced_frames(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What the original prints when it traces batch 0."""
    Original(model, trace_batch_nums=[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model(*args, **kwargs)
    return printed.getvalue()
