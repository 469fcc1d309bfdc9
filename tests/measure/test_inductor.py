"""Under Inductor the numbers are joined by one call of an operation of our own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.measure import inductor, traceable, ways
from fxguard.measure.ways import INDUCTOR, WAYS

pytestmark = pytest.mark.slow_unless_campaign


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numbers(*dtypes: torch.dtype) -> list[Tensor]:
    return [torch.tensor(float(i), dtype=dtype) for dtype in dtypes for i in (1, 2)]


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,) * 3,
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_operation_is_what_it_says_to_the_compiler(dtypes: tuple[torch.dtype, ...]) -> None:
    arguments = (numbers(*dtypes),)
    torch.library.opcheck(inductor.join, arguments)
    assert torch.equal(
        inductor.join(*arguments) * torch.tensor([-1, 1]), traceable.stacked(*arguments)
    )


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)
        self.gate = nn.Linear(64, 64)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.out(torch.tanh(self.linear(y)) * torch.sigmoid(self.gate(y)))


def generated_code() -> str:
    model = fxguard.instrument(nn.Sequential(Layer(), Layer()).eval())
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(torch.compile(model), torch.randn(8, 16, 64))
    return "\n".join(sources)


def test_no_kernel_joins_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor names a kernel after the operations in it."""
    code = generated_code()
    assert code.count("fxguard.join.default(") == 1
    assert not re.search(r"cpp_fused\w*_stack", code)
    torch._dynamo.reset()
    monkeypatch.setitem(WAYS, "inductor", replace(INDUCTOR, collect=traceable.collect))
    assert re.search(r"cpp_fused\w*_stack", generated_code()), "this test could not fail"


class Everything(nn.Module):
    """Bodies, dtypes, masks, integers, and a size that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[assignment]
        x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        wide = x.double() * 3
        narrow = x.bfloat16() * 3
        order = x.argsort(dim=-1)
        mask = torch.zeros_like(x).masked_fill(x < 0, float("-inf"))
        return (x + mask).softmax(-1) + wide.float() + order, narrow


@pytest.mark.parametrize(
    ("train", "dynamic", "batches"),
    [
        (True, None, (3,)),
        *(
            pytest.param(train, dynamic, (3, 5), marks=pytest.mark.campaign)
            for train in (True, False)
            for dynamic in (None, True)
        ),
    ],
)
def test_numbers_are_those_of_eager(
    train: bool, dynamic: bool | None, batches: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = Everything().train(train)
    compiled = torch.compile(fxguard.instrument(model), dynamic=dynamic)
    eager = fxguard.instrument(Everything())
    eager.load_state_dict(model.state_dict())
    for batch in batches:
        x = torch.randn(batch, 4, 64, requires_grad=train)
        outputs = compiled(x), eager(x)
        torch.testing.assert_close(*outputs, rtol=1e-2, atol=1e-2)  # bfloat16
        if train:
            outputs[0][0].sum().backward()
        pairs = list(
            zip(fxguard.guard_of(model).frames(), fxguard.guard_of(eager).frames(), strict=True)
        )
        assert len(pairs) > 15
        for ours, theirs in pairs:
            assert ours.title == theirs.title
            for mine, other in zip(ours.rows, theirs.rows, strict=True):
                assert (mine.label, mine.note) == (other.label, other.note)
                if mine.abs_max is not None:
                    measured, expected = (
                        (mine.abs_min, mine.abs_max),
                        (other.abs_min, other.abs_max),
                    )
                    assert measured == pytest.approx(expected, rel=1e-2, abs=1e-5)


def test_found_in_a_body_under_inductor() -> None:
    model = Everything()
    with torch.no_grad():
        model.layer.linear.weight.fill_(3e38)
    with pytest.raises(fxguard.NonFiniteError, match="linear made inf"):
        torch.compile(fxguard.instrument(model))(torch.rand(3, 4, 64))


def test_with_the_wrapper_in_cpp() -> None:
    model = fxguard.instrument(Layer())
    compiled = torch.compile(model, options={"cpp_wrapper": True})
    with torch.no_grad():
        compiled(torch.randn(2, 4, 64))
        assert len(fxguard.guard_of(model).frames()) > 5
        with pytest.raises(fxguard.NonFiniteError, match="argument `x` of"):
            compiled(torch.full((2, 4, 64), float("nan")))


def cache_hits_of_a_second_compilation() -> int:
    """How many graphs AOTAutograd does not make again, and that what it kept is checked."""
    torch.manual_seed(0)
    with fresh_cache():
        for weight in (1.0, 3e38):
            torch._dynamo.reset()
            counters.clear()
            layer = Layer()
            model = fxguard.instrument(layer)
            if weight > 1:
                with torch.no_grad():
                    layer.linear.weight.fill_(weight)
                with pytest.raises(fxguard.NonFiniteError, match="linear made"):
                    torch.compile(model)(torch.randn(2, 4, 64))
            else:
                torch.compile(model)(torch.randn(2, 4, 64)).sum().backward()
    return int(counters["aot_autograd"]["autograd_cache_hit"])


def test_kept_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_hits_of_a_second_compilation() == 1
    monkeypatch.setitem(WAYS, "inductor", replace(INDUCTOR, cacheable=()))
    assert cache_hits_of_a_second_compilation() == 0, "this test could not fail"


def test_a_package_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert INDUCTOR.cache_keys()
    monkeypatch.setattr(ways, "__file__", "archive.zip/ways.py")
    monkeypatch.setattr(ways, "_version", ways._version.__wrapped__)
    assert INDUCTOR.cache_keys() == {}
    torch.compile(fxguard.instrument(Layer()))(torch.randn(2, 4, 64))


class Gelu(nn.Module):
    """Inductor computes the middle of it again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * y.pow(3)))))


def bytes_for_backward(call: Callable[..., Any]) -> int:
    found: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        found[value.data_ptr()] = value.numel() * value.element_size()
        return value

    x = torch.randn(8, 16)
    with torch._inductor.config.patch(force_disable_caches=True):
        call(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        call(x)
    return sum(found.values())


def test_nothing_more_is_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = bytes_for_backward(torch.compile(Gelu()))
    assert bytes_for_backward(torch.compile(fxguard.instrument(Gelu()))) == plain

    def with_amin(value: Any) -> traceable.Pair:
        low, high = traceable.abs_min_max(value)
        return low.neg(), high

    monkeypatch.setitem(WAYS, "inductor", replace(INDUCTOR, abs_min_max=with_amin))
    assert bytes_for_backward(torch.compile(fxguard.instrument(Gelu()))) > plain


# Large tensors that stand in memory anyway.


class Remembers(nn.Module):
    """Writes rows into a large buffer, reads it, and returns what is large and never in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(1024, 512))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.memory.index_copy_(0, at, x[:4])
        return (x * 2).sum() + self.memory.sum(0).mean()


LARGE_X = torch.linspace(-3, 5, 1024 * 512).view(1024, 512)
AT = torch.tensor([1, 5, 7, 9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_reading_is_what_it_says_to_the_compiler(dtype: torch.dtype) -> None:
    value = torch.tensor([-3.0, 0.5, 2.0], dtype=dtype)
    torch.library.opcheck(inductor.read, (value,))
    fused, read = inductor.abs_min_max(value), inductor.abs_min_max_in_memory(value)
    assert [float(x) for x in read] == [float(x) for x in fused] == [-0.5, 3.0]


@pytest.mark.parametrize("backward", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_large_inputs_are_read_in_c(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input, and the buffer before and after; the numbers, results and gradients are the
    same as without."""
    counted: list[tuple[int, ...]] = []
    read = inductor.eager.abs_min_max

    def count(value: Tensor) -> Any:
        counted.append(tuple(value.shape))
        return read(value)

    monkeypatch.setattr(inductor.eager, "abs_min_max", count)
    found = []
    for is_large in (inductor.is_large, lambda example: False):
        torch._dynamo.reset()
        monkeypatch.setitem(WAYS, "inductor", replace(INDUCTOR, takes=is_large))
        model = fxguard.instrument(Remembers())
        x = LARGE_X.clone().requires_grad_(backward)
        compiled = torch.compile(model)
        output = compiled(x, AT)
        if backward:
            output.backward()
        frames = list(fxguard.guard_of(model).frames())
        found.append((output.detach(), x.grad, model.memory, frames))
        if is_large is inductor.is_large:
            assert sorted(counted) == [(1024, 512)] * 3
    (output, gradient, memory, frames), (others, its, kept, plain) = found
    torch.testing.assert_close(output, others)
    assert gradient is None if its is None else torch.equal(gradient, its)
    assert torch.equal(memory, kept)
    assert frames == plain
    assert len(counted) == 3


def test_small_ones_and_those_of_other_devices_are_fused() -> None:
    assert inductor.is_large(torch.empty(512, 512))
    assert not inductor.is_large(torch.empty(511, 512))
    assert not inductor.is_large(torch.empty(512, 512, device="meta"))
    assert not inductor.is_large(torch.empty(512, 512, dtype=torch.int32))
    assert not inductor.is_large(torch.eye(512).to_sparse())
    assert not inductor.is_large(None)
