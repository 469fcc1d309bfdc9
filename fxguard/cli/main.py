"""The command ``fxguard``."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import fxguard
from fxguard import netcheck
from fxguard.cli._comparisons import add_compare
from fxguard.cli._ending import end, last_line, say
from fxguard.cli._histories import add_history
from fxguard.cli._processes import SWITCH
from fxguard.cli._run_record import (
    record_of_first_step,
    record_of_run,
    status_of,
    write_record,
)
from fxguard.cli._script import find_module, run_any
from fxguard.cli._settings import (
    NAMES,
    UnreadError,
    nearest,
    options_as_words,
    settings_of_project,
)
from fxguard.cli._statuses import Status
from fxguard.cli._traces import add_commands
from fxguard.forgiving import theirs
from fxguard.formats import spelled_out
from fxguard.options import Options

__all__ = ["main"]


class Parser(argparse.ArgumentParser):
    """A parser that suggests what a mistyped word was meant to be."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Exit with the usage, the message and a suggestion."""
        wrong = re.search(r"unrecognized arguments: ([^\s=]+)|invalid choice: '([^']*)'", message)
        if wrong is not None:
            choices = re.findall(r"\w+", message.partition("choose from")[2])
            word = wrong[1] or wrong[2]
            if word.endswith(".py"):
                message = f"to run a script, write: {self.prog} run {word}"
            else:
                message += nearest(word, self.option_strings if wrong[1] else choices)
        super().error(message)

    @property
    def option_strings(self) -> set[str]:
        """Every ``--option`` that the parser accepts."""
        return {word for word in self._option_string_actions if word.startswith("--")}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = Parser(
        prog="fxguard", description="Name the operation that first overflowed or turned into NaN."
    )
    top.add_argument("--version", action="version", version=f"fxguard {fxguard.__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a training script with its models checked",
        description="Run an unmodified training script. The outermost modules that it calls are "
        f"instrumented at their first call. A detection ends it with status {Status.DETECTED}.",
        usage="fxguard run [options] (script.py | -m module) [args ...]",
    )
    add_options(run)
    run.add_argument(  # --reproduce-to in short
        "--reproduce", dest="reproduce_to", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    run.add_argument(
        "--report",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="also write the last report here: a page if the name ends in .html, JSON if it "
        "ends in .json, else text",
    )
    run.add_argument(
        "--json",
        metavar="FILE",
        help="write what was checked and found into this file when the script ends",
    )
    run.add_argument(
        "--patch",
        metavar="FILE",
        help="write the fix as a unified diff of your own file here, where one expression of it "
        "has to change",
    )
    run.add_argument(
        "--try-patch",
        action="store_true",
        help="with --patch: run the script once more with the patch, in a copy of its folder and a "
        "process of its own, for at most twice the time that the run took, and ten minutes",
    )
    run.add_argument(
        "--fail-on",
        choices=("note",),
        help=f"end with status {Status.NOTED} where the script ends well and a quiet fault was "
        "noted",
    )
    run.add_argument(
        "--forecast",
        type=spelled_out,
        choices=("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        help="say what would overflow, underflow or be rounded away in this dtype in the first "
        "step of the script, and stop there with status 0",
    )
    run.add_argument(
        "--error-budget",
        type=spelled_out,
        choices=("float16", "bfloat16", "float32"),
        help="say how wrong the loss of the first step of the script would be in this dtype, and "
        "which lines that comes from, and stop there with status 0",
    )
    run.add_argument(
        "--record",
        metavar="FOLDER",
        help="write what the models of the first step of the script computed into this folder, "
        "with their weights and the data, for fxguard compare, and stop there with status 0",
    )
    run.add_argument(
        "--record-batches",
        type=_batches,
        metavar="N[,N...]",
        help="with --record: which steps to write, from 0, instead of the first; the script stops "
        "behind the last one. Several go to FOLDER/batch-N",
    )
    run.add_argument("-m", dest="module", metavar="module", help="run a module, as python -m does")
    run.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add_commands(commands)
    add_history(commands)
    add_compare(commands)
    check = commands.add_parser(
        "netcheck",
        help="check the network of a distributed run, under torchrun",
        add_help=False,
        usage="torchrun --nproc_per_node N -m fxguard netcheck [options]",
    )
    check.add_argument("rest", nargs=argparse.REMAINDER)
    return top


# Their default is None.
INTEGERS = ("abort_after_batch_num", "full_every", "recheck")


def add_options(run: argparse.ArgumentParser) -> None:
    """Add an option for each field of ``Options``; options not given are absent from the result."""
    for option in fields(Options):
        told: dict[str, Any] = {"default": argparse.SUPPRESS, **option.metadata}
        if isinstance(option.default, bool):
            told["action"] = argparse.BooleanOptionalAction
        elif isinstance(option.default, int) or option.name in INTEGERS:
            told["type"] = int
        elif option.name in ("loss_scale", "underflow"):
            told["type"] = float
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
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["netcheck"]:
        return netcheck.main(argv[1:])
    own, rest = _split(argv)
    given, unknown = parser().parse_known_args(own)
    if unknown:
        given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if given.command == "run":
        return _start(given, [*given.rest, *rest])
    try:
        return int(given.do(given))
    except fxguard.FxguardError as error:
        return _wrong(str(error))
    except FileNotFoundError as error:
        return _wrong(f"no such file: {error.filename}")
    except BrokenPipeError:  # by `| head`: Python would complain when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Status.PIPE_CLOSED


def _start(given: argparse.Namespace, rest: list[str]) -> int:
    if given.module is None and rest[:1] == ["--"]:
        rest = rest[1:]
    if given.module is None and not rest:
        return _wrong("which script? usage: fxguard run [options] (script.py | -m module) [args]")
    if given.module is None and not Path(rest[0]).is_file():
        return _wrong(f"no such script: {rest[0]}")
    try:
        if given.module is not None and _cannot_find(given.module):
            return _wrong(f"no module named {given.module}")
    except theirs() as error:  # what the package of the module does when it is imported
        _show(error)
        return Status.FAILED
    name = given.module or rest[0]
    of_script = rest if given.module is not None else rest[1:]
    meant = sorted({word.partition("=")[0] for word in of_script} & given.parser.option_strings)
    if meant:
        say(
            f"{', '.join(meant)} after {name} went to the script; options for fxguard come before "
            f"{name}"
        )
    start = Path.cwd() if given.module is not None else Path(os.path.abspath(rest[0])).parent
    try:
        settings = settings_of_project(start)
    except UnreadError as error:
        say(str(error))
        settings = {}
    except fxguard.FxguardError as error:
        return _wrong(str(error))
    settings |= {name: value for name, value in vars(given).items() if name in NAMES}
    if (problem := _cannot_write({**settings, **_files(given)})) is not None:
        return _wrong(problem)
    if given.try_patch and given.patch is None:
        return _wrong("--try-patch needs --patch FILE")
    if given.record_batches is not None and given.record is None:
        return _wrong("--record-batches needs --record FOLDER")
    looks = ("forecast", "error_budget", "record")
    asked = ["--" + name.replace("_", "-") for name in looks if getattr(given, name) is not None]
    if len(asked) > 1:
        return _wrong(f"{' and '.join(asked)} are several runs: give one of them")
    if asked:
        return _first_step(given, settings.get("report"), rest)
    return _run(given, rest, settings)


def _batches(text: str) -> tuple[int, ...]:
    """The numbers in "0,10"."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"takes numbers such as 0 or 0,10, got {text!r}")
    return tuple(dict.fromkeys(map(int, words)))


def _files(given: argparse.Namespace) -> dict[str, str | None]:
    return {"json": given.json, "patch": given.patch}


def _cannot_write(settings: Mapping[str, Any]) -> str | None:
    """What is wrong with the paths that a run would write to; None if nothing is."""
    for name, what in (("report", "report"), ("json", "record"), ("patch", "patch")):
        if (given := settings.get(name)) is None:
            continue
        file = Path(given)
        if file.is_dir():
            return f"the {what} needs a file, and {file} is a folder"
        if not file.parent.is_dir():
            return f"no such folder for the {what}: {file}"
        if not _is_writable(file.parent) or (file.exists() and not os.access(file, os.W_OK)):
            return f"the {what} cannot be written to {file}"
    for name, what in (
        ("trace_to", "traces"),
        ("reproduce_to", "tests"),
        ("history", "a history"),
    ):
        if (folder := settings.get(name)) is None:
            continue
        there = Path(os.path.abspath(folder))
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            return f"{name} has to be a folder, and {there} is a file"
        if not _is_writable(there):
            return f"{what} cannot be written to {folder}"
    return None


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments for fxguard, and those after ``-m module``, which belong to the module."""
    for position, word in enumerate(argv[:-1]):
        if word == "-m":
            return argv[: position + 2], argv[position + 2 :]
        if word.endswith(".py"):
            break
    return argv, []


def _first_step(given: argparse.Namespace, report: str | None, rest: list[str]) -> int:
    os.environ.pop(SWITCH, None)
    from fxguard.cli import _looks

    file = None if report is None else Path(report)
    if given.forecast is not None:
        first, nothing = _looks.forecast(given.forecast, file), f"forecast in {given.forecast}"
    elif given.record is not None:
        try:
            first = _looks.record(Path(given.record), file, given.record_batches or (0,))
            nothing = "record"
        except fxguard.FxguardError as refusal:
            return _wrong(str(refusal))
    else:
        first = _looks.error_budget(given.error_budget, file)
        nothing = f"measure in {given.error_budget}"
    error: BaseException | None = None
    try:
        with first.watching():
            run_any(given.module, rest)
    except BaseException as raised:
        error = raised
        raise
    finally:
        if given.json is not None:
            write_record(given.json, record_of_first_step(first.found, status_of(error)))
    if first.ended:
        steps = "1 step" if first.ended == 1 else f"{first.ended} steps"
        say(f"the script ended after {steps}: there is nothing more to {nothing}")
    else:
        say(f"no model was called: there is nothing to {nothing}")
    return Status.FINE


def _run(given: argparse.Namespace, rest: list[str], settings: dict[str, Any]) -> int:
    began = time.monotonic()
    os.environ.pop(SWITCH, None)  # or importing torch would also watch this process
    from fxguard.cli._session import Session

    try:
        session = Session(settings)
    except fxguard.FxguardError as refusal:
        return _wrong(str(refusal))
    program = None
    if given.patch is not None:
        from fxguard.cli._patch import RunOfProgram

        program = RunOfProgram(given.module, rest, options_as_words(settings), began)
    error: BaseException | None = None
    own_end: SystemExit | None = None
    try:
        with session.watching():
            run_any(given.module, rest)
    except SystemExit as raised:
        own_end = raised
    except BaseException as raised_by_script:
        error = raised_by_script
    finally:
        note = session.close()
    owns = session.notes.is_owner
    status = end(error, note, _show, session.offers, tells=owns)
    ends_with = status_of(own_end or error) if status is None else status
    if ends_with == Status.FINE and given.fail_on == "note" and note.quiet_faults:
        ends_with = Status.NOTED
    if given.json is not None:
        write_record(given.json, record_of_run(note, ends_with))
    if program is not None and owns:
        from fxguard.cli._patch import write_patch

        ended = program.ended() if given.try_patch else None
        write_patch(session.last_report, Path(given.patch), ended)
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = lambda *shown: None
        raise error  # Python ends by the signal then
    if owns and status is None:
        last_line(note)
    if own_end is not None and status is None and ends_with != Status.NOTED:
        raise own_end
    return ends_with


def _show(error: BaseException) -> None:
    """Show the traceback as Python itself would show it when running the script."""
    from fxguard.capture.tracebacks import hide_frames

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not vars(sys.modules["__main__"]):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):  # in what the script's module is in
        trace = _without_own(error.__traceback__)
    error.__traceback__ = trace
    hide_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without its first frames, those of fxguard and of Python's imports."""
    own = str(Path(fxguard.__file__).parent)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((own, "<frozen ")):
        trace = trace.tb_next
    return trace


def _cannot_find(module: str) -> bool:
    sys.path.insert(0, "")
    try:
        return find_module(module) is None
    except ModuleNotFoundError:
        return True
    finally:
        sys.path.pop(0)


def _wrong(message: str) -> int:
    say(message)
    return Status.WRONG_USE


if __name__ == "__main__":
    sys.exit(main())
