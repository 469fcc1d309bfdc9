"""Everything that only a GPU can show, in ten minutes, on a machine that has one.

    ./dev gpu                   into the folder gpu-results/
    ./dev gpu --out DIR         into another one
    ./dev gpu --seconds 300     in less time
    ./dev gpu --quick           the smallest sizes, in about two minutes

It takes torch 2.11 or later, transformers, hypothesis and pytest in the Python that runs it, and
no network: nothing is installed. It builds the part in C in place, and then

- tries the kernel that reads ranges on the device, and compiles it for three generations of GPUs;
- runs the tests that have a `device`: planted faults, equal bits, the self-test, CUDA graphs;
- counts the launches of short steps with checks and without, and times them;
- times fxguard against plain models, as in docs/performance.md, with CUDA events.

The folder gets `summary.txt`, which is also printed, `log.txt`, and a JSON file for each table.
Without a GPU all of it runs on the CPU. The exit status is 1 where a part failed or had no time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent
SECONDS = 570  # a machine that is lent for ten minutes keeps half a minute for what comes back
OLDEST = (2, 11)
PASSED, FAILED, LATE, LEFT_OUT = "passed", "FAILED", "NO TIME", "left out"
# A process for each core; more than eight wait for each other.
COUNTS = re.compile(r"\d+ (?:passed|failed|skipped|error)")
SIDE_BY_SIDE = ("-n", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no")
NATIVE = ROOT / "fxguard" / "measure"
MODELS = ("gpt2", "vit", "resnet50", "t5", "llama", "mlp")  # as many as there is time for
COMPILED = ("gpt2", "mlp")
TOOLS = ("plain", "plain again", "fxguard", "fxguard replay", "torch.sum")


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: what the summary calls it.
        command: arguments of Python.
        share: the part of the time that is left which it may take.
        tells: what the summary says of it, given all that it printed.
        variables: further variables of the environment.
        missing: why it is left out here; empty if it runs.
    """

    name: str
    command: tuple[str, ...]
    share: float
    tells: Callable[[str], str]
    variables: dict[str, str] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True)
class Row:
    """What came of a part."""

    name: str
    result: str
    seconds: float
    told: str

    def __str__(self) -> str:
        return f"{self.name:18} {self.result:8} {self.seconds:5.0f} s  {self.told}"


def main(arguments: Sequence[str]) -> int:
    """Run all parts, write the folder, print the summary, and return the exit status."""
    options = parser().parse_args(arguments)
    end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    title = about_this_machine()
    if title is None:
        return 1
    print(title, flush=True)
    rows = []
    with (options.out / "log.txt").open("w") as log:
        for part in parts(options.out, options.quick):
            rows.append(run(part, end, log))
            print(rows[-1], flush=True)
    wrong = sum(row.result in (FAILED, LATE) for row in rows)
    verdict = f"{len(rows) - wrong} of {len(rows)} parts passed or were left out"
    text = "\n".join([title, *map(str, rows), "", *tables(options.out), verdict])
    (options.out / "summary.txt").write_text(text + "\n")
    print("", *tables(options.out), verdict, f"written to {options.out}", sep="\n")
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("./dev gpu", description=(__doc__ or "").partition("\n")[0])
    found.add_argument("--out", type=Path, default=ROOT / "gpu-results", help="the folder")
    found.add_argument("--seconds", type=float, default=SECONDS, help="for everything together")
    found.add_argument("--quick", action="store_true", help="the smallest sizes")
    return found


def about_this_machine() -> str | None:
    """The device and the versions; None if torch is missing or too old, which is said."""
    if importlib.util.find_spec("torch") is None:
        print(f"{sys.executable} has no torch")
        return None
    import torch

    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < OLDEST:
        print(f"torch {torch.__version__} is too old: fxguard needs {'.'.join(map(str, OLDEST))}")
        return None
    python = ".".join(map(str, sys.version_info[:3]))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: on the CPU"
    return f"{name}; torch {torch.__version__}, Python {python}, {os.cpu_count()} cores"


def on_a_gpu() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def parts(out: Path, quick: bool) -> Iterator[Part]:
    """What is run, in this order: first what a failure of the rest would follow from."""
    gpu = on_a_gpu()
    triton, no_triton = where_triton_is()
    build = ("setup.py", "-q", "build_ext", "--inplace")
    built = "it is built" if is_built() else ""  # other processes may be using it
    yield Part("part in C", build, 0.2, lambda _: "built", missing=built)
    yield Part("about", ("-m", "fxguard.about"), 0.2, last_line)
    yield Part(
        "kernel",
        (*PYTEST, "tests/measure/kernel_alone.py", *(("-k", "nan or views") if quick else ())),
        0.3,
        last_line,
        {**triton, **({} if gpu else {"TRITON_INTERPRET": "1"})},
        no_triton,
    )
    compiles = "tests/measure/test_gpu.py::test_the_kernels_compile_for_real_gpus"
    yield Part("machine code", (*PYTEST, compiles), 0.3, last_line, missing=no_triton)
    if quick:
        tests = ["tests/whole/on_a_device", "-m", "device and not slow and not campaign"]
        bits = "tests/whole/bits_unchanged/test_models.py"
        tests += [f"{bits}::test_results_are_bitwise_equal_under_aot_eager[twice]"]
    else:
        tests = ["tests", *SIDE_BY_SIDE, "-m", "device and not campaign"]
        tests += ["--continue-on-collection-errors"]  # of files that need what is not here
    yield Part("tests", (*PYTEST, *tests), 0.4, last_line)
    counting: tuple[str, ...] = ("benchmarks/launches.py", "--json", str(out / "launches.json"))
    if quick:
        counting += ("--models", "gpt2", "--size", "small", "--rounds", "5")
    yield Part("launches", counting, 0.35, last_line, missing="" if gpu else "there is no GPU")
    device = ("--device", "cuda" if gpu else "cpu")
    benchmark = ("benchmarks/overhead.py", *device, "--dtypes", "float32", "--json")
    if quick:
        small = ("--models", "mlp", "vit", "--size", "small", "--rounds", "2", "--tools", *TOOLS)
        eager = ("--modes", "eager", "--work", "forward", *small)
        yield Part("times, eager", (*benchmark, str(out / "eager.json"), *eager), 0.9, scored)
        return
    eager = ("--modes", "eager", "--models", *MODELS, "--size", "gpu" if gpu else "quick")
    eager += ("--tools", *TOOLS, "--budget", "2")
    yield Part("times, eager", (*benchmark, str(out / "eager.json"), *eager), 0.65, scored)
    modes = ("reduce-overhead", "inductor") if gpu else ("inductor",)
    compiled = ("--modes", *modes, "--work", "forward", "--models", *COMPILED, "--size", "quick")
    compiled += ("--tools", "plain", "plain again", "fxguard", "--budget", "2")
    yield Part("times, compiled", (*benchmark, str(out / "compiled.json"), *compiled), 1, scored)


def is_built() -> bool:
    """Whether the part in C is there and not older than its source."""
    source = (NATIVE / "_native.c").stat().st_mtime
    return any(file.stat().st_mtime >= source for file in NATIVE.glob("_native*.so"))


def where_triton_is() -> tuple[dict[str, str], str]:
    """Variables with which Python finds Triton, and why there is none."""
    if importlib.util.find_spec("triton"):
        return {}, ""
    apart = Path(sys.prefix) / "triton"  # `./dev` keeps it out of the environment
    if apart.is_dir():
        return {"PYTHONPATH": str(apart)}, ""
    return {}, "there is no Triton"


def run(part: Part, end: float, log: IO[str]) -> Row:
    """Run one part, within its share of the time that is left."""
    left = (end - time.monotonic()) * part.share
    log.write(f"\n===== {part.name}: python {' '.join(part.command)}\n")
    log.flush()
    if part.missing:
        return Row(part.name, LEFT_OUT, 0, part.missing)
    paths = [str(ROOT), part.variables.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **part.variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Products of matrices are then the same in each run.
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    start, output, result = time.monotonic(), "", FAILED
    try:
        done = subprocess.run(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(left, 1),
        )
        output, result = done.stdout, PASSED if done.returncode == 0 else FAILED
    except subprocess.TimeoutExpired as error:
        seen = error.stdout or b""
        output, result = seen if isinstance(seen, str) else seen.decode(errors="replace"), LATE
    log.write(output)
    log.flush()
    told = part.tells(output) if result == PASSED else last_line(output)
    return Row(part.name, result, time.monotonic() - start, told)


def last_line(output: str) -> str:
    """The counts of pytest, or the last line that says something."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    counts = [line for line in lines if COUNTS.match(line)]
    return (counts or lines or ["it printed nothing"])[-1][:100]


def scored(output: str) -> str:
    """How many cases a benchmark timed: its table follows the summary."""
    return f"{output.count('rounds')} cases"


def tables(out: Path) -> Iterator[str]:
    """The means of each benchmark that has written its file, as times the plain model."""
    counted = out / "launches.json"
    for found in json.loads(counted.read_text())["results"] if counted.exists() else ():
        what = "launches, eager {work}: fxguard ({model})".format_map(found)
        yield f"  {what:58} {found['ratio']:8.3f}  ({found['time_ratio']:.3f} times as long)"
    for name in ("eager", "compiled"):
        file = out / f"{name}.json"
        if not file.exists():
            continue
        for score in json.loads(file.read_text())["scores"]:
            what = "{what}, {mode} {work}: {tool}".format_map(score)
            models = f"{score['models']} model{'s' if score['models'] > 1 else ''}"
            yield f"  {what:58} {score['value']:8.3f}  ({models})"
    yield ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
