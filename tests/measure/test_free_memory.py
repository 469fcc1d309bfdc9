"""Free memory, as the system and a container tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxguard.measure import free_memory

CPU = torch.device("cpu")


def test_copies_of_files_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container counts them as used; the system gives them up when memory is asked for."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    monkeypatch.setattr(free_memory, "MEMORY", tmp_path / "none")
    groups = [(tmp_path, "memory.max", "memory.current", "inactive_file")]
    monkeypatch.setattr(free_memory, "GROUPS", groups)
    assert free_memory.free_bytes(CPU) == 100_000
    (tmp_path / "memory.stat").write_text("anon 200000\ninactive_file 600000\nactive_file 1\n")
    assert free_memory.free_bytes(CPU) == 700_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory.free_bytes(CPU) is None


def test_this_machine_has_memory() -> None:
    free = free_memory.free_bytes(CPU)
    assert (free is not None and free > 0) or not free_memory.MEMORY.exists()
