"""A bad element at operations of the zoo's models, in the ways in which a model runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from support.planting import FAULTS, NOTHING
from support.trials import MODELS, Trial

from ..records import Cases, Group, Record, of_reports, raised_by

REPLAY = {"replay": True}
PLAIN = ("cnn", "lstm", "encoder", "twice", "in_place", "containers", "checkpointed")
TEXT = ("t5", "llama", "gpt2", "bert", "mixtral", "whisper")
IMAGES = ("vit", "resnet")

# Models, backend, dtype, whether they train, options of instrument, and each how many sites.
PLANTED: list[tuple[tuple[str, ...], str, str, bool, dict[str, Any], int]] = [
    (PLAIN, "eager", "float32", False, {}, 1),
    (PLAIN, "aot_eager", "float32", False, {}, 3),
    (PLAIN, "python", "float32", False, {}, 3),
    (PLAIN, "eager", "float32", True, {}, 3),
    (PLAIN, "eager", "float32", False, REPLAY, 3),
    (PLAIN, "eager", "float32", True, REPLAY, 5),
    (PLAIN, "eager", "bfloat16", False, {}, 3),
    (PLAIN, "eager", "float16", False, {}, 5),
    (PLAIN, "eager", "float32", False, {"granularity": "module"}, 5),
    (TEXT, "eager", "float32", False, {}, 17),
    (TEXT, "eager", "float32", True, REPLAY, 53),
    (TEXT[:3], "aot_eager", "float32", False, {}, 47),
    (TEXT[:3], "python", "float32", False, {}, 47),
    (IMAGES, "eager", "float32", True, {}, 11),
    (IMAGES, "eager", "bfloat16", False, {}, 19),
    (IMAGES, "eager", "float32", False, REPLAY, 31),
]


def cases() -> Cases:
    """One capture for each way; the fault is a switch in the graph."""
    for names, backend, dtype, train, options, every in PLANTED:
        for name in names:
            way = "".join(map(str, options.values()))
            title = f"{name}/{backend}/{dtype}/{'train' if train else 'eval'}{way}"
            make = functools.partial(trial_of, name, backend, dtype, train, options)
            yield title, Group(functools.partial(of_one_model, make, every))


def of_one_model(make: Callable[[], Trial], every: int) -> Cases:
    """The healthy run, and faults at each so many sites."""
    trial = make()
    with trial.planter.installed():
        yield "none", functools.partial(reported, trial)
        for site in range(every // 2, len(trial.planter.sites), every):
            fault = list(FAULTS)[site // every % 2]
            yield f"{site}/{fault}", functools.partial(reported, trial, site, fault)


def trial_of(name: str, backend: str, dtype: str, train: bool, options: dict[str, Any]) -> Trial:
    """A guarded model of the zoo; ``strict`` where nothing else is asked for."""
    torch._dynamo.reset()
    entry, kind = MODELS[name], getattr(torch, dtype)
    inputs = entry.inputs(kind, entry.has_mask)
    return Trial(entry.model(kind, train), inputs, backend, options or {"strict": True})


def reported(trial: Trial, site: int = NOTHING, fault: str = "nan") -> Record:
    """What is said of one forward with a fault, and what the model then raised."""

    def run() -> Record:
        error = trial.run(site, fault)
        return {} if error is None else {"raised": f"{type(error).__name__}: {error}"}

    return {**raised_by(run), **of_reports(trial.reports, trial.model)}
