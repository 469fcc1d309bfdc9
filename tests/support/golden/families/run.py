"""``fxguard run`` on small scripts, and the commands that read files: texts and exit statuses."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from support.programs import run_python

from ..folders import HERE, empty_folder
from ..records import Cases, Record

SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("*.py"))
OPTIONS: dict[str, tuple[str, ...]] = {
    "warn": ("--on-detect", "warn"),
    "replay": ("--replay",),
    "3 frames": ("--max-frames-to-save", "3"),
    "modules": ("--granularity", "module"),
    "no backward": ("--no-backward",),
    "report": ("--report", "report.json"),
    "text": ("--report", "report.txt"),
    "underflow": ("--underflow", "0.5"),
    "traces": ("--trace-to", "traces", "--on-detect", "warn"),
    "abort": ("--abort-after-batch-num", "1"),
    "float16": ("--forecast", "float16"),
    "bfloat16": ("--forecast", "bfloat16"),
}
WRONG: dict[str, tuple[str, ...]] = {
    "no script": ("run",),
    "no such script": ("run", "nothing.py"),
    "a wrong option": ("run", "--max-frames-to-save", "0", "nothing.py"),
    "no command": (),
    "version": ("--version",),
    "help": ("run", "--help"),
    "report of nothing": ("report", "nothing.json"),
    "diff of nothing": ("diff", "a.jsonl", "b.jsonl"),
}
DIFFERING = ("attention", "vae", "average")


def cases() -> Cases:
    """Each script as it is, and with some of the options; wrong command lines; files."""
    for place, script in enumerate(SCRIPTS):
        yield script, functools.partial(commands, script, [("run", "SCRIPT")])
        for number, (title, options) in enumerate(OPTIONS.items()):
            if (place + number) % 4 == 0:
                lines = [("run", *options, "SCRIPT")]
                yield f"{script}/{title}", functools.partial(commands, script, lines)
    for title, words in WRONG.items():
        yield f"wrong/{title}", functools.partial(commands, "healthy", [words])
    for script in DIFFERING:
        lines = [
            ("run", "--trace-to", "t", "--trace-batch-nums", "0,1", "SCRIPT"),
            ("report", "TRACE"),
            ("diff", "TRACE", "--batches", "0,1"),
            ("diff", "TRACE", "--batches", "0,1", "--format", "table"),
            ("diff", "TRACE", "--batches", "0,0", "--format", "json"),
        ]
        yield f"{script}/files", functools.partial(commands, script, lines)


def commands(script: str, lines: Sequence[Sequence[str]]) -> Record:
    """What command lines print, one after the other in one folder, and how they end."""
    found: Record = {}
    with empty_folder() as folder:
        for line in lines:
            traces = map(str, sorted(folder.glob("t/*.jsonl"))[:1])
            names = {"SCRIPT": str(HERE / "scripts" / f"{script}.py"), "TRACE": "".join(traces)}
            words = [names.get(word, word) for word in line]
            done = run_python(folder, "-m", "fxguard", *words, env={"COLUMNS": "80"})
            found[" ".join(line)] = {
                "status": done.returncode,
                "out": done.stdout,
                "err": without_warnings(done.stderr),
            }
        written = [path for path in sorted(folder.glob("report.*")) if path.suffix != ".html"]
        found["files"] = {path.name: path.read_text("utf-8") for path in written}
    return found


def without_warnings(text: str) -> str:
    """What is printed, without torch's own log, which has times and numbers of processes."""
    lines = text.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("[W", "W1", "[rank")))
