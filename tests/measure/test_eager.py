"""The fast way to measure, against the one that can be traced and against plain loops."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fxguard.measure import eager
from fxguard.measure import traceable as stats
from support.exact_ranges import WIDE_ENOUGH_FOR_TORCH, exact, expected, floats, often, read

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.usefixtures("way"),
]


def measured(*tensors: Any) -> Tensor:
    return eager.collect([eager.abs_min_max(tensor) for tensor in tensors])


def traceable(*tensors: Any) -> Tensor:
    return stats.collect([stats.abs_min_max(tensor) for tensor in tensors])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 bytes, so that small tensors take every way."""
    monkeypatch.setattr(eager, "LARGE", 2)
    monkeypatch.setattr(eager, "HUGE", 0)
    monkeypatch.setattr(eager, "BLOCK", 16)


@often
@given(floats())
def test_range_is_that_of_a_plain_loop(case: tuple[Tensor, np.ndarray]) -> None:
    """abs min and abs max are exact for every float dtype, shape and stride; NaN wins."""
    tensor, values = case
    assert read(measured(tensor)) == [exact(expected(values))]


@often
@given(
    floats(WIDE_ENOUGH_FOR_TORCH),
    st.integers(0, 6),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([0, 32]),
)
def test_blocks_change_nothing(
    case: tuple[Tensor, np.ndarray], large: int, block: int, huge: int
) -> None:
    """However a tensor is divided, the range is that of a plain loop."""
    tensor, values = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "LARGE", large)
        patch.setattr(eager, "HUGE", huge)
        patch.setattr(eager, "BLOCK", block)
        assert read(measured(tensor)) == [exact(expected(values))]


@often
@given(st.lists(floats(), max_size=5), st.data())
def test_collecting_changes_no_number(cases: list[tuple[Tensor, np.ndarray]], data: Any) -> None:
    """Ranges of any dtypes and blocks of statistics keep their order."""
    items: list[Any] = [eager.abs_min_max(tensor) for tensor, _ in cases]
    wanted = [exact(expected(values)) for _, values in cases]
    position = data.draw(st.integers(0, len(items)))
    items.insert(position, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    wanted[position:position] = read(items[position])
    assert read(eager.collect(items)) == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -float("nan")])
@pytest.mark.parametrize("place", [0, 15, 16, 70_000, 299_999])
def test_one_bad_element_is_found_anywhere(dtype: torch.dtype, bad: float, place: int) -> None:
    """In a large tensor without a sign too, in whichever block it stands."""
    for tensor in (torch.randn(300_000), torch.rand(300_000)):
        tensor = tensor.to(dtype)
        healthy = measured(tensor)
        tensor[place] = bad
        assert torch.isfinite(healthy).all()
        assert not torch.isfinite(measured(tensor)[0, 1])
        assert read(measured(tensor)) == read(traceable(tensor))


VIEWS = {
    "transposed": lambda x: x.T,
    "expanded": lambda x: x[:, None, :].expand(-1, 3, -1),
    "strided": lambda x: x[::2, ::3],
    "offset": lambda x: x[1:, :-1],
    "channels last": lambda x: x.view(4, 5, 10, -1).to(memory_format=torch.channels_last),
    "negated lazily": lambda x: torch.imag(torch.complex(x, x).conj()),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_stride_is_read(view: Any) -> None:
    """A view is measured by its own elements, and by no others."""
    base = torch.randn(40, 50)
    base[0, 49] = float("nan")  # outside the offset view
    tensor = view(base)
    assert read(measured(tensor)) == read(traceable(tensor))


@pytest.mark.usefixtures("small_blocks")
def test_inference_mode_leaves_no_trace() -> None:
    """The memory for blocks serves inside and outside of inference mode."""
    tensor = torch.randn(40)
    for _ in range(2):
        with torch.inference_mode():
            inside = measured(torch.randn(40) * 0 + tensor)
        assert read(inside) == read(measured(tensor)) == read(traceable(tensor))


@pytest.mark.usefixtures("small_blocks")
def test_autograd_does_not_notice() -> None:
    """A tensor that requires grad is measured without a node in its graph."""
    weight = torch.randn(40, requires_grad=True)
    result = weight * 2
    version = result._version
    statistics = measured(result)
    assert not statistics.requires_grad
    assert result._version == version
    result.sum().backward()
    assert weight.grad is not None


@pytest.mark.usefixtures("small_blocks")
def test_threads_do_not_share_memory() -> None:
    """Two threads measure different tensors at the same time."""
    wrong = []

    def work(size: float) -> None:
        tensor = torch.full((1000,), -size)
        for _ in range(50):
            if measured(tensor).tolist() != [[size, size]]:
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(5).to_sparse(),
        torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        torch.randn(3, device="meta"),
        torch.empty(0),
        None,
    ],
    ids=lambda x: "none" if x is None else f"{x.dtype} {x.layout} {x.device}",
)
def test_all_others_are_measured_as_before(tensor: Any) -> None:
    """What is no dense floating-point memory takes the way that knows it."""
    assert read(measured(tensor, torch.ones(2))) == read(traceable(tensor, torch.ones(2)))


@pytest.mark.usefixtures("small_blocks")
def test_somebody_else_may_watch() -> None:
    """Under a dispatch mode, a tracer or vmap the traceable form is used."""
    tensor = torch.randn(4, 40)
    wanted = read(traceable(tensor))
    with FlopCounterMode(display=False):
        assert read(measured(tensor)) == wanted
    traced = make_fx(lambda x: measured(x))(torch.zeros(4, 40))
    assert read(traced(tensor)) == wanted
    rows = torch.func.vmap(lambda x: measured(x))(tensor)
    assert [read(row)[0] for row in rows] == [read(traceable(row))[0] for row in tensor]


def test_huge_tensors_need_no_memory_of_their_size() -> None:
    """More than HUGE bytes are measured through one block; a last bad element counts."""
    tensor = torch.full((eager.HUGE // 4 + 5,), -3.0)
    tensor[-1] = float("inf")
    with torch.profiler.profile(profile_memory=True) as profile:
        statistics = measured(tensor)
    largest = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert statistics.tolist() == [[3.0, float("inf")]]
    assert largest < eager.HUGE / 2
