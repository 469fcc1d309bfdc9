"""One bad element is planted at every operation in turn: the report has to blame that operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import fxguard
from fxguard.types import Frame, Origin
from support import zoo
from support.planting import FAULTS, Site
from support.trials import MODELS, Trial

# Every model in each of these ways. "python" has no graphs: all operations run between them.
WAYS = [
    ("eager", torch.float32, False),
    ("eager", torch.float32, True),
    ("eager", torch.bfloat16, False),
    ("aot_eager", torch.float32, False),
    ("python", torch.float32, False),
    ("python", torch.float32, True),
]
# Small models in three ways: each kind of fault in eager mode, else NaN. T5 takes half a minute for
# each kind of fault.
SAMPLE = {
    *((name, *WAYS[0], fault) for name in MODELS.keys() - zoo.TRANSFORMERS for fault in FAULTS),
    *((name, *WAYS[3], "nan") for name in ("cnn", "encoder", "in_place", "checkpointed")),
    *((name, *WAYS[4], "nan") for name in ("cnn", "lstm", "encoder", "checkpointed")),
}
VARIANTS = [
    pytest.param(
        *(name, backend, dtype, train, fault),
        id=f"{name}-{backend}-{str(dtype)[6:]}-{'train' if train else 'eval'}-{fault}",
        marks=() if (name, backend, dtype, train, fault) in SAMPLE else pytest.mark.campaign,
    )
    for backend, dtype, train in WAYS
    for name in MODELS
    for fault in FAULTS
]
INDUCTOR = [
    pytest.param("twice", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.campaign) for name in ("cnn", "in_place", "one_layer")),
]


Record = Callable[[str, object], None]


@dataclass
class Result:
    """What came of the plantings in one model."""

    title: str
    planted: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def found(self) -> int:
        return self.planted - len(self.wrong)

    def __str__(self) -> str:
        line = f"{self.title}: found {self.found} / planted {self.planted}"
        if self.left_out:
            line += f"; left out: {', '.join(f'{n} {why}' for why, n in self.left_out.items())}"
        return "\n  ".join([line, *self.wrong])


def plant_everywhere(trial: Trial, faults: Sequence[str], title: str) -> Result:
    """Run a model once for each of its operations, and judge each report."""
    result = Result(title)
    with trial.planter.installed():
        trial.run()
        honest = {identity(origin) for origin in trial.origins}
        guard = fxguard.guard_of(trial.model)
        sites = list(trial.planter.sites)
        assert guard.coverage().startswith(f"checked {trial.planter.operations} of ")
        places = frame_numbers(sites, guard.frames())
        for number, (site, place) in enumerate(zip(sites, places, strict=True)):
            for fault in faults:
                if excuse := site.excuse(fault):
                    result.left_out[excuse] += 1
                    continue
                result.planted += 1
                error = trial.run(number, fault)
                if wrong := mistake(trial, site, fault, place, honest):
                    raised = f"; the model raised {error!r}" if error else ""
                    what = f"{fault} at {site.kind} in {site.module!r} at {site.line}"
                    result.wrong.append(f"{number}: {what}: {wrong}{raised}")
        assert len(trial.planter.sites) == len(sites), "captured again in the meantime"
    print(result)
    return result


def identity(origin: Origin) -> tuple[str, int, str]:
    return origin.what, origin.frame.index, origin.problem


def frame_numbers(sites: Sequence[Site], frames: Sequence[Frame]) -> list[range]:
    """Which frames may show each site: the n-th operation of a line is in its n-th frame.

    An operation that has no frame of its own is shown later than all operations before it.
    """
    numbers: list[range] = []
    after = -1
    for site in sites:
        if not site.has_frame:
            numbers.append(range(after + 1, len(frames)))
            continue
        same = [s.operation for s in sites if (s.kind, place_of(s)) == (site.kind, place_of(site))]
        found = [frame.index for frame in frames if shows(frame, site)]
        assert len(found) == len(set(same)), f"{len(found)} frames for {site}"
        after = found[list(dict.fromkeys(same)).index(site.operation)]
        numbers.append(range(after, after + 1))
    return numbers


def place_of(shown: Site | Frame) -> tuple[str, str, int]:
    """Module, file, line."""
    if isinstance(shown, Site):
        return (shown.module, *(shown.line or ("", 0)))
    source = shown.source
    return (shown.name, source.file, source.line) if source else (shown.name, "", 0)


def shows(frame: Frame, site: Site) -> bool:
    """Whether a frame is that of an operation of this kind, or of a module that is just that."""
    if place_of(frame) != place_of(site):
        return False
    return frame.kind == site.kind if frame.is_op else frame.source is not None


def mistake(
    trial: Trial, site: Site, fault: str, place: range, honest: set[tuple[str, int, str]]
) -> str | None:
    """What is wrong in a report: its first origin that is not honest has to be the site."""
    fresh = [origin for origin in trial.origins if identity(origin) not in honest]
    if not fresh:
        return "not found"
    first = fresh[0]
    if (first.what, first.problem) != (site.kind, fault):
        return f"blamed {first.message}"
    if place_of(first.frame) != place_of(site):
        return f"blamed {first.message}, shown by {first.frame.title}"
    if first.frame.index not in place:
        return f"frame {first.frame.index} instead of {place}"
    last = trial.reports[0].frames[-1]
    if site.has_frame and not honest and last.index != first.frame.index:
        return f"the frames end with {last.title}"
    count = first.nan_count if fault == "nan" else first.posinf_count
    if count is None and (trial.model.training or first.follows):
        return None  # batch_norm wrote what a second run would read; or it read an honest inf
    return None if count == 1 else f"{count} bad elements"


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "backend", "dtype", "train", "fault"), VARIANTS)
def test_the_planted_operation_is_blamed(
    name: str,
    backend: str,
    dtype: torch.dtype,
    train: bool,
    fault: str,
    device: torch.device,
    record_property: Record,
) -> None:
    """Kind, module, line and occurrence are those of the planted operation, every time."""
    entry = MODELS[name].on(device)
    trial = Trial(entry.model(dtype, train), entry.inputs(dtype, entry.has_mask), backend)
    result = plant_everywhere(trial, [fault], f"{name} {backend}")
    record_property("planted", (result.title, result.found, result.planted))
    assert result.planted
    assert not result.wrong, str(result)


def one_layer() -> zoo.Entry:
    """A BERT of one layer."""
    entry = zoo.ZOO["bert"]

    def build() -> nn.Module:
        model = entry.build()
        del model.bert.encoder.layer[1:]
        return model

    return zoo.Entry("one_layer", build, entry.inputs, entry.has_mask)


@pytest.mark.parametrize("name", INDUCTOR)
def test_the_planted_operation_is_blamed_under_inductor(
    name: str, device: torch.device, record_property: Record
) -> None:
    """What Inductor fuses away is blamed as exactly."""
    entry = (one_layer() if name == "one_layer" else MODELS[name]).on(device)
    trial = Trial(entry.model(), entry.inputs(torch.float32, entry.has_mask), "inductor")
    result = plant_everywhere(trial, list(FAULTS), f"{name} inductor")
    record_property("planted", (result.title, result.found, result.planted))
    assert result.planted
    assert not result.wrong, str(result)


def test_what_is_not_planted_is_not_blamed() -> None:
    """The clean twin: in rewritten graphs no run without a fault makes a report."""
    entry = MODELS["bert"]
    trial = Trial(entry.model(), entry.inputs(torch.float32, entry.has_mask), "eager")
    with trial.planter.installed():
        for _ in range(2):
            trial.run()
            assert trial.planter.sites
            assert not trial.reports
