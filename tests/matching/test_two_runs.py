"""Two programs of one model: which operation makes them part, on both sides."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.types import RunComparison
from support import two_engines
from support.needs import needs
from support.schema import told
from support.two_engines import Reference, engine_of, ids

needs("safetensors")

FILE = Path(inspect.getfile(two_engines))
A_NORM, A_ATTENTION = "# the norm of A", "# attention of A"
# For a fault what stands in the line of B, and in that of A; "" for whatever is named there. And
# the change that was tried.
FAULTS = {
    "eps": ("# norm of B", A_NORM, "B with 1e-06 in place of 1e-05"),
    "scale": ("# scale of B", A_ATTENTION, "B with 0.353553 in place of 0.3"),
    "no scale": ("", A_ATTENTION, "A with scale 1 in place of its default"),
    "mask": ("# mask of B", A_ATTENTION, "B with 1 in place of 2"),
    "dropout": ("# dropout of B", A_ATTENTION, "B without this mul"),
    "activation": (
        "# activation of B",
        "functional.silu(self.gate(h))",
        "B with silu in place of gelu",
    ),
    "halves": ("# gate of B", "functional.silu(self.gate(h))", "B reading result 1 of split"),
    "position": ("clamp(max=", "self.positions(torch.arange", "B without this clamp"),
    "weight": (
        "self.w2.t()",
        "self.down(",
        "B with layers.1.down.weight of A in place of blocks.1.w2",
    ),
}


@pytest.fixture
def reference() -> Reference:
    torch.manual_seed(0)
    return Reference().eval()


def by_values(a: nn.Module, b: nn.Module, folder: Path, *inputs: Any) -> RunComparison:
    with torch.no_grad():
        fxguard.record(a, folder / "a", *inputs)
        fxguard.record(b, folder / "b", *inputs)
    found = fxguard.compare(folder / "a", folder / "b")
    assert isinstance(found, RunComparison)
    return found


def test_two_engines_agree(reference: Reference, tmp_path: Path) -> None:
    found = by_values(reference, engine_of(reference), tmp_path, ids())
    assert found.agrees, found
    assert found.outcome == "agree"
    assert found.first is None
    (output,) = found.outputs
    assert output.exact < 1e-10
    assert output.recorded is not None
    assert output.recorded < 1e-6


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_on_both_sides(fault: str, reference: Reference, tmp_path: Path) -> None:
    found = by_values(reference, engine_of(reference, fault), tmp_path, ids())
    assert found.outcome == "operation", found
    first = found.first
    assert first is not None
    assert first.share is not None
    assert first.share > 0.9, found
    *texts, tried = FAULTS[fault]
    for side, text in zip((first.b, first.a), texts, strict=True):
        assert side is not None
        assert side.source is not None
        assert side.source.file == str(FILE)
        assert text in side.source.code, found
    assert f"{FILE.name}:" in "\n".join(found.verdict[:4])
    assert first.tried.startswith(tried), first.tried
    assert f"     tried: {first.tried}" in found.verdict


def test_what_is_unlike_is_said(reference: Reference, tmp_path: Path) -> None:
    """Numbers of an operation, and elements of a weight."""
    eps = by_values(reference, engine_of(reference, "eps"), tmp_path / "1", ids())
    assert eps.first is not None
    assert eps.first.because == "1e-06 in A, 1e-05 in B"
    assert eps.first.places == 2 * two_engines.LAYERS
    weight = by_values(reference, engine_of(reference, "weight"), tmp_path / "2", ids())
    assert weight.first is not None
    assert (
        "blocks.1.w2 of B is not layers.1.down.weight of A: 1 of 2048 elements differ, by up to "
        "0.01" in weight.first.because
    )


def test_a_cast_is_a_matter_of_precision(reference: Reference, tmp_path: Path) -> None:
    """In float64 the programs are the same: the line that rounds has the share."""
    found = by_values(reference, engine_of(reference, "bfloat16"), tmp_path, ids())
    assert found.outcome == "precision", found
    assert not found.agrees
    assert found.divergences == ()
    most = found.roundings[0]
    assert most.side == "B"
    assert most.share > 0.5
    assert most.dtype == "bfloat16"
    assert most.operation.source is not None
    assert "# cast of B" in most.operation.source.code


def test_weights_in_another_dtype(reference: Reference, tmp_path: Path) -> None:
    """Roundings of weights are no other weights."""
    with torch.no_grad():
        fxguard.record(reference, tmp_path / "a", ids())
        fxguard.record(engine_of(reference).bfloat16(), tmp_path / "b", ids())
    found = fxguard.compare(tmp_path / "a", tmp_path / "b")
    assert found.outcome in ("agree", "precision"), found


def test_models_beside_folders_and_without_names_in_common(
    reference: Reference, tmp_path: Path
) -> None:
    """A model is given what a folder holds; two models that share no name are told apart, too."""
    engine = engine_of(reference, "scale")
    with torch.no_grad():
        fxguard.record(reference, tmp_path / "a", ids())
        beside = fxguard.compare(tmp_path / "a", engine)
        given = fxguard.compare(tmp_path / "a", engine, ids())
        models: Any = fxguard.compare(reference, engine, ids())
    for found in (beside, given, models):
        assert isinstance(found, RunComparison)
        assert found.outcome == "operation"
        assert found.first is not None
        assert found.first.b is not None
        assert found.first.b.source is not None
        assert "# scale of B" in found.first.b.source.code


def test_two_models_that_agree(reference: Reference) -> None:
    """Names and operations of one are not those of the other."""
    assert fxguard.compare(reference, engine_of(reference), ids()).agrees


class Halved(nn.Module):
    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) * self.factor  # the last operation
        return found


def test_a_fault_behind_the_last_weight(tmp_path: Path) -> None:
    """Nothing follows that could bring the programs together: outputs correspond by their size."""
    inner = nn.Linear(4, 6)
    found = by_values(Halved(inner, 0.5), Halved(inner, 0.4), tmp_path, torch.randn(3, 4))
    assert found.outcome == "operation"
    assert found.first is not None
    assert found.first.because == "0.5 in A, 0.4 in B"
    assert found.first.b is not None
    assert found.first.b.source is not None
    assert "# the last operation" in found.first.b.source.code


@pytest.mark.parametrize(("fault", "text"), [("activation", "# activation of B"), ("mask", "")])
def test_without_elements(fault: str, text: str, reference: Reference, tmp_path: Path) -> None:
    """Numbers of values say where the last ones that are the same were made."""
    with torch.no_grad():
        fxguard.record(reference, tmp_path / "a", ids(), fingerprints_only=True)
        fxguard.record(engine_of(reference), tmp_path / "b", ids(), fingerprints_only=True)
        fxguard.record(engine_of(reference, fault), tmp_path / "c", ids(), fingerprints_only=True)
    assert fxguard.compare(tmp_path / "a", tmp_path / "b").agrees
    found = fxguard.compare(tmp_path / "a", tmp_path / "c")
    assert isinstance(found, RunComparison)
    assert found.outcome == "operation"
    assert found.first is not None
    assert found.first.b is not None
    assert found.first.b.source is not None
    assert text in found.first.b.source.code
    assert told("RunComparison", json.loads(found.to_json())) == []


def test_nothing_in_common(tmp_path: Path) -> None:
    found = by_values(nn.Linear(4, 6), nn.Linear(4, 7), tmp_path, torch.randn(3, 4))
    assert found.outcome == "not compared"
    assert "no output of B corresponds" in found.verdict[0]


def test_the_number_that_matters(reference: Reference, tmp_path: Path) -> None:
    """Its operations are recorded, and it is an output."""

    def loss(logits: Tensor) -> Tensor:
        return logits.reshape(2, -1, two_engines.VOCAB).logsumexp(-1).mean()

    for name, model in (("a", reference), ("b", engine_of(reference, "eps"))):
        fxguard.record(model, tmp_path / name, ids(), of=loss)
    found = fxguard.compare(tmp_path / "a", tmp_path / "b")
    assert isinstance(found, RunComparison)
    assert found.outputs[0].b == "of"
    assert found.outcome == "operation"


def test_gradients(reference: Reference, tmp_path: Path) -> None:
    """The backward is recorded, too: each gradient of B is one of A, or part of it is."""
    for name, model in (("a", reference), ("b", engine_of(reference))):
        fxguard.record(model, tmp_path / name, ids(), of=lambda x: x.square().sum(), gradients=True)
    found = fxguard.compare(tmp_path / "a", tmp_path / "b")
    assert isinstance(found, RunComparison)
    assert found.agrees, found
    assert any(each.b == "grad of gain" for each in found.outputs)


def test_the_record(reference: Reference, tmp_path: Path) -> None:
    """Text, JSON by the schema, a page, a notebook."""
    found = by_values(reference, engine_of(reference, "scale"), tmp_path, ids())
    data = json.loads(found.to_json())
    assert told("RunComparison", data) == []
    assert told("", data) == []
    assert data["agrees"] is False
    assert str(found) == repr(found)
    found.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Where they part" in text
    assert "# scale of B" in text
    assert "<script" not in text
    assert "they part first at" in found._repr_html_()
    cast = by_values(reference, engine_of(reference, "bfloat16"), tmp_path / "2", ids())
    assert told("RunComparison", json.loads(cast.to_json())) == []
    cast.to_html(tmp_path / "page.html")
    assert "Roundings" in (tmp_path / "page.html").read_text()
