"""Origins that are one finding are told once: a line in a loop, a line of equal layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.records import Source
from fxguard.report.groups import by_cause
from support.t5_overflow import OVERFLOW


class Filter(nn.Module):
    """A filter whose variance is negative from the second turn on."""

    def __init__(self, noise: float = -0.95) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.tensor([noise]))

    def forward(self, observed: Tensor) -> Tensor:
        variance, total = torch.ones(1), torch.zeros(1)
        for each in observed:
            total = total + (variance + self.noise).log() + each
            variance = variance * 0.9
        return total.sum()


class Roots(nn.Module):
    """Equal layers, each of which returns what it made as well."""

    def __init__(self, lows: list[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Log, lows))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


class Log(nn.Module):
    """The logarithm of the distance from a number."""

    def __init__(self, low: float) -> None:
        super().__init__()
        self.low = low

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.low).log()


def report_of(model: nn.Module, x: Tensor) -> fxguard.types.Report:
    """The report on one call."""
    with pytest.raises(fxguard.NonFiniteError) as caught:
        fxguard.instrument(model)(x)
    return caught.value.report


def test_a_line_that_failed_in_many_turns_is_one_finding() -> None:
    """The first turn has its numbers; the others are counted, and listed in the origins."""
    report = report_of(Filter(), torch.zeros(26))
    assert len(report.origins) == 25
    heads = [line for line in report.verdict if "log made" in line]
    assert len(heads) == 1
    more = "  and 24 more like it, the last in run 25 of this line in this call, from 0"
    assert report.verdict.index(more) < 7
    assert len(report.verdict) < 12
    alone = report_of(Filter(), torch.zeros(2))
    assert not any("like it" in line for line in alone.verdict)


def test_equal_layers_are_one_finding_with_their_names() -> None:
    """Three names and a count; a layer that fails for another cause is another finding."""
    report = report_of(Roots([1.0] * 6), torch.ones(2))
    assert sum("log in" in line for line in report.verdict) == 1
    assert "  and 5 more like it: in layers.1, layers.2, layers.3 and 2 more" in report.verdict
    mixed = report_of(Roots([1.0, 2.0, 1.0, 2.0]), torch.ones(2))
    heads = [line.rpartition(": ")[2] for line in mixed.verdict if "log in" in line]
    assert heads == ["log of zero", "log of a negative number"]
    assert [line for line in mixed.verdict if "like it" in line] == [
        "  and 1 more like it: in layers.2",
        "  and 1 more like it: in layers.3",
    ]


def test_what_followed_and_what_was_absorbed_is_grouped_as_well() -> None:
    """One line of each kind, with a count."""
    line = Source("model.py", 7, "")
    frames = [
        dataclasses.replace(OVERFLOW.frame, name=f"layers.{i}", source=line) for i in range(3)
    ]
    many = [dataclasses.replace(OVERFLOW, frame=frame) for frame in frames]
    report = fxguard.types.Report(0, (), (many[0],), absorbed=tuple(many))
    [note] = [text for text in report.verdict if text.startswith("note: ")]
    assert note.endswith("; and 2 more like it: in layers.1, layers.2")
    followed = tuple(dataclasses.replace(origin, follows=True) for origin in many)
    last = fxguard.types.Report(0, (), (many[0], *followed)).verdict[-1]
    assert last == f"then {many[0].message} of it, and 2 more like it: in layers.1, layers.2"


@pytest.mark.parametrize(
    "change",
    [
        {"what": "add"},
        {"problem": "nan"},
        {"cause": "underflow"},
        {"cause_in_words": "another"},
        {"harm": "what left the model is wrong"},
        {"follows": True},
        {"frame": dataclasses.replace(OVERFLOW.frame, source=Source("other.py", 7, ""))},
        {"frame": dataclasses.replace(OVERFLOW.frame, phase="loss")},
    ],
)
def test_what_differs_is_told_apart(change: dict[str, object]) -> None:
    """Another operation, line, phase, problem or cause is another finding."""
    other = dataclasses.replace(OVERFLOW, **change)  # type: ignore[arg-type]
    assert by_cause([OVERFLOW, other, OVERFLOW]) == [[OVERFLOW, OVERFLOW], [other]]


def test_operations_without_a_line_are_told_one_by_one() -> None:
    """Nothing says that they are the same code."""
    frame = dataclasses.replace(OVERFLOW.frame, source=None)
    bare = dataclasses.replace(OVERFLOW, frame=frame)
    other = dataclasses.replace(bare, frame=dataclasses.replace(frame, name="other"))
    assert by_cause([bare, other]) == [[bare], [other]]
