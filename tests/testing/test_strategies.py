"""Strategies for tensors: every number they draw is one that was asked for."""

from __future__ import annotations

import math
import struct
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fxguard
from fxguard.testing import elements, like, shapes, tensors
from fxguard.testing.strategies import LAYOUTS

FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
OTHERS = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool]
quick = settings(database=None, deadline=None, max_examples=60)


def find(strategy: Any, condition: Any, examples: int = 2000) -> Any:
    """The simplest value for which the condition holds."""
    chosen = settings(database=None, max_examples=examples, derandomize=True)
    return hypothesis.find(strategy, condition, settings=chosen)


@quick
@given(st.data(), st.sampled_from([*FLOATS, *OTHERS, torch.complex64]), shapes())
def test_dtype_and_shape(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Any dtype, any shape, scalars and empty tensors too; finite where nothing else is said."""
    x = data.draw(tensors(dtype, shape))
    assert (x.dtype, x.shape) == (dtype, shape)
    assert bool(x.to(torch.complex128).isfinite().all())


@quick
@given(
    st.data(),
    st.sampled_from(FLOATS),
    st.lists(st.floats(-60, 60), min_size=2, max_size=2, unique=True),
)
def test_range(data: Any, dtype: torch.dtype, ends: list[float]) -> None:
    """Nothing is outside of the range, after rounding to the dtype either."""
    low, high = sorted(ends)
    if high - low < 16:
        high = low + 16  # float8 has few numbers
    x = data.draw(tensors(dtype, (3, 50), min_value=low, max_value=high)).double()
    assert low <= float(x.min()) <= float(x.max()) <= high


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_edges_are_drawn(dtype: torch.dtype) -> None:
    """The numbers at which something happens come up without being looked for."""
    info = torch.finfo(dtype)
    seen: set[float] = set()
    signs = set()

    @settings(database=None, derandomize=True, max_examples=1000, deadline=None)
    @given(elements(dtype))
    def draw(x: float) -> None:
        seen.add(x)
        signs.add(math.copysign(1, x) if x == 0 else 0)

    draw()
    subnormal = info.smallest_normal * info.eps
    assert {0.0, 1.0, -1.0, 1 + info.eps, 1 - info.eps / 2} <= seen
    assert {info.max, info.min, info.smallest_normal, subnormal} <= seen
    assert {1.0, -1.0} <= signs  # zeros
    if dtype in (torch.float32, torch.float64):
        assert {65504.0, 65519.0, 65520.0} <= seen


@given(elements(torch.float16))
def test_elements_are_numbers_of_the_dtype(x: float) -> None:
    assert struct.unpack("e", struct.pack("e", x))[0] == x


def test_infinities_and_nan_where_asked_for() -> None:
    strategy = elements(torch.bfloat16, allow_nan=True, allow_infinity=True)
    assert math.isnan(find(strategy, math.isnan))
    assert find(strategy, lambda x: x == math.inf) == math.inf
    with pytest.raises(hypothesis.errors.NoSuchExample):
        find(elements(torch.bfloat16), lambda x: not math.isfinite(x), examples=500)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Each way to lie in memory is what its name says."""

    @quick
    @given(tensors(torch.float32, (3, 4), layouts=[layout]))
    def check(x: Tensor) -> None:
        assert x.is_contiguous() == (layout in ("contiguous", "offset"))
        assert (x.storage_offset() > 0) == (layout == "offset")
        assert (0 in x.stride()) == (layout == "expanded")
        assert (x.stride(-1) == 2) == (layout == "sliced")
        if layout != "expanded":
            x.add_(1)  # can be written

    check()


def test_all_layouts_come_up() -> None:
    for layout in ((4, 1), (1, 3), (8, 2), (0, 1), (1, 0)):
        strides = lambda x, wanted=layout: x.stride() == wanted  # noqa: E731
        assert find(tensors(torch.float32, (3, 4)), strides).stride() == layout


def test_a_large_tensor_costs_a_few_draws() -> None:
    """However many elements there are."""
    lengths = []

    @settings(database=None, max_examples=50, deadline=None)
    @given(st.data())
    def check(data: Any) -> None:
        data.draw(tensors(torch.float16, (1000, 1000)))
        lengths.append(len(data.conjecture_data.choices))

    check()
    assert max(lengths) < 100


def test_shrinks_to_a_constant() -> None:
    """The smallest tensor is readable, and exactly at the edge."""
    x = find(tensors(torch.float32, (20, 30)), lambda x: bool((x.abs() >= 3).any()))
    assert torch.equal(x, torch.full((20, 30), 3.0))
    assert x.is_contiguous()
    x = find(tensors(torch.float32, (20, 30)), lambda x: x.unique().numel() > 1)
    assert x.count_nonzero() == 1  # one other element


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_value": 2, "max_value": 1}, "holds no number"),
        ({"dtype": torch.int8, "min_value": 200}, "holds no number"),
        ({"layouts": ["diagonal"]}, "got ['diagonal']"),
        ({"layouts": []}, "layouts are some of contiguous"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fxguard.FxguardError) as caught:
        find(tensors(shape=(2,), **arguments), lambda x: True)
    assert message in str(caught.value)


def example() -> dict[str, Any]:
    return {
        "input_ids": torch.tensor([[5, 9, 300], [7, 0, 12]]),
        "attention_mask": torch.ones(2, 3, dtype=torch.int64),
        "labels": torch.tensor([[5, -100, 300], [7, 0, -100]]),
        "images": [torch.full((2, 4), -3.0), torch.zeros(2, 0)],
        "keep": torch.tensor([[True, False], [True, True]]),
        "use_cache": False,
        "nothing": None,
    }


@quick
@given(like(example()))
def test_like_keeps_what_a_model_relies_on(batch: dict[str, Any]) -> None:
    """Containers, shapes, dtypes; ids within range; masks without empty rows."""
    wanted = example()
    assert list(batch) == list(wanted)
    for name in ("input_ids", "attention_mask", "labels", "keep"):
        assert (batch[name].shape, batch[name].dtype) == (wanted[name].shape, wanted[name].dtype)
    assert batch["input_ids"].min() >= 0
    assert batch["input_ids"].max() <= 300
    negative = batch["labels"] < 0
    assert set(batch["labels"][negative].tolist()) <= {-100}
    for mask in (batch["attention_mask"], batch["keep"]):
        assert set(mask.unique().tolist()) <= {0, 1}
        assert bool(mask.bool().any(-1).all())
    image, empty = batch["images"]
    assert image.abs().max() <= 3
    assert empty.shape == (2, 0)
    assert (batch["use_cache"], batch["nothing"]) == (False, None)


def test_like_varies() -> None:
    """Ids, masks and numbers are other ones."""
    batch = example()

    def drawn(name: str, condition: Any) -> Any:
        return find(like({name: batch[name]}), lambda varied: condition(varied[name]))

    drawn("attention_mask", lambda mask: bool((mask == 0).any()))
    drawn("input_ids", lambda ids: bool((ids != batch["input_ids"]).all()))
    drawn("labels", lambda labels: bool((labels == -100).any()))
    drawn("images", lambda images: float(images[0].max()) == 3.0)


def test_like_takes_ranges_and_overrides() -> None:
    fixed = torch.tensor([[1, 2, 3], [4, 5, 6]])
    given_ = {"input_*": st.just(fixed), "images.0": tensors(torch.float32, (1,))}
    batch = find(like(example(), overrides=given_), lambda b: True)
    assert batch["input_ids"] is fixed
    assert batch["images"][0].shape == (1,)
    x = find(like((torch.ones(4),), min_value=5, max_value=6), lambda b: True)
    assert 5 <= float(x[0].min()) <= float(x[0].max()) <= 6
