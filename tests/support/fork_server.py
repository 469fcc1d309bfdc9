"""A fresh Python that has imported torch and fxguard already: each program runs in a fork of it.

A program that a test starts spends most of its time on these imports. :mod:`support.programs`
starts one server for each process of pytest, and hands programs to it: a line of JSON in, a line
with the exit status out.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from typing import Any

IMPORTED = (
    *("torch", "torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed"),
    *("fxguard.cli.main", "fxguard.api.watch", "fxguard.comparison.compare", "fxguard.testing"),
    *("fxguard.forecasting.forecast", "fxguard.api.keep_float32", "fxguard.trace.file"),
)

# Files whose frames a traceback of the program does not show.
NOT_OF_THE_PROGRAM = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


def main() -> None:
    """Run one program after the other, until the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("fxguard.forgiving").RAISES = True  # our mistakes show
    own_path = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            answers = None  # type: ignore[assignment]
            sys.path[:] = own_path
            become(request)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


def become(request: dict[str, Any]) -> None:
    """Be the program: its folder, environment, streams and arguments; never returns."""
    code = 1
    try:
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        if request["env"].get("PYTHONUNBUFFERED"):
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        paths = request["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        code = run(request["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            if code < 0:  # of a signal, as Python itself ends after an interrupt
                signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(code)


def run(argv: list[str]) -> int:
    """What ``python`` does with these arguments; returns the exit status."""
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(os.path.abspath(argv[0]), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in NOT_OF_THE_PROGRAM:
            frames = frames.tb_next
        error.__traceback__ = frames
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    main()
