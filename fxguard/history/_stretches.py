"""Closed stretches of a history as Parquet files, in long form: one row for series and step.

Rows stand by series, and within one by step. Older stretches are thinned: a row then holds the
smallest and the largest magnitude of 16, 256, ... steps. pyarrow is imported when this is first
needed, and numpy is not.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.history._files import Stretch, remove
from fxguard.history._stream import Stream

__all__ = [
    "COLUMNS",
    "empty_table",
    "level_of",
    "read_parts",
    "read_stretch",
    "tables_of",
    "thinned",
    "write_stretch",
]

COLUMNS = ("run", "rank", "step", "last_step", "series", "low", "high")
THINNING = 16  # steps that become one, level by level
ROWS = 1 << 16  # of a group: a reader that asks for one series leaves the other groups out
LEVEL = b"fxguard_level"  # of a file: 0 in full, 1 by 16 steps, 2 by 256 steps, ...


def schema() -> Any:
    """The columns of each file and their types."""
    import pyarrow

    of_series = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    types = {
        **dict.fromkeys(("run", "rank"), pyarrow.int32()),
        **dict.fromkeys(("step", "last_step"), pyarrow.int64()),
        "series": of_series,
        **dict.fromkeys(("low", "high"), pyarrow.float64()),
    }
    return pyarrow.schema([pyarrow.field(name, types[name]) for name in COLUMNS])


def empty_table() -> Any:
    """The columns without a row."""
    return schema().empty_table()


def tables_of(stream: Stream) -> Iterator[Any]:
    """The rows of a stream in long form, some series in each table, which takes little memory.

    A series is left out where it was not measured.
    """
    import pyarrow

    names = pyarrow.array([each.name for each in stream.series], pyarrow.string())
    steps = sum(len(of_block) for of_block, _ in stream.blocks)
    some = max(1, ROWS // max(1, steps))
    for first in range(0, len(stream.series), some):
        yield _table_of(stream, range(first, min(first + some, len(stream.series))), names)


def _table_of(stream: Stream, positions: range, names: Any) -> Any:
    import pyarrow
    from pyarrow import compute

    steps, low, high, indices = array("q"), array("d"), array("d"), array("i")
    for position in positions:
        for of_block, numbers in stream.blocks:
            count = len(numbers) // (2 * len(of_block))
            if position < count:
                steps.extend(of_block)
                low.extend(numbers[position :: 2 * count])
                high.extend(numbers[count + position :: 2 * count])
        indices.extend(array("i", [position]) * (len(steps) - len(indices)))
    series = pyarrow.DictionaryArray.from_arrays(_column(indices, pyarrow.int32()), names)
    columns = {
        "step": _column(steps, pyarrow.int64()),
        "series": series,
        "low": _column(low, pyarrow.float64()),
        "high": _column(high, pyarrow.float64()),
    }
    missing = compute.and_(compute.is_nan(columns["low"]), compute.is_nan(columns["high"]))
    table = pyarrow.table(columns).filter(compute.invert(missing))
    return _in_long_form(table, table["step"], stream.run, stream.rank)


def _column(numbers: array[Any], kind: Any) -> Any:
    import pyarrow

    return pyarrow.Array.from_buffers(kind, len(numbers), [None, pyarrow.py_buffer(numbers)])


def _in_long_form(table: Any, last_step: Any, run: int, rank: int) -> Any:
    import pyarrow

    constant = {
        name: pyarrow.repeat(pyarrow.scalar(value, pyarrow.int32()), len(table))
        for name, value in (("run", run), ("rank", rank))
    }
    columns = {name: table[name] for name in ("step", "series", "low", "high")}
    columns.update(constant, last_step=last_step)
    return pyarrow.table([columns[name] for name in COLUMNS], schema=schema())


def thinned(tables: Iterable[Any], stretch: Stretch, level: int) -> Any:
    """The smallest and the largest of each series in each ``16 ** level`` steps.

    Args:
        tables: of one run and rank.
        stretch: what they are together.
        level: of the result.
    """
    import pyarrow

    some = [_thinned(table, stretch, level) for table in tables]  # one by one for the memory
    return _thinned(pyarrow.concat_tables(some), stretch, level)


def _thinned(table: Any, stretch: Stretch, level: int) -> Any:
    import pyarrow
    from pyarrow import compute

    table = table.unify_dictionaries().combine_chunks()
    series = table["series"].combine_chunks()
    group = compute.divide(table["step"], pyarrow.scalar(THINNING**level, pyarrow.int64()))
    table = table.append_column("position", series.indices).append_column("group", group)
    asked = [("step", "min"), ("last_step", "max"), ("low", "min"), ("high", "max")]
    grouped = table.group_by(["position", "group"], use_threads=False).aggregate(asked)
    grouped = grouped.sort_by([("position", "ascending"), ("group", "ascending")])
    names = pyarrow.DictionaryArray.from_arrays(
        grouped["position"].combine_chunks(), series.dictionary
    )
    columns = {"step": grouped["step_min"], "series": names}
    columns.update(low=grouped["low_min"], high=grouped["high_max"])
    return _in_long_form(
        pyarrow.table(columns), grouped["last_step_max"], stretch.run, stretch.rank
    )


def write_stretch(folder: Path, stretch: Stretch, tables: Iterable[Any], level: int) -> None:
    """Write a closed stretch, completely or not at all, in the place of a file of the same steps.

    Raises:
        OSError: when it cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    path = folder / stretch.name
    aside = path.with_name(f".{path.name}.part")
    of_file = schema().with_metadata({LEVEL: str(level).encode()})
    packed = {"low": "BYTE_STREAM_SPLIT", "high": "BYTE_STREAM_SPLIT"}
    counted = dict.fromkeys(("step", "last_step"), "DELTA_BINARY_PACKED")
    try:
        with aside.open("wb") as file:
            with parquet.ParquetWriter(
                file,
                of_file,
                compression="zstd",
                use_dictionary=["run", "rank", "series"],
                column_encoding={**packed, **counted},
            ) as writer:
                for table in tables:
                    writer.write_table(table.cast(of_file), row_group_size=ROWS)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:  # an interrupt, too
        remove([aside])
        raise
    pyarrow.default_memory_pool().release_unused()  # the training needs it more


def level_of(path: Path) -> int:
    """How far a file has been thinned.

    Raises:
        UsageError: if the file is damaged.
        OSError: when there is no such file.
    """
    import pyarrow
    from pyarrow import parquet

    with path.open("rb") as file:
        try:
            return int((parquet.read_schema(file).metadata or {}).get(LEVEL, b"0"))
        except (pyarrow.ArrowException, ValueError) as error:
            raise UsageError(f"{path}: not a history of fxguard: {error}") from error


def read_stretch(path: Path) -> Any:
    """The table of a closed stretch; raises what :func:`read_parts` does."""
    import pyarrow

    return pyarrow.concat_tables([empty_table(), *read_parts(path)])


def read_parts(path: Path) -> Iterator[Any]:
    """The table of a closed stretch, part by part.

    Raises:
        UsageError: if the file is damaged, or none of a history.
        OSError: when there is no such file.
    """
    import pyarrow
    from pyarrow import parquet

    of_file = schema()
    with path.open("rb") as file:
        try:
            # A thread that reads ahead may abort the process at its end: apache/arrow, issue 34314.
            opened = parquet.ParquetFile(file, pre_buffer=False)
            for part in range(opened.num_row_groups):
                table = opened.read_row_group(part, list(COLUMNS), use_threads=False)
                table = table.select(list(COLUMNS)).cast(of_file)
                if any(column.null_count for column in table.columns):
                    raise ValueError("a number is missing")
                yield table
        except (pyarrow.ArrowException, ValueError, KeyError) as error:
            raise UsageError(f"{path}: not a history of fxguard: {error}") from error
