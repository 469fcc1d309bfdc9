"""Module frames are those of transformers' ``DebugUnderflowOverflow``, to the printed digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.debug_utils

import fxguard
from fxguard.report.text import frame_text
from support import transformers_frames, zoo

# Most models in evaluation, and one in training with a mask.
IN_CI = [
    ("encoder", True, True),
    *((name, False, False) for name in ("t5", "bert", "resnet", "cnn", "lstm")),
    *((name, False, False) for name in ("twice", "in_place", "containers")),
]
VARIANTS = [
    pytest.param(
        *(name, train, masked),
        id=f"{name}-{mode}-{mask}",
        marks=() if (name, train, masked) in IN_CI else pytest.mark.campaign,
    )
    for name, entry in zoo.ZOO.items()
    for train, mode in ((True, "train"), (False, "eval"))
    for masked, mask in (
        ((False, "plain"), (True, "masked")) if entry.has_mask else ((False, "plain"),)
    )
]


@pytest.fixture(autouse=True)
def original_that_takes_booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original crashes on bool tensors, one of its listed defects: give it floats instead."""
    numbers = transformers.debug_utils.get_abs_min_max

    def of_any_dtype(var: torch.Tensor, ctx: str) -> str:
        return numbers(var.float() if var.dtype == torch.bool else var, ctx)

    monkeypatch.setattr(transformers.debug_utils, "get_abs_min_max", of_any_dtype)


def numbers_in(rows: list[tuple[str, str]]) -> list[str]:
    return [numbers for _, numbers in rows if numbers not in ("None", "not a tensor")]


@pytest.mark.parametrize(("name", "train", "masked"), VARIANTS)
def test_module_frames_are_those_of_the_original(name: str, train: bool, masked: bool) -> None:
    """Same modules in the same order, same weights, same numbers in every tensor output."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, masked)

    torch.manual_seed(3)
    expected = transformers_frames.parse(
        transformers_frames.traced_frames(entry.model(train=train), args, kwargs)
    )
    model = fxguard.instrument(entry.model(train=train), granularity="module")
    # The model's own random numbers (dropout) follow those that its weights took.
    torch.manual_seed(0)
    entry.build()
    model(*args, **kwargs)

    frames = fxguard.guard_of(model).frames()
    actual = transformers_frames.parse("\n".join(map(frame_text, frames)))
    assert [(f.name, f.kind) for f in actual] == [(f.name, f.kind) for f in expected]
    compared = 0
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.weights == theirs.weights
        if theirs.outputs == [("output", "not a tensor")]:
            continue  # a dict, a list or a ModelOutput: the original does not look inside
        assert numbers_in(ours.outputs) == numbers_in(theirs.outputs), ours.name
        compared += len(numbers_in(theirs.outputs))
    assert compared >= len(expected) // 2


def overflowing(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    entry = zoo.ZOO[name]
    model = entry.model(dtype)
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[0] = torch.inf
    return model, *entry.inputs(dtype, False)


@pytest.mark.parametrize("name", ["gpt2", "cnn", "vit"])
@pytest.mark.parametrize("frames", [3, 21])
def test_the_drop_in_prints_what_the_original_prints(
    name: str, frames: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A detection is reported line by line as by the original, which sees no keyword inputs."""
    model, args, kwargs = overflowing(name)
    transformers.debug_utils.DebugUnderflowOverflow(model, max_frames_to_save=frames)
    with pytest.raises(ValueError, match="DebugUnderflowOverflow"):
        model(*args, **kwargs)
    expected = original_lines(capsys.readouterr().out)

    model, args, kwargs = overflowing(name)
    fxguard.DebugUnderflowOverflow(model, max_frames_to_save=frames)
    with pytest.raises(fxguard.NonFiniteError):
        model(*args, **kwargs)
    assert our_lines(capsys.readouterr().out) == expected


def original_lines(printed: str) -> list[str]:
    """Without what is printed as it goes ("output has infs"), and without unopened containers."""
    noise = (" has infs", " has nans", "not a tensor output")
    return [line for line in printed.splitlines() if not line.endswith(noise)]


def our_lines(printed: str) -> list[str]:
    """Without the rows of keyword inputs and of containers, which the original cannot see."""
    return [line for line in printed.splitlines() if not is_beyond_the_original(line)]


def is_beyond_the_original(line: str) -> bool:
    kind, bracket, key = line[18:].rstrip("]").partition("[")
    return bool(bracket) and kind in ("input", "output") and not key[0].isdigit()


def test_the_drop_in_traces_as_the_original_does(capsys: pytest.CaptureFixture[str]) -> None:
    """The frames of a traced batch are the same lines; other batches print nothing."""
    entry = zoo.ZOO["cnn"]
    args, kwargs = entry.inputs(torch.float32, False)
    model = entry.model()
    transformers.debug_utils.DebugUnderflowOverflow(model, trace_batch_nums=[1])
    for _ in range(3):
        model(*args, **kwargs)
    expected = transformers_frames.parse(capsys.readouterr().out)

    model = entry.model()
    fxguard.DebugUnderflowOverflow(model, trace_batch_nums=[1])
    for _ in range(3):
        model(*args, **kwargs)
    printed = capsys.readouterr().out
    assert transformers_frames.parse(printed) == expected
    assert printed.count("*** Starting batch number=1 ***") == 1
    assert printed.count("*** Finished batch number=1 ***") == 1
    assert "batch number=0" not in printed


def test_the_drop_in_stops_after_a_batch() -> None:
    """`abort_after_batch_num` ends the run when that batch has finished, as a ValueError."""
    entry = zoo.ZOO["twice"]
    args, kwargs = entry.inputs(torch.float32, False)
    model = entry.model()
    fxguard.DebugUnderflowOverflow(model, abort_after_batch_num=1)
    model(*args, **kwargs)
    with pytest.raises(fxguard.BatchLimitReached) as caught:
        model(*args, **kwargs)
    assert isinstance(caught.value, ValueError)


def test_the_drop_in_raises_on_masks_and_can_be_removed() -> None:
    """Like the original it raises on any inf in an input, intended or not; unlike it, it goes."""
    entry = zoo.ZOO["encoder"]
    args, kwargs = entry.inputs(torch.float32, False)
    model = entry.model()
    debug = fxguard.DebugUnderflowOverflow(model)
    with pytest.raises(fxguard.NonFiniteError):
        model(*args, **kwargs)
    debug.remove()
    model(*args, **kwargs)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_drop_in_works_compiled(fullgraph: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Under torch.compile the original breaks the graph at every module; the drop-in does not."""
    model, args, kwargs = overflowing("cnn")
    fxguard.DebugUnderflowOverflow(model)
    with pytest.raises(fxguard.NonFiniteError):
        torch.compile(model, backend="eager", fullgraph=fullgraph)(*args, **kwargs)
    compiled = capsys.readouterr().out
    with pytest.raises(fxguard.NonFiniteError):
        model(*args, **kwargs)
    assert compiled.splitlines()[-6:] == capsys.readouterr().out.splitlines()[-6:]
