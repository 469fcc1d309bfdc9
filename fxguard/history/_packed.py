"""Numbers as short text for a page: whole numbers, of which each is written as a difference."""

from __future__ import annotations

import base64
import ctypes
import zlib

import torch
from torch import Tensor

__all__ = ["MISSING", "PER_OCTAVE", "packed_bytes", "packed_numbers"]

PER_OCTAVE = 512  # whole numbers in an octave: a step of 0.14 %
MISSING = -200_000  # of a number that was not measured; zero is -200 octaves, -102400
PLANES = 3  # bytes of each difference


def packed_numbers(*columns: Tensor) -> str:
    """Columns of whole numbers, one behind the other.

    Differences are small: the bytes that are zero stand together, and take no room.
    """
    numbers = torch.cat(columns).to(torch.int32)
    change = numbers - torch.cat([torch.zeros(1, dtype=torch.int32), numbers[:-1]])
    folded = (change << 1) ^ (change >> 31)  # small numbers for small ones of either sign
    planes = [((folded >> (8 * place)) & 255).to(torch.uint8) for place in range(PLANES)]
    return packed_bytes(torch.cat(planes))


def packed_bytes(found: Tensor) -> str:
    """Bytes as text."""
    return base64.b64encode(zlib.compress(_bytes(found), 6)).decode()


def _bytes(found: Tensor) -> bytes:
    """The bytes of a tensor; its own way to them needs numpy."""
    found = found.contiguous()
    return ctypes.string_at(found.data_ptr(), found.numel() * found.element_size())
