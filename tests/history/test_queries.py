"""docs/history.md: its queries run on a history, and find what is in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from support.needs import needs

for module in ("pyarrow", "pandas", "polars", "duckdb"):
    needs(module)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "history.md"
QUERIES = re.findall(
    r"^```python no-run\n(.*?)^```",
    PAGE.read_text(encoding="utf-8").partition("\n## Queries\n")[2],
    re.DOTALL | re.MULTILINE,
)
STEPS = 9_000
MATMUL = Series("operation blocks.0 matmul gpt.py:3", "operation", "blocks.0 matmul", "gpt.py:3")
SCALE = Series("operation blocks.1 mul gpt.py:9", "operation", "blocks.1 mul", "gpt.py:9", 1)
LOSS = Series("loss train.py:31", "loss", "loss", "train.py:31", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks: a product doubles late, another one exceeds float16 once, on rank 1."""
    folder = tmp_path_factory.mktemp("queries")
    writers = [Writer(folder / "history", rank=rank, about={}) for rank in (0, 1)]
    for rank, writer in enumerate(writers):
        for series in (MATMUL, SCALE, LOSS):
            writer.register(series)
        for step in range(STEPS):
            loss = 1 / (1 + step)
            high = [
                2.0 if step < STEPS - 500 else 4.0,
                7e4 if rank and step == 8_600 else 3.0,
                loss,
            ]
            writer.add(Row(step, [1.0, 1.0, loss], high))
        writer.close()
    return folder


def found_by(query: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a query prints, which is the last name that it gives."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(query, str(PAGE), "exec"), names)
    return list(names.values())[-1]


def test_there_are_queries() -> None:
    assert len(QUERIES) == 6


@pytest.mark.parametrize("query", QUERIES[:3], ids=["pandas", "polars", "duckdb"])
def test_each_program_reads_the_loss(
    query: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full, and before that the largest of 16 steps."""
    found = found_by(query, folder, monkeypatch)
    if hasattr(found, "fetchall"):
        rows = found.fetchall()
    elif isinstance(found, needs("polars").DataFrame):
        rows = found.select("step", "last_step", "low", "high").rows()
    else:
        assert list(found.index) == sorted(found.index)
        rows = list(found.items())
        rows = [(step, step + 15 * (step < 4_096), low_of(step), high) for step, high in rows]
    thinned = [(at, at + 15, low_of(at), 1 / (1 + at)) for at in range(0, 4_096, 16)]
    in_full = [(at, at, low_of(at), 1 / (1 + at)) for at in range(4_096, STEPS)]
    assert rows == thinned + in_full


def low_of(step: int) -> float:
    """The loss falls: the last of 16 steps is the smallest."""
    return 1 / (1 + step + (15 if step < 4_096 else 0))


def test_other_queries_find_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown, exceeded, apart = (found_by(query, folder, monkeypatch) for query in QUERIES[3:])
    assert grown.fetchall() == [
        (SCALE.name, SCALE.source, 7e4 / 3),
        (MATMUL.name, MATMUL.source, 2.0),
    ]
    assert exceeded.rows() == [(SCALE.name, 8_600)]
    assert apart.fetchall()[0] == (8_600, SCALE.name, 7e4 / 3)
