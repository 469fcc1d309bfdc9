"""Ranks that begin a run at the same moment agree on its number and on its first step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from fxguard.history.history import load_history
from support.needs import needs

needs("pyarrow")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")

RANKS = 4


def rank_of_run(folder: Path, rank: int, begin_at: float, together: Path) -> None:
    """One process: it begins with the others, and is killed after some steps, or ends well."""
    time.sleep(max(0.0, begin_at - time.time()))
    writer = Writer(folder / "history", rank=rank, about={})
    (together / str(rank)).write_text(json.dumps([writer.run, writer.next_step]))
    while len(list(together.iterdir())) < RANKS:
        time.sleep(0.001)  # a collective, in a training
    writer.register(Series("loss", "loss", "loss"))
    for step in range(writer.next_step, writer.next_step + 10 + rank % 2):
        writer.add(Row(step, [float(rank)], [float(step)]))
    writer.flush()
    if rank % 3:
        writer.close()


def test_ranks_that_begin_together_agree(tmp_path: Path) -> None:
    """In the first run, and in two that go on; some ranks were killed, and a step later."""
    for run in range(3):
        together = tmp_path / f"run{run}"
        together.mkdir()
        begin_at = time.time() + 0.1
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                status = 1
                try:
                    rank_of_run(tmp_path, rank, begin_at, together)
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * RANKS
        begun = {tuple(json.loads(file.read_text())) for file in together.iterdir()}
        assert begun == {(run, 11 * run)}
    history = load_history(tmp_path / "history")
    assert history.ranks == tuple(range(RANKS))
    assert history.runs == (0, 1, 2)
    for rank in range(RANKS):
        steps = [11 * run + step for run in range(3) for step in range(10 + rank % 2)]
        assert list(history.get("loss", rank).steps) == steps
