"""Why CTC finds no alignment: a sample whose labels and repeats are more than its frames."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["no_alignment"]

NAMES = ("log_probs", "targets", "input_lengths", "target_lengths")


def no_alignment(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The first sample without an alignment, in words; "" if there is none.

    CTC puts a blank between two equal labels, so a target needs a frame for each label and for each
    label that repeats the one before it.

    Args:
        args: the arguments of ``ctc_loss``.
        kwargs: likewise.
    """
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    frames, lengths = _numbers(given["input_lengths"]), _numbers(given["target_lengths"])
    found = [
        (sample, labels, _repeats(labels), count)
        for sample, (labels, count) in enumerate(
            zip(_labels(given["targets"], lengths), frames, strict=True)
        )
        if len(labels) + _repeats(labels) > count
    ]
    if not found:
        return ""
    sample, labels, repeats, count = found[0]
    name = f"sample {sample}: " if len(frames) > 1 else ""
    needs = f"{_count(len(labels), 'label')} need{'s' if len(labels) == 1 else ''}"
    if repeats:
        needs = f"{_count(len(labels), 'label')} with {_count(repeats, 'repeat')} need"
    others = f"{len(found) - 1} of the other {len(frames) - 1}" if len(frames) > 2 else "the other"
    more = f" (and so {'do' if len(found) > 2 else 'does'} {others})" if len(found) > 1 else ""
    return f"{name}{needs} {_count(len(labels) + repeats, 'frame')}, the input has {count}{more}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _numbers(lengths: Any) -> list[int]:
    return [int(x) for x in torch.as_tensor(lengths).reshape(-1).tolist()]


def _labels(targets: Tensor, lengths: Sequence[int]) -> list[list[int]]:
    """The labels of each sample, out of padded rows or of one row that holds all of them."""
    if targets.dim() == 2:
        rows = targets.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]
    row, ends = targets.tolist(), torch.tensor(list(lengths)).cumsum(0).tolist()
    return [row[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _repeats(labels: Sequence[int]) -> int:
    return sum(one == other for one, other in itertools.pairwise(labels))
