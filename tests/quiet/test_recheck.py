"""``recheck=N``: a flipped bit is found and named, and nothing else is."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.quiet._memory import Memory, flipped_bit, sums_of
from fxguard.quiet._twice import Twice, Unlike, same_bits
from support.torchrun import torchrun

STEPS, EVERY, AT = 6, 2, 3  # the fourth step is rechecked

_calls = {"flip_at": -1, "count": 0}
_library = torch.library.Library("fxguard_recheck", "DEF")
_library.define("scale(Tensor x) -> Tensor")
_library.define("varies(Tensor x) -> Tensor")
_library.define("scatter_add(Tensor x) -> Tensor")


@torch.compiler.disable
def flip(tensor: Tensor, bit: int = 22, at: int = 3) -> None:
    """Flip one bit as a particle does: nobody is told."""
    memory = (ctypes.c_int32 * tensor.numel()).from_address(tensor.data_ptr())
    memory[at] ^= 1 << bit


def _scale(x: Tensor) -> Tensor:
    found = x * 2.0
    _calls["count"] += 1
    if _calls["count"] == _calls["flip_at"]:
        flip(found)
    return found


def _varies(x: Tensor) -> Tensor:
    _calls["count"] += 1
    return x + _calls["count"] * 1e-6


for _name, _function in {"scale": _scale, "varies": _varies, "scatter_add": _varies}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    _library.impl(_name, torch.empty_like, "Meta")


class Custom(torch.autograd.Function):
    """An operation of the library, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        found: Tensor = getattr(torch.ops.fxguard_recheck, name)(x)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2, None


class Net(nn.Module):
    """A network with an operation in its middle."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.a, self.b, self.name = nn.Linear(8, 16), nn.Linear(16, 8), name

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = Custom.apply(x, self.name) if self.name else x * 2  # type: ignore[no-untyped-call]
        found: Tensor = self.b(x)
        return found


@pytest.fixture(autouse=True)
def _counts() -> None:
    _calls.update(flip_at=-1, count=0)


class Trained:
    """A training of some steps, with or without a second look.

    Args:
        model: it.
        every: N, or None.
        in_step: called in each step, before it and behind it, with what happens now.
        compiler: a backend.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int | None = EVERY,
        in_step: Callable[[str, int, nn.Module], None] | None = None,
        compiler: str = "",
    ) -> None:
        torch.manual_seed(1)
        x, y = torch.randn(32, 8), torch.randn(32, 8)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        ran = torch.compile(model, backend=compiler) if compiler else model
        tell = in_step or (lambda what, step, model: None)
        self.losses = list[float]()
        with fxguard.watch(model, recheck=every):
            for step in range(STEPS):
                optimizer.zero_grad()
                tell("begins", step, model)
                loss = (ran(x) - y).square().mean()
                tell("forward", step, model)
                loss.backward()
                tell("backward", step, model)
                optimizer.step()
                tell("stepped", step, model)
                self.losses.append(loss.item())
            guard = fxguard.guard_of(model)
            self.faults, self.coverage = list(guard.quiet_faults), guard.coverage()
        state = model.state_dict().values()  # statistics as well
        self.weights = [x.detach().clone() for x in state]
        self.random = torch.get_rng_state()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("compiler", ["", "aot_eager"])
def test_an_operation_that_is_wrong_once(compiler: str) -> None:
    """Named with its line, and with the bit: in eager mode by itself, compiled by its graph."""
    for call in (5, 6):  # the first of the two runs, and the second
        _calls.update(flip_at=call, count=0)
        found = Trained(seeded(lambda: Net("scale")), compiler=compiler).faults
        assert [fault.kind for fault in found] == ["does not repeat"], found
        fault = found[0]
        if not compiler:
            assert "1 of 512 elements: [0, 3] was" in fault.evidence
            assert "(1 bit)" in fault.evidence
            assert "autograd_function_apply" in fault.what
        else:
            assert "a compiled graph" in fault.what
        assert fault.source.startswith("test_recheck.py:")
        assert "take the machine out" in fault.advice


def test_a_bit_of_an_activation() -> None:
    """It changes in memory, between the operation that made it and the one that reads it."""
    model = seeded(Net)
    steps = [0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if steps[0] == AT:
            flip(output)

    model.get_submodule("a").register_forward_hook(hook)

    def in_step(what: str, step: int, model: nn.Module) -> None:
        steps[0] = step

    found = Trained(model, in_step=in_step).faults
    assert [fault.what for fault in found] == ["relu"]
    assert "bit 22 of one of 512 elements that it reads" in found[0].evidence


def test_a_bit_of_a_gradient_in_the_backward() -> None:
    """Before the optimizer reads it."""
    model, steps = seeded(Net), [0]
    weight = model.get_parameter("b.weight")
    weight.register_hook(lambda g: flip(g) if steps[0] == AT else None)

    def in_step(what: str, step: int, model: nn.Module) -> None:
        steps[0] = step

    found = Trained(model, in_step=in_step).faults
    assert [fault.what for fault in found] == ["gradient of b.weight"]


@pytest.mark.parametrize("compiler", ["", "aot_eager"])
@pytest.mark.parametrize(
    ("when", "step", "what"),
    [
        ("backward", AT, "gradient of a.weight"),
        ("stepped", AT - 1, "weight a.weight"),
        ("forward", AT, "weight a.weight"),
    ],
)
def test_a_bit_in_memory(when: str, step: int, what: str, compiler: str) -> None:
    """Of a gradient before its step, of a weight between two steps or inside one."""

    def in_step(now: str, at: int, model: nn.Module) -> None:
        if (now, at) == (when, step):
            weight = model.get_parameter("a.weight")
            flip(weight if what.startswith("weight") else weight.grad)  # type: ignore[arg-type]

    found = Trained(seeded(Net), in_step=in_step, compiler=compiler).faults
    assert [fault.what for fault in found] == [what], found
    assert "bit 22 of one of its 128 elements changed in memory" in found[0].evidence
    assert found[0].step in (AT, AT + 1)  # a step counts from its beginning


def test_steps_between_are_not_looked_at() -> None:
    """A flip in a step that is not rechecked is not found, and nothing is claimed of it."""

    def in_step(now: str, at: int, model: nn.Module) -> None:
        if (now, at) == ("backward", AT + 1):
            flip(model.get_parameter("a.weight").grad)  # type: ignore[arg-type]

    trained = Trained(seeded(Net), in_step=in_step)
    assert trained.faults == []
    assert "operations of 3 steps ran twice" in trained.coverage


def test_a_kernel_with_other_bits_each_time() -> None:
    """It has words of its own; one that torch documents is no fault, and the last line says it."""
    found = Trained(seeded(lambda: Net("varies"))).faults
    assert [fault.kind for fault in found] == ["does not repeat"]
    assert "its kernel gives other bits each time" in found[0].advice


def test_a_kernel_that_torch_documents() -> None:
    """By its name, of an operation that varies."""
    unlike, x = list[Unlike](), torch.ones(8)
    with Twice(unlike.append, Memory()):
        torch.ops.fxguard_recheck.scatter_add(x)
        torch.ops.fxguard_recheck.varies(x)
    assert [(each.is_once, each.is_documented) for each in unlike] == [
        (False, True),
        (False, False),
    ]


class Everything(nn.Module):
    """What a network does that repeats: or draws, writes, keeps state, runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1))
        self.table = nn.Embedding(40, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(x))
        x = x + self.recurrent(x[:, None])[0][:, 0]
        x = checkpoint(self.inner, x, use_reentrant=False)
        x = x + self.table(torch.arange(len(x)))
        x[:, 0] += 1
        noise = torch.rand_like(x) * 0.1
        with torch.autocast("cpu", torch.bfloat16):
            y = self.out(x + noise)
        scores = torch.zeros(4, 8).index_add(0, torch.arange(len(x)) % 4, x)
        return y.float() + scores.mean(0)


@pytest.mark.parametrize("compiler", ["", "aot_eager"])
@pytest.mark.parametrize("make", [Net, Everything])
def test_a_healthy_training_is_what_it_was(make: Callable[[], nn.Module], compiler: str) -> None:
    """No fault, and the same losses, weights and random numbers, bit for bit."""
    plain = Trained(seeded(make), every=None, compiler=compiler)
    for every in (1, 2):
        looked_at = Trained(seeded(make), every=every, compiler=compiler)
        assert looked_at.faults == []
        assert looked_at.losses == plain.losses
        assert all(map(torch.equal, looked_at.weights, plain.weights))
        assert torch.equal(looked_at.random, plain.random)
    assert "ran twice" not in plain.coverage


def test_gradients_of_gradients() -> None:
    """A penalty whose backward runs twice, and an accumulation of two."""
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8, requires_grad=True)
    with fxguard.watch(model, recheck=1):
        for _ in range(3):
            for _ in range(2):
                y = model(x).square().mean()
                (gradient,) = torch.autograd.grad(y, x, create_graph=True)
                (y + gradient.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert fxguard.guard_of(model).quiet_faults == []


def test_instrument_alone() -> None:
    """Nobody tells of steps: each N-th call counts."""
    model = seeded(lambda: Net("scale"))
    fxguard.instrument(model, recheck=2)
    _calls["flip_at"] = 3  # in the second call, which is rechecked
    for _ in range(4):
        model(torch.randn(4, 8)).sum().backward()
    assert [fault.kind for fault in fxguard.guard_of(model).quiet_faults] == ["does not repeat"]


def test_what_raises_raises_as_it_does() -> None:
    """The exception is that of the model, in a rechecked step too, and then it goes on."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.table(x * 2)
            return found

    model, fine = fxguard.instrument(Table(), recheck=1), torch.tensor([1])
    assert model(fine).shape == (1, 2)
    with pytest.raises(IndexError) as plain:
        Table()(torch.tensor([2]))
    with pytest.raises(IndexError) as raised:
        model(torch.tensor([2]))
    assert str(raised.value) == str(plain.value)
    assert model(fine).shape == (1, 2)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_wrong_numbers(every: Any) -> None:
    with pytest.raises(fxguard.FxguardError, match="recheck has to be a number of steps"):
        fxguard.instrument(Net(), recheck=every)


def test_bits() -> None:
    """The comparison is of bits: signs of 0 and NaN count, and one flip is told from a write."""
    zero = torch.tensor([0.0, 1.0])
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, torch.tensor([0.0, 1.0000001]))
    assert not same_bits(zero, zero.double())
    assert same_bits(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(3000).to(dtype)
        before, words = sums_of(x), max(x.element_size() // 4, 1)
        assert before is not None
        assert flipped_bit(before, before) is None
        bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        for at, bit in ((0, 0), (1020, 5), (1021, 14), (2999, 8 * x.element_size() - 1)):
            mask = torch.iinfo(bits.dtype).min if bit == 8 * x.element_size() - 1 else 1 << bit
            bits[at] ^= mask
            assert flipped_bit(before, sums_of(x), words) == bit  # type: ignore[arg-type]
            bits[at] ^= mask
    for size in (128, 1021, 1022, 4096):
        x = torch.randn(size)
        before = sums_of(x)
        assert before is not None
        for other in (x * 2, x * 0.5, x + 1, x.flip(0), torch.zeros(size), x / 65536):
            assert flipped_bit(before, sums_of(other)) is None  # type: ignore[arg-type]


SCRIPT = """\
import ctypes, os, sys
import torch
import torch.distributed as dist

torch.manual_seed(0)
rank = int(os.environ.get("RANK", 0))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    if step == 3 and rank == FAULTY:
        (ctypes.c_int32 * 128).from_address(model[0].weight.data_ptr())[5] ^= 1 << 20
    for weight in model.parameters() if "RANK" in os.environ else ():
        dist.all_reduce(weight.grad)
    optimizer.step()
if "RANK" in os.environ:
    dist.destroy_process_group()
"""


def test_the_command(tmp_path: Path) -> None:
    """A note, a status that a restart agent reads, and the record of the run."""
    for faulty, status in ((0, 5), (-1, 0)):
        (tmp_path / "train.py").write_text(SCRIPT.replace("FAULTY", str(faulty)))
        command = [sys.executable, "-m", "fxguard", "run", "--recheck", "2", "--fail-on", "note"]
        command += ["--json", "run.json", "train.py"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == status, found.stderr
        record = json.loads((tmp_path / "run.json").read_text())
        told = [(each["kind"], each["what"]) for each in record["quiet_faults"]]
        assert told == ([("does not repeat", "weight 0.weight")] if status else [])


@pytest.mark.slow
def test_the_rank_that_differs_alone(tmp_path: Path) -> None:
    """With several ranks it is the machine of that one."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("FAULTY", "1"))
    (tmp_path / "guarded.py").write_text(
        "import sys\nfrom fxguard.cli.main import main\n"
        "sys.exit(main(['run', '--recheck', '2', 'train.py']))\n"
    )
    found = torchrun(tmp_path / "guarded.py")
    notes = [line for line in found.stderr.splitlines() if "note: does not repeat" in line]
    assert len(notes) == 1, found.stderr
    assert "machine: rank 1 of 2, alone, on " in notes[0]
    assert "weight 0.weight" in notes[0]
