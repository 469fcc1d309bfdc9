"""One empty folder for each case that writes files, and texts without the paths of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HERE", "empty_folder", "without_paths"]

HERE = Path(__file__).resolve().parent
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
WORK = Path(tempfile.gettempdir(), f"golden-{os.getpid()}")


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """An empty folder, which is the working directory in the block and gone after it."""
    before = Path.cwd()
    WORK.mkdir()
    os.chdir(WORK)
    try:
        yield WORK
    finally:
        os.chdir(before)
        shutil.rmtree(WORK)


def without_paths(text: str, root: Path) -> str:
    """A text in which nothing depends on where a checkout lies, and no object has an address."""
    for path, name in ((WORK, "work"), (HERE, "golden"), (sys.prefix, "python"), (root, "root")):
        text = text.replace(str(path), f"<{name}>")
    return ADDRESS.sub("0x", text)
