"""The numbers of one rank, read from its files, and the track of a series through them."""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxguard.history._files import listed
from fxguard.history._stream import read_stream
from fxguard.history._stretches import read_stretch, tables_of

__all__ = ["Numbers"]

TYPES = {"run": "i", "step": "q", "last_step": "q", "low": "d", "high": "d"}


def _all_tables(folder: Path, rank: int) -> Iterator[Any]:
    """The stretches of a rank in long form, in order of run and step, the open one last.

    Raises:
        UsageError: if a file is damaged.
        FileNotFoundError: when a file was replaced meanwhile.
        OSError: when a file cannot be read.
    """
    found, _ = listed(folder)
    for stretch in found:
        if stretch.rank == rank and stretch.last is not None:
            yield read_stretch(folder / stretch.name)
        elif stretch.rank == rank:
            stream = read_stream(folder / stretch.name)
            if stream is not None:
                yield from tables_of(stream)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one rank."""

    tables: list[Any]
    parts: dict[str, list[tuple[int, int, int]]]  # of each series: table, begin and end in it

    @classmethod
    def of(cls, folder: Path, rank: int) -> Numbers:
        """Read them; raises what :func:`_all_tables` does."""
        from pyarrow import compute

        tables = list(_all_tables(folder, rank))
        parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for place, table in enumerate(tables):
            for chunk, before in _chunks(table["series"]):
                names = chunk.dictionary.to_pylist()
                encoded = compute.run_end_encode(chunk.indices)
                begin = 0
                ends = encoded.run_ends.to_pylist()
                for end, index in zip(ends, encoded.values.to_pylist(), strict=True):
                    parts[names[index]].append((place, before + begin, before + end))
                    begin = end
        return cls(tables, dict(parts))

    def columns(self, name: str) -> dict[str, array[Any]]:
        """The columns of a series, by their names, in order of steps."""
        found = {column: array(code) for column, code in TYPES.items()}
        for place, begin, end in self.parts.get(name, ()):
            rows = self.tables[place].slice(begin, end - begin)
            for column, numbers in found.items():
                for chunk, _ in _chunks(rows[column]):
                    at, size = chunk.offset * numbers.itemsize, len(chunk) * numbers.itemsize
                    numbers.frombytes(memoryview(chunk.buffers()[1])[at : at + size])
        steps = found["step"]
        if any(after < before for before, after in itertools.pairwise(steps)):
            order = sorted(range(len(steps)), key=steps.__getitem__)
            found = {
                column: array(numbers.typecode, [numbers[place] for place in order])
                for column, numbers in found.items()
            }
        return found


def _chunks(column: Any) -> Iterator[tuple[Any, int]]:
    """The chunks of a column that hold something, and how many rows are before each."""
    before = 0
    for chunk in column.chunks:
        if len(chunk):
            yield chunk, before
        before += len(chunk)
