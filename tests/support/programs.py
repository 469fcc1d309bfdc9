"""Programs that tests start, in a process of their own."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["IMPORTS", "run_python"]

IMPORTS = (  # of scripts that are a few lines long
    "import math, numpy as np, torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
    "torch.manual_seed(0)\n"
)

SERVER = Path(__file__).with_name("fork_server.py")
ROOT = SERVER.parents[2]


def run_python(
    folder: Path, *argv: str, env: Mapping[str, str] | None = None, as_one: bool = False
) -> subprocess.CompletedProcess[str]:
    """``python *argv`` in a folder: a script or ``-m`` and a module, with their arguments.

    The process is a fork of one that has imported torch. What is about Python's own start (its
    options, what happens at ``import torch``) needs :func:`subprocess.run`.

    Args:
        folder: the working directory.
        argv: arguments of Python; no options of its own.
        env: variables of the environment, beside those of this process.
        as_one: whether stdout holds what is written to stderr, too, as a terminal shows it.
    """
    assert argv[0] == "-m" or argv[0].endswith(".py"), argv
    server = started()
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as streams:
        out, err = Path(streams, "out"), Path(streams, "err")
        request = {
            "argv": argv,
            "cwd": str(folder),
            "env": with_this_checkout({**os.environ, **(env or {})}),
            "out": str(out),
            "err": str(out if as_one else err),
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        texts = [each.read_text(encoding="utf-8") if each.exists() else "" for each in (out, err)]
    return subprocess.CompletedProcess([sys.executable, *argv], status, *texts)


def with_this_checkout(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python finds the fxguard that is tested."""
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@functools.cache
def started() -> subprocess.Popen[str]:
    """The server of this process."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=with_this_checkout(os.environ),
    )
    assert server.stdin is not None
    atexit.register(server.stdin.close)  # it ends then
    return server
