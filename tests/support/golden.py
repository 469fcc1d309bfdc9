"""What fxguard says of many runs, to hold one checkout against another, byte by byte.

    git worktree add ../before main
    python tests/support/golden.py --against ../before          # all records, two processes
    python tests/support/golden.py --only stories --write FILE  # the records of this checkout

A change that moves code must not change a word of what users read. Nothing is stored in the
repository: both checkouts make their records on the same machine, each with its own tests and its
own fxguard. A record is the JSON of a report, a comparison or a forecast, the text that is printed,
the frames, the line of coverage and the warnings. `runs` counts how often a graph was run again for
it: a change may lower that number, and must not raise it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
Record = dict[str, Any]
Cases = Iterator[tuple[str, Record]]

ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
SHOWN = 20  # differences that are printed
WIDTH = 300  # characters of one side of a difference


@contextlib.contextmanager
def second_runs() -> Iterator[list[str]]:
    """A list that grows by one name with each second run that begins meanwhile."""
    from fxguard.rerun.start import Start

    runs: list[str] = []
    before = Start.begun

    def begun(start: Start) -> Any:
        runs.append(sys._getframe(1).f_code.co_name)
        return before(start)

    Start.begun = begun  # type: ignore[method-assign]
    try:
        yield runs
    finally:
        Start.begun = before  # type: ignore[method-assign]


def recorded(run: Callable[[], Record]) -> Record:
    """What a run gives, with its warnings and the number of its second runs."""
    import torch

    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as given, second_runs() as runs:
        warnings.simplefilter("always")
        try:
            record = run()
        except Exception as error:
            record = {"raised": f"{type(error).__name__}: {error}"}
    ours = [str(each.message) for each in given if "fxguard" in str(each.message).lower()]
    return {**record, "warnings": ours, "runs": len(runs)}


def of_reports(reports: Sequence[Any], model: Any = None) -> Record:
    """The record of some reports."""
    import fxguard

    record: Record = {
        "reports": [json.loads(report.to_json()) for report in reports],
        "texts": [str(report) for report in reports],
    }
    guard = None if model is None else fxguard.guard_of(model)
    if guard is not None:
        record["coverage"] = guard.coverage()
        record["notes"] = [str(note) for note in guard.notes]
        try:
            record["frames"] = [repr(frame) for frame in guard.frames()]
        except fxguard.FxguardError as reason:  # replay=True has measured no operations
            record["frames"] = [str(reason)]
    return record


# The cases.


def stories() -> Cases:
    """Small NaNs as people write them, and what only looks wrong: eager and under AOTAutograd."""
    import torch
    from torch import nn

    import fxguard
    from support.masks import Function
    from support.stories.bad_before import GIVEN
    from support.stories.healthy import HEALTHY
    from support.stories.overflows import OVERFLOW
    from support.stories.poles import POLES
    from support.stories.rounded import PRECISION
    from support.ways import AOT, EAGER, prepared

    every = {**OVERFLOW, **PRECISION, **POLES, **GIVEN}
    pairs = {name: (story.forward, story.inputs) for name, story in every.items()}
    for place, (name, (forward, inputs)) in enumerate({**pairs, **HEALTHY}.items()):
        for way in (EAGER, AOT) if place % 4 == 0 else (EAGER,):

            def run(forward: Any = forward, inputs: Any = inputs, way: str = way) -> Record:
                reports: list[fxguard.types.Report] = []
                model = forward if isinstance(forward, nn.Module) else Function(forward)
                fxguard.instrument(model, on_detect=reports.append)
                try:
                    with torch.no_grad(), contextlib.suppress(RuntimeError):
                        prepared(model, way)(*inputs)
                    return of_reports(reports, model)
                finally:
                    fxguard.remove(model)

            yield f"stories/{name}/{way}", recorded(run)


# Model, backend, dtype, whether it trains, options of instrument, and each how many sites.
PLANTED = [
    *((name, "eager", "float32", False, {}, 1) for name in ("cnn", "lstm", "twice", "in_place")),
    *((name, "eager", "float32", False, {}, 2) for name in ("encoder", "containers")),
    *((name, "aot_eager", "float32", False, {}, 3) for name in ("cnn", "encoder", "in_place")),
    *((name, "python", "float32", False, {}, 2) for name in ("cnn", "encoder", "in_place")),
    *((name, "eager", "float32", True, {}, 2) for name in ("cnn", "encoder", "checkpointed")),
    *((name, "eager", "float32", False, {"replay": True}, 2) for name in ("cnn", "encoder")),
    *((name, "eager", "bfloat16", False, {}, 3) for name in ("cnn", "encoder")),
    *((name, "eager", "float32", False, {}, 9) for name in ("t5", "llama", "bert", "gpt2")),
    *((name, "eager", "float32", False, {"replay": True}, 31) for name in ("t5", "vit")),
    *((name, "eager", "float32", True, {}, 31) for name in ("mixtral", "resnet", "whisper")),
]


def planted() -> Cases:
    """A bad element at operations of the zoo's models, in the ways in which a model runs."""
    import torch

    from support.planting import FAULTS
    from support.trials import MODELS, Trial

    for name, backend, dtype, train, options, every in PLANTED:
        entry = MODELS[name]
        torch._dynamo.reset()
        kind = getattr(torch, dtype)
        inputs = entry.inputs(kind, entry.has_mask)
        trial = Trial(entry.model(kind, train), inputs, backend, options or {"strict": True})
        title = f"planted/{name}/{backend}/{dtype}/{'train' if train else 'eval'}{''.join(options)}"
        with trial.planter.installed():

            def run(trial: Any = trial, site: int = -1, fault: str = "nan") -> Record:
                trial.run(site, fault)
                return of_reports(trial.reports, trial.model)

            yield f"{title}/none", recorded(run)
            for site in range(every // 2, len(trial.planter.sites), every):
                fault = list(FAULTS)[site // every % 2]
                one = recorded(lambda run=run, site=site, fault=fault: run(site=site, fault=fault))
                yield f"{title}/{site}/{fault}", one


def gradients() -> Cases:
    """A bad gradient at operands of the zoo's models."""
    import pytest

    from support import zoo
    from support.planting_gradients import BAD, Planter, reports_and_bad_leaves

    patch = pytest.MonkeyPatch()
    for name, every, compiler in [
        *(("in_place", 2, None), ("containers", 2, None), ("cnn", 3, None), ("twice", 2, None)),
        *(("cnn", 5, "aot_eager"), ("encoder", 9, None), ("t5", 60, None), ("resnet", 40, None)),
    ]:
        entry, counting = zoo.ZOO[name], Planter()
        reports_and_bad_leaves(entry, counting, patch, compiler)
        for site in range(every // 2, counting.count, every):

            def run(entry: Any = entry, site: int = site, compiler: Any = compiler) -> Record:
                planter = Planter(site, BAD[site % 2])
                found, bad = reports_and_bad_leaves(entry, planter, patch, compiler)
                return {**of_reports(found), "bad": bad}

            yield f"gradients/{name}/{compiler or 'eager'}/{site}", recorded(run)


def steps() -> Cases:
    """Whole steps under watch: losses, backwards and optimizers that go wrong."""
    import torch
    from torch import Tensor

    import fxguard
    from support import zoo

    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "log": lambda x: (x - x).sum().log(),
        "sqrt": lambda x: (x - x.detach()).square().sum().sqrt(),
        "norm": lambda x: (x - x.detach()).norm(),
        "divide": lambda x: x.sum() / (x - x).sum(),
        "where": lambda x: torch.where(x > 1e9, x.log(), x).sum(),
        "exp": lambda x: (x * 1e4).exp().mean(),
        "healthy": lambda x: x.square().mean(),
    }
    rates = {"small": 1e-3, "huge": 1e30, "nan": float("nan")}
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    for name in ("cnn", "twice", "encoder"):
        for loss_name, loss in losses.items():
            for kind, rate in (("sgd", "small"), ("adam", "huge"), ("sgd", "nan")):

                def run(
                    name: str = name, loss: Any = loss, kind: str = kind, rate: str = rate
                ) -> Record:
                    entry = zoo.ZOO[name]
                    model = entry.model(train=True)
                    optimizer = kinds[kind](model.parameters(), rates[rate])
                    reports: list[fxguard.types.Report] = []
                    args, kwargs = entry.inputs(torch.float32, False)
                    with fxguard.watch(model, on_detect=reports.append):
                        for _ in range(3):
                            optimizer.zero_grad()
                            output = model(*args, **kwargs)
                            found = output if isinstance(output, Tensor) else zoo.loss_of(output)
                            loss(found).backward()
                            optimizer.step()
                    return of_reports(reports)

                yield f"steps/{name}/{loss_name}/{kind}/{rate}", recorded(run)


def tools() -> Cases:
    """Comparisons, forecasts and plans of the zoo's models."""
    import torch

    import fxguard
    from support import zoo
    from support.planting_differences import FAULTS, copy_with, weights_to_change, with_noise

    for name in ("cnn", "lstm", "encoder", "twice", "in_place", "t5", "llama", "vit"):
        entry = zoo.ZOO[name]
        for dtype in ("float16", "bfloat16"):

            def forecast(entry: Any = entry, dtype: str = dtype) -> Record:
                args, kwargs = entry.inputs(torch.float32, entry.has_mask)
                found = fxguard.forecast(entry.model(), *args, dtype=dtype, **kwargs)
                return {"json": json.loads(found.to_json()), "text": str(found)}

            yield f"tools/forecast/{name}/{dtype}", recorded(forecast)

        for fault in ("same", *FAULTS):

            def compare(entry: Any = entry, fault: str = fault) -> Record:
                args, kwargs = entry.inputs(torch.float32, entry.has_mask)
                model = with_noise(entry.model())
                other = model
                if fault != "same":
                    weights = weights_to_change(model, fault)
                    other = copy_with(model, weights[len(weights) // 2], fault)
                found = fxguard.compare(model, other, *args, **kwargs)
                return {"json": json.loads(found.to_json()), "text": str(found)}

            yield f"tools/compare/{name}/{fault}", recorded(compare)


def texts() -> Cases:
    """The worked example and the famous NaNs of the documents."""
    docs = Path(os.environ["GOLDEN_ROOT"]) / "docs"
    sys.path.insert(0, str(docs))
    import famous_nans
    import worked_example

    yield "texts/worked example", recorded(lambda: {"text": dict(worked_example.sections())})
    yield "texts/famous nans", recorded(lambda: {"text": dict(famous_nans.sections())})


FAMILIES: dict[str, Callable[[], Cases]] = {
    each.__name__: each for each in (stories, planted, gradients, steps, tools, texts)
}


# The two sides.


def write(root: Path, families: Sequence[str], file: Path) -> None:
    """Write the records of a checkout, whose tests and fxguard are imported."""
    sys.path[:0] = [str(root), str(root / "tests")]
    import torch

    import fxguard

    assert root in Path(fxguard.__file__).resolve().parents, fxguard.__file__
    torch.set_num_threads(1)
    torch.manual_seed(0)  # for models that are made when a file of stories is imported
    records = {name: record for family in families for name, record in FAMILIES[family]()}
    text = json.dumps(records, indent=0, sort_keys=True, default=str)
    for path, name in ((HERE, "golden"), (sys.prefix, "python"), (root, "root")):
        text = text.replace(str(path), f"<{name}>")
    file.write_text(ADDRESS.sub("0x", text), encoding="utf-8")


def made_in(root: Path, families: Sequence[str], file: Path) -> subprocess.Popen[bytes]:
    """A process that writes the records of a checkout."""
    command = [sys.executable, str(HERE), "--root", str(root), "--write", str(file)]
    env = {**os.environ, "PYTHONPATH": str(root), "GOLDEN_ROOT": str(root), "NO_COLOR": "1"}
    return subprocess.Popen([*command, "--only", *families], env=env, cwd=root)


def differences(ours: dict[str, Record], theirs: dict[str, Record]) -> list[str]:
    """A line for each record that is not the same, but for fewer second runs."""
    found = [f"{name}: only on one side" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        now, before = dict(ours[name]), dict(theirs[name])
        runs = now.pop("runs"), before.pop("runs")
        if runs[0] > runs[1]:
            found.append(f"{name}: {runs[0]} second runs instead of {runs[1]}")
        for part in sorted(now.keys() | before.keys()):
            if now.get(part) != before.get(part):
                place, one, other = first_difference(before.get(part), now.get(part))
                found.append(f"{name}: {part}{place}\n  before {one}\n  now    {other}")
    return found


def first_difference(before: Any, now: Any, place: str = "") -> tuple[str, str, str]:
    """Where two values first differ, and what stands there: an item, or a line of a text."""
    if isinstance(before, str) and isinstance(now, str) and "\n" in before + now:
        return first_difference(before.splitlines(), now.splitlines(), place)
    pairs: list[tuple[object, Any, Any]] = []
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(index, *pair) for index, pair in enumerate(zip(before, now, strict=True))]
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        pairs = [(key, before[key], now[key]) for key in before]
    for key, one, other in pairs:
        if one != other:
            return first_difference(one, other, f"{place}[{key!r}]")
    return place, repr(before)[:WIDTH], repr(now)[:WIDTH]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write records, or compare those of two checkouts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--root", type=Path, default=HERE.parents[2], help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help="where to write the records")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options = parser.parse_args(arguments)
    if options.write is not None:
        os.environ.setdefault("GOLDEN_ROOT", str(options.root))
        write(options.root.resolve(), options.only, options.write)
        return 0
    if options.against is None:
        parser.error("--against a checkout, or --write a file")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("now.json", "before.json")]
        roots = (options.root.resolve(), options.against.resolve())
        running = [made_in(*pair) for pair in zip(roots, [options.only] * 2, files, strict=True)]
        if max([each.wait() for each in running]):
            return 2
        ours, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    found = differences(ours, theirs)
    for line in found[:SHOWN]:
        print(line)
    again = [sum(record["runs"] for record in records.values()) for records in (ours, theirs)]
    print(
        f"{len(ours)} records, {len(found)} differences, {again[0]} second runs ({again[1]} before)"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
