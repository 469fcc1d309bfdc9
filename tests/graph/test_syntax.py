"""Syntax trees of the user's program."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from pathlib import Path

import pytest

from fxguard.source.syntax import tree_of, tree_of_file

BIG = "x = " + " + ".join(f"f({number}, [a, {{b: c}}])" for number in range(200))


def test_threads_make_trees_at_the_same_time() -> None:
    """Python 3.11 raises a SystemError where nobody sees to it that they take turns."""
    made: list[ast.Module | None] = []
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(10)  # threads change where a collection runs Python
    gc.callbacks.append(lambda phase, info: None)
    try:
        work = [
            threading.Thread(target=lambda: made.extend(tree_of(BIG) for _ in range(20)))
            for _ in range(4)
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.callbacks.pop()
    assert len(made) == 80
    assert None not in made


@pytest.mark.parametrize("code", ["x = (1 +", "for i in y:", "a\0b", "(" * 1000])
def test_what_is_no_complete_python_has_none(code: str) -> None:
    assert tree_of(code) is None


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("loss = x.log()\n")
    tree = tree_of_file(str(file))
    assert tree is not None
    assert ast.unparse(tree) == "loss = x.log()"
    empty = tree_of_file(str(tmp_path / "missing.py"))
    assert empty is not None
    assert empty.body == []
