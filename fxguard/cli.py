"""The command ``fxguard``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fxguard
from fxguard.cli_traces import add_commands
from fxguard.options import Options

if TYPE_CHECKING:
    from fxguard.report import Report

__all__ = ["main"]

DETECTED = 3  # exit status after a detection
WRONG_USE = 2
PIPE_CLOSED = 141  # as a shell has it: 128 and SIGPIPE


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="fxguard", description="Name the operation that first overflowed or turned into NaN."
    )
    top.add_argument("--version", action="version", version=f"fxguard {fxguard.__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a training script with its models checked",
        description="Run an unmodified training script. The outermost modules that it calls are "
        f"instrumented at their first call. A detection ends it with status {DETECTED}.",
        usage="fxguard run [options] (script.py | -m module) [args ...]",
    )
    add_options(run)
    run.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write the last report here: a page where the name ends in .html, JSON where it "
        "ends in .json, else text",
    )
    run.add_argument("-m", dest="module", metavar="module", help="run a module, as python -m does")
    run.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add_commands(commands)
    return top


def add_options(run: argparse.ArgumentParser) -> None:
    """Add an option for each field of ``Options``; what is not given is not in the result."""
    for option in fields(Options):
        told: dict[str, Any] = {"default": argparse.SUPPRESS, **option.metadata}
        if isinstance(option.default, bool):
            told["action"] = argparse.BooleanOptionalAction
        elif isinstance(option.default, int) or option.name == "abort_after_batch_num":
            told["type"] = int
        elif option.name == "trace_batch_nums":
            told["type"] = batch_numbers
        elif option.name == "ignore":
            told["action"] = "append"
        run.add_argument("--" + option.name.replace("_", "-"), **told)


def batch_numbers(text: str) -> tuple[int, ...]:
    """``1,3`` as batch numbers."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        message = f"batch numbers are integers with commas between them, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    own, rest = _split(sys.argv[1:] if argv is None else argv)
    given = parser().parse_args(own)
    if given.command == "run":
        return _start(given, [*given.rest, *rest])
    try:
        return int(given.do(given))
    except fxguard.FxguardError as error:
        return _wrong(str(error))
    except FileNotFoundError as error:
        return _wrong(f"no such file: {error.filename}")
    except BrokenPipeError:  # of `| head`: Python would complain when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _start(given: argparse.Namespace, rest: list[str]) -> int:
    if given.module is None and rest[:1] == ["--"]:
        rest = rest[1:]
    if given.module is None and not rest:
        return _wrong("which script? usage: fxguard run [options] (script.py | -m module) [args]")
    if given.module is None and not Path(rest[0]).is_file():
        return _wrong(f"no such script: {rest[0]}")
    if given.module is not None and _cannot_find(given.module):
        return _wrong(f"no module named {given.module}")
    if given.report is not None and not given.report.resolve().parent.is_dir():
        return _wrong(f"no such folder for the report: {given.report}")
    return _run(given, rest)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is fxguard's, and what stands behind ``-m module``: that is the module's."""
    for position, word in enumerate(argv[:-1]):
        if word == "-m":
            return argv[: position + 2], argv[position + 2 :]
        if word.endswith(".py"):
            break
    return argv, []


def _run(given: argparse.Namespace, rest: list[str]) -> int:
    from fxguard.ranks import current_rank
    from fxguard.run import guarding_outermost_modules, run_module, run_script

    listed = {option.name for option in fields(Options)}
    options = {name: value for name, value in vars(given).items() if name in listed}
    try:
        Options(**options)
    except fxguard.FxguardError as error:
        return _wrong(str(error))
    with guarding_outermost_modules(**options) as guarded:
        try:
            if given.module is not None:
                run_module(given.module, rest)
            else:
                run_script(Path(rest[0]), rest[1:])
        except fxguard.NonFiniteError as error:
            _say(f"fxguard: {error.report.advice}")
            return DETECTED
        except fxguard.BatchLimitReached as error:
            _say(f"fxguard: {error}")
            return 0
        finally:
            if not guarded:
                _say("fxguard: the script called no torch.nn.Module: nothing was checked")
            reports = [fxguard.guard_of(model).last_report for model in guarded]
            for model in guarded:
                if path := fxguard.guard_of(model).trace_path:
                    _say(f"fxguard: for a page of the whole batch: fxguard report {path}")
            for report in filter(None, reports):
                if report.rank == current_rank():  # else the rank that found it writes it
                    _write(report, given.report)
    return 0


def _write(report: Report, path: Path | None) -> None:
    if path is None:
        return
    try:
        if path.suffix == ".html":
            report.to_html(path)
            return
        text = report.to_json(indent=2) if path.suffix == ".json" else str(report)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _say(f"fxguard: the report could not be written: {error}")


def _cannot_find(module: str) -> bool:
    sys.path.insert(0, "")
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True
    finally:
        sys.path.pop(0)


def _say(line: str) -> None:
    sys.stdout.flush()
    print(line, file=sys.stderr)


def _wrong(message: str) -> int:
    _say(f"fxguard: {message}")
    return WRONG_USE


if __name__ == "__main__":
    sys.exit(main())
