"""How much the tests see: random small faults in the core of fxguard, and which test fails.

    python tests/support/mutants.py map FOLDER             # which lines each test runs: long
    python tests/support/mutants.py run FOLDER --count 24  # faults, each with the tests of its line
    python tests/support/mutants.py show FOLDER            # how many were found, and the others
    python tests/support/mutants.py again FOLDER           # those of an earlier campaign

``FOLDER`` lies outside of the repository. ``map`` belongs to one state of the sources, and is made
anew after they change. ``run`` draws the mutants of :mod:`support.mutations` by a seed, leaves out
those that ``FOLDER`` has results of, and runs the tests that run the mutated lines, the fastest
first, up to the first failure. That test then has to pass without the fault.

A mutant that no test finds is a test to write, or a condition that decides nothing, or equivalent.

``again`` tries the faults of ``mutants_seen.jsonl``, each with the one test that has seen it. Those
that nobody can see stand there with a reason. Code that has gone since is "not there".

mutmut puts a function in front of each one, which TorchDynamo and the search for the user's line
would see. cosmic-ray and mutatest start pytest for each mutant: with torch and all tests, minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEEN = Path(__file__).with_name("mutants_seen.jsonl")
sys.path.insert(0, str(ROOT / "tests"))

from support.lines_run import FOLDER  # noqa: E402
from support.mutant_trials import Known, Worker, in_order  # noqa: E402
from support.mutations import Mutant, mutants_of  # noqa: E402

CORE = tuple(
    "advice batch graph guard install passes plan reproduce rerun source steps underflow "
    "verdict".split()
)
TESTED_BY = (*CORE, "comparison", "forecasting", "testing", "whole")
FAST = "not slow and not campaign"
IMPORTED = (
    *("torch", "torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed"),
    *("transformers", "hypothesis", "numpy", "pytest"),
)


# What is in the folder.


def tests_in(folder: Path) -> list[Known]:
    """The tests that passed when the map was made."""
    seconds: dict[str, float] = {}
    lines: dict[str, Counter[str]] = {}
    for file in sorted((folder / "lines").glob("*.jsonl")):
        for text in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(text)
            if entry["passed"]:
                seconds[entry["test"]] = entry["seconds"]
            run = lines.setdefault(entry["test"], Counter())
            for name, bits in entry["lines"].items():
                run[name] |= bits
    return [Known(name, seconds[name], dict(lines[name])) for name in seconds]


def results_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The last result of each mutant."""
    file = folder / "results.jsonl"
    texts = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {result["mutant"]: result for result in map(json.loads, texts)}


def seen_before(known: dict[str, Any]) -> Mutant | None:
    """A mutant of an earlier campaign in the sources of now; None where it cannot be planted."""
    file = ROOT / "fxguard" / known["file"]
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    wanted = known["before"], known["after"]
    same = [x for x in mutants_of(known["file"], text) if (x.before, x.after) == wanted]
    nearest = min((abs(each.line - known["line"]) for each in same), default=0)
    there = [each for each in same if abs(each.line - known["line"]) == nearest]
    return there[min(known["nth"], len(there) - 1)] if there else None  # of several in one line


# The commands.


def make_map(folder: Path, paths: Sequence[str]) -> int:
    """Run the fast tests of the core, and note which lines of fxguard each runs."""
    lines = folder / "lines"
    lines.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, FOLDER: str(lines)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    folders = [f"tests/{name}" for name in TESTED_BY]
    paths = paths or [name for name in folders if (ROOT / name).exists()]
    options = ["-p", "support.lines_run", "-p", "no:cacheprovider", "-q", "-m", FAST, *paths]
    return subprocess.run([sys.executable, "-m", "pytest", *options], env=env, cwd=ROOT).returncode


def run(folder: Path, options: argparse.Namespace) -> int:
    """Judge mutants, in several processes."""
    every: list[Mutant] = []
    for name in sorted(options.of):  # the sample does not depend on their order
        for file in sorted((ROOT / "fxguard" / name).glob("*.py")):
            text = file.read_text(encoding="utf-8")
            every += mutants_of(file.relative_to(ROOT / "fxguard").as_posix(), text)
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    before = results_in(folder)
    done = {name for name, result in before.items() if not options.again or result["by"]}
    tests = tests_in(folder)
    todo = [(x, in_order(tests, x)) for x in chosen if str(x) not in done]
    print(f"{len(every)} mutants, {len(todo)} to judge, {len(tests)} tests", flush=True)
    return side_by_side(folder, todo, options)


def again(folder: Path, options: argparse.Namespace) -> int:
    """Judge the mutants of an earlier campaign, each with the test that has seen it."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = list[Judged]()
    for known in map(json.loads, SEEN.read_text(encoding="utf-8").splitlines()):
        mutant = seen_before(known)
        if mutant is None or not known["by"]:
            name = "{file}:{line}: {before}  ->  {after}".format(**known)
            outcome = "not there" if mutant is None else "equivalent"
            note(folder, {"mutant": name, "outcome": outcome, "by": known["by"], "tests": 0})
        else:
            todo.append((mutant, [Known(known["by"], options.seconds, {})]))
    return side_by_side(folder, todo, options)


Judged = tuple[Mutant, Sequence[Known]]


def side_by_side(folder: Path, todo: Sequence[Judged], options: argparse.Namespace) -> int:
    """Judge mutants, in several processes."""
    for name in IMPORTED:
        importlib.import_module(name)
    workers = []
    for number in range(options.workers):
        workers.append(os.fork())
        if workers[-1] == 0:
            work(folder, number, todo[number :: options.workers], options.seconds)
            os._exit(0)
    statuses = [os.waitpid(worker, 0)[1] for worker in workers]
    return max(statuses) or show(folder)


def work(folder: Path, number: int, todo: Sequence[Judged], limit: float) -> None:
    """What one process does."""
    worker = Worker(folder / f"worker{number}")
    worker.prepare()
    for mutant, tests in todo:
        try:
            result = worker.judge(mutant, tests, limit)
        except LookupError:  # a test that has another name now
            result = {"mutant": str(mutant), "outcome": "no test", "by": "", "tests": 0}
        note(folder, result)


def note(folder: Path, result: dict[str, Any]) -> None:
    """Add a result to those in the folder."""
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def show(folder: Path) -> int:
    """Print how many mutants were found, and each that was not."""
    results = results_in(folder)
    for result in results.values():
        if result["outcome"] in ("alive", "no test", "not there"):
            print(f"{result['outcome']} after {result['tests']} tests: {result['mutant']}")
    counts = Counter(result["outcome"] for result in results.values())
    print(f"{len(results)} mutants: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("map", "run", "show", "again"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("paths", nargs="*", help="of map: tests; default: those of the core")
    parser.add_argument("--of", nargs="+", default=CORE, help="packages; default: the core")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for one mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="those alive once more")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.command == "map":
        return make_map(folder, options.paths)
    if options.command == "again":
        return again(folder, options)
    return run(folder, options) if options.command == "run" else show(folder)


if __name__ == "__main__":
    sys.exit(main())
