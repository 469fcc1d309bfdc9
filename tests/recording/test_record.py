"""One batch of a model as a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves

import fxguard
from fxguard.recording.folder import read_folder
from fxguard.recording.recorded import numbers_of
from fxguard.recording.replay import Replay
from support.needs import needs

needs("safetensors")


class Writes(nn.Module):
    """Views, writes into views, statistics, and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.register_buffer("cache", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x))
        self.cache[1:, :4] = h[1:, 4:]
        h[0].mul_(2)
        half = h[:, :4]
        half += 1
        found: Tensor = torch.cat([h, self.cache], 1).relu_()
        return found


def recorded(folder: Path, model: nn.Module, *inputs: Any, **settings: Any) -> Any:
    fxguard.record(model, folder, *inputs, **settings)
    return read_folder(folder)


def test_the_model_is_what_it_was(tmp_path: Path) -> None:
    """Outputs, buffers, random numbers and hooks are those of a call without a record."""
    torch.manual_seed(0)
    one, two = Writes(), Writes()
    two.load_state_dict(one.state_dict())
    drop = nn.Dropout(0.5)
    x = torch.randn(3, 4)
    torch.manual_seed(1)
    plain = drop(one(x))
    torch.manual_seed(1)
    output = fxguard.record(nn.Sequential(two, drop), tmp_path / "a", x)
    assert torch.equal(output, plain)
    assert output.requires_grad
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert not two._forward_hooks
    assert not two._forward_pre_hooks


def test_a_record_runs_again(tmp_path: Path) -> None:
    """In float64, with all writes: the result is that of the model in float64."""
    torch.manual_seed(0)
    model, x = Writes(), torch.randn(3, 4)
    wide = Writes().double()
    wide.load_state_dict(model.state_dict())
    recording = recorded(tmp_path / "a", model, x)
    replay = Replay(recording)
    for operation in recording.operations:
        replay.run(operation)
    ((name, value),) = recording.outputs
    assert name == "output"
    assert replay.not_run == {}
    assert torch.allclose(replay.now[value], wide(x.double()), rtol=1e-12, atol=1e-12)
    assert {leaf.kind for leaf in recording.leaves} >= {"weight", "buffer", "input"}
    assert "other" not in {leaf.kind for leaf in recording.leaves}


def test_lines_and_modules(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "a", nn.Sequential(Writes()), torch.randn(3, 4))
    (relu,) = (each for each in recording.operations if each.kind == "relu_")
    assert relu.module == "0"
    assert relu.source is not None
    assert relu.source.file == __file__
    assert "relu_()" in relu.source.code
    assert any(each.module == "0.up" for each in recording.operations)


def test_random_numbers_are_those_that_were_drawn(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "a", nn.Dropout(0.5), torch.ones(4, 4, requires_grad=True))
    replay = Replay(recording)
    for operation in recording.operations:
        replay.run(operation)
    assert list(replay.not_run.values()) == ["it draws random numbers"]
    ((_, value),) = recording.outputs
    assert torch.equal(replay.now[value].float(), recording.data[value])


def test_another_process_compares(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Writes().eval()
    fxguard.record(model, tmp_path / "a", torch.ones(3, 4))
    fxguard.record(model, tmp_path / "b", torch.ones(3, 4))
    script = (
        "import sys, fxguard\n"
        "found = fxguard.compare(sys.argv[1], sys.argv[2])\n"
        "print(found.outcome, found.same == found.values)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("agree"), done.stdout


def test_a_compiled_model_runs_as_its_source_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(2, 4))
    fxguard.record(compiled, tmp_path / "a", torch.ones(2, 4))
    fxguard.record(model, tmp_path / "b", torch.ones(2, 4))
    assert fxguard.compare(tmp_path / "a", tmp_path / "b").agrees


class Odd(nn.Module):
    """Sparse tensors, FFTs, sizes that depend on elements, an operation of higher order."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        q = x.view(1, 1, 4, 4)
        return {
            "sparse": x.to_sparse().to_dense(),
            "fft": torch.fft.fft(x).abs(),
            "where": x.nonzero(),
            "attention": flex_attention(q, q, q),
            "vmap": torch.func.vmap(lambda row: (row * row).sum())(x),
            "float8": x.to(torch.float8_e4m3fn).float(),
        }


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        ragged = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
        found: Tensor = (ragged * 2).values()
        return found


ODD: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "odd": (Odd, torch.randn(4, 4)),
    "nested": (Nested, torch.randn(4, 4)),
    "recurrent": (lambda: nn.LSTM(4, 4), torch.randn(3, 2, 4)),
    "complex": (lambda: nn.Linear(4, 4).to(torch.complex64), torch.randn(2, 4) + 0j),
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))), torch.randn(2, 4)),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), torch.randn(2, 4, device="meta")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_do_no_harm(name: str, tmp_path: Path) -> None:
    """A model runs as without a record; what has no elements is not kept."""
    make, x = ODD[name]
    model = make()
    plain, output = model(x), fxguard.record(model, tmp_path / "a", x)
    for one, two in zip(tree_leaves(plain), tree_leaves(output), strict=True):
        assert one.is_meta or torch.equal(one, two)
    found: Any = fxguard.compare(tmp_path / "a", tmp_path / "a")
    assert found.outcome in ("agree", "not compared"), found


def test_how_much_is_kept(tmp_path: Path) -> None:
    """Weights and inputs first; numbers of everything."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8)
    weights = sum(p.numel() for p in model.parameters()) * 4 + x.numel() * 4
    some = recorded(tmp_path / "a", model, x, max_bytes=weights)
    assert {leaf.value for leaf in some.leaves} == set(some.data)
    none = recorded(tmp_path / "b", model, x, fingerprints_only=True)
    assert none.data == {}
    assert len(none.values) == len(some.values)
    assert none.values[-1].numbers.largest > 0
    # What was not kept is computed from what was.
    assert fxguard.compare(tmp_path / "a", model, x).agrees


def test_a_record_is_not_overwritten(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    fxguard.record(model, tmp_path / "a", x)
    with pytest.raises(fxguard.FxguardError, match="a record is not overwritten"):
        fxguard.record(model, tmp_path / "a", x)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(fxguard.FxguardError, match="exists"):
        fxguard.record(model, tmp_path / "file", x)
    (tmp_path / "empty").mkdir()
    fxguard.record(model, tmp_path / "empty", x)


def test_what_raises_raises_as_it_does_and_leaves_nothing(tmp_path: Path) -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(3)

    with pytest.raises(KeyError):
        fxguard.record(Raises(), tmp_path / "a", torch.ones(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (lambda data: data.update(fxguard_recording=9), "of version 9"),
        (lambda data: data.pop("values"), "KeyError"),
        (lambda data: data["values"][0].__setitem__(0, [2**50]), "too large"),
        (lambda data: data["values"][0].__setitem__(1, "nothing"), "KeyError"),
        (lambda data: data["leaves"].append([10**6, "weight", "x"]), "not there"),
        (lambda data: data["operations"][0].update(args=[{"value": -1}]), "no recording holds"),
        (lambda data: data["operations"][0].update(args=[{"eval": "1"}]), "no recording holds"),
        (lambda data: data.update(operations=3), "TypeError"),
    ],
)
def test_damaged_folders_are_refused(problem: Any, text: str, tmp_path: Path) -> None:
    fxguard.record(nn.Linear(2, 2), tmp_path / "a", torch.ones(1, 2))
    file = tmp_path / "a" / "record.json"
    data = json.loads(file.read_text())
    problem(data)
    file.write_text(json.dumps(data))
    with pytest.raises(fxguard.FxguardError, match=text):
        fxguard.compare(tmp_path / "a", tmp_path / "a")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fxguard.FxguardError, match=r"it has no record\.json"):
        fxguard.compare(tmp_path, tmp_path)
    fxguard.record(nn.Linear(2, 2), tmp_path / "a", torch.ones(1, 2))
    (tmp_path / "a" / "values.safetensors").write_bytes(b"nonsense")
    with pytest.raises(fxguard.FxguardError, match="no record that can be read"):
        fxguard.compare(tmp_path / "a", tmp_path / "a")


@pytest.mark.parametrize(
    "name",
    ["aten.from_file.default", "os.system", "mylib.op.default", "aten.nothing.default", "aten"],
)
def test_only_operations_of_torch_run_again(name: str, tmp_path: Path) -> None:
    """An operation of another name is what was recorded, and said."""
    fxguard.record(nn.Linear(2, 2), tmp_path / "a", torch.ones(1, 2))
    file = tmp_path / "a" / "record.json"
    data = json.loads(file.read_text())
    data["operations"][-1]["name"] = name
    file.write_text(json.dumps(data))
    found: Any = fxguard.compare(tmp_path / "a", tmp_path / "a")
    assert found.outcome == "agree"
    assert "not one of torch's own operations" in dict(found.not_compared).values()


def test_an_operation_that_would_allocate_more_does_not_run(tmp_path: Path) -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.zeros(2)

    fxguard.record(Makes(), tmp_path / "a", torch.ones(1, 2))
    file = tmp_path / "a" / "record.json"
    data = json.loads(file.read_text())
    (zeros,) = (each for each in data["operations"] if each["name"].startswith("aten.zeros"))
    zeros["args"][0] = [2**44]
    file.write_text(json.dumps(data))
    found: Any = fxguard.compare(tmp_path / "a", tmp_path / "a")
    assert any("another shape" in why for why in dict(found.not_compared).values())


def test_wrong_use(tmp_path: Path) -> None:
    model: Any = 3
    with pytest.raises(fxguard.FxguardError, match=r"needs a torch\.nn\.Module"):
        fxguard.record(model, tmp_path / "a")
    with pytest.raises(fxguard.FxguardError, match="max_bytes"):
        fxguard.record(nn.Linear(1, 1), tmp_path / "a", torch.ones(1), max_bytes=-1)
    with pytest.raises(fxguard.FxguardError, match="Modules, or folders"):
        fxguard.compare(model, nn.Linear(1, 1))


def test_numbers_do_not_change_with_the_order_of_elements() -> None:
    x = torch.randn(4, 6)
    one, two = numbers_of(x), numbers_of(x.t().flip(0))
    assert all(abs(p - q) < 1e-12 for p, q in zip(one, two, strict=True))
    assert numbers_of(torch.tensor([1.0, float("inf"), float("nan")])).not_finite == 2
    assert numbers_of(torch.empty(0)) == (0.0, 0.0, 0.0, 0.0, 0)
    assert numbers_of(torch.tensor([3 + 4j])).sum_of_squares == 25
