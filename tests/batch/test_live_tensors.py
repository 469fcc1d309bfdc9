"""Which value a live tensor holds: until it is written, freed, or given other memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.batch.live_tensors import LiveTensors

FIRST, SECOND = Key(0, 1), Key(BETWEEN_GRAPHS, 0)


def remembered(tensor: Tensor, key: Key = FIRST) -> LiveTensors:
    live = LiveTensors()
    live.remember(tensor, key)
    return live


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x[0].zero_(),
        lambda x: x.view(-1)[:2].mul_(2),
        lambda x: torch.add(x, 1, out=x),
    ],
)
def test_a_tensor_holds_its_value_until_it_is_written(write: Callable[[Tensor], object]) -> None:
    """Through whatever view: then nobody has measured it, but its memory is known."""
    x = torch.ones(2, 2)
    live = remembered(x)
    assert live.key_of(x) == FIRST
    write(x)
    assert live.key_of(x) is None
    assert live.origin_of(x) == FIRST
    live.remember(x, SECOND)
    assert live.key_of(x) == live.origin_of(x) == SECOND


def test_a_view_stands_in_the_memory_of_its_base_and_a_copy_does_not() -> None:
    """A view is another tensor: it holds no value, and its origin is that of the base."""
    x = torch.ones(2, 3)
    live = remembered(x)
    for view in (x[0], x.t(), x.detach(), x.view(6)):
        assert live.key_of(view) is None
        assert live.origin_of(view) == FIRST
    for other in (x.clone(), x + 0, torch.ones(2, 3)):
        assert live.key_of(other) is live.origin_of(other) is None


def test_no_tensor_is_kept_alive_and_none_inherits_its_place() -> None:
    """What was freed is forgotten, also where the next tensor has its address."""
    x = torch.ones(1000)
    live, gone = remembered(x), weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    for _ in range(100):  # the allocator gives the same memory, Python the same id
        fresh = torch.ones(1000)
        assert live.key_of(fresh) is live.origin_of(fresh) is None
        del fresh


def test_a_tensor_with_other_memory_is_forgotten() -> None:
    """``x.data = y`` leaves the version as it was: the observer says so."""
    x = torch.ones(3)
    live = remembered(x)
    x.data = torch.zeros(3)
    live.forget(x)
    assert live.key_of(x) is live.origin_of(x) is None


def test_inference_tensors_have_no_version() -> None:
    """They are known as long as they live."""
    with torch.inference_mode():
        x = torch.ones(2)
        live = remembered(x)
        assert live.key_of(x) == FIRST


def test_tensors_under_vmap_are_found_by_what_is_inside() -> None:
    """A level of torch.func is a wrapper: the memory is that of the tensor inside."""
    x = torch.ones(2, 3)
    live, origins = remembered(x), []

    def function(row: Tensor) -> Tensor:
        origins.append(live.origin_of(row))
        return row

    torch.func.vmap(function)(x)
    assert origins == [FIRST]


def test_anything_else_is_left_out_and_clear_forgets_all() -> None:
    """Graphs also take and return numbers."""
    live = LiveTensors()
    for value in (3, None, [torch.ones(1)]):
        live.remember(value, FIRST)
        assert live.key_of(value) is live.origin_of(value) is None
    x = torch.ones(1)
    live.remember(x, FIRST)
    live.clear()
    assert live.key_of(x) is live.origin_of(x) is None


@pytest.mark.parametrize("ends", ["cleared", "dropped"])
def test_the_memory_of_each_is_referred_to_once(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors stand in it, and given back once: when all is forgotten, or is gone."""
    gc.collect()  # those of other tests
    given_back: list[int] = []
    free = LiveTensors._free

    def counted(memory: int) -> None:
        given_back.append(memory)
        free(memory)

    monkeypatch.setattr(LiveTensors, "_free", staticmethod(counted))
    x, y = torch.ones(2, 3), torch.ones(2)
    memories = [each.untyped_storage()._cdata for each in (x, y)]
    live = LiveTensors()
    for tensor in (x, x[0], x.t(), x, y):
        live.remember(tensor, FIRST)
    del x, y, tensor
    assert not given_back
    if ends == "cleared":
        live.clear()
        assert sorted(given_back) == sorted(memories)
    del live
    gc.collect()
    assert sorted(given_back) == sorted(memories)


@pytest.mark.parametrize("kind", ["known", "written", "view", "new", "number"])
def test_what_enters_a_graph_is_looked_up_and_remembered_at_once(kind: str) -> None:
    """As by looking for its value, then for its origin, and remembering it where it has none."""
    x = torch.ones(2, 3)
    live = remembered(x)
    value = {"known": x, "written": x, "view": x[0], "new": torch.ones(2), "number": 3}[kind]
    if kind == "written":
        x.add_(1)
    before = live.key_of(value), live.origin_of(value)
    entered = live.enter(value, SECOND)
    assert entered == (before if before[0] is None else (before[0], None))
    wanted = {"known": FIRST, "number": None}.get(kind, SECOND)
    assert live.key_of(value) == live.origin_of(value) == wanted


def test_a_tensor_whose_parts_share_memory_is_not_made_of_itself() -> None:
    """Its origin is what was known of that memory before; if nothing was, it has none."""
    x, new = torch.ones(4), torch.ones(4)
    live = remembered(x)
    one, other = TwoTensor(x, x.detach()), TwoTensor(new, new.detach())
    assert live.enter(one, SECOND) == (None, FIRST)
    assert live.enter(other, SECOND) == (None, None)
    assert live.origin_of(one) == live.origin_of(other) == SECOND
