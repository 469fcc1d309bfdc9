"""Copies of what a graph writes: of the right numbers, in memory that nobody else holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxguard.capture._copies import Copies, Spare
from fxguard.measure import free_memory
from fxguard.plan.plan import Plan, Value
from fxguard.records import Role

LARGE = torch.Size([512, 1024])
PLAN = Plan(values=(Value(Role.INPUT, "x", "float32", argument=1),), overwritten=(1,))


def address(copy: Tensor) -> int:
    return copy.untyped_storage().data_ptr()


def copy_of(copies: Copies, tensor: Tensor) -> Tensor:
    kept = copies.of((None, tensor))
    assert kept is not None
    assert kept[0] is None
    copy: Tensor = kept[1]
    assert torch.equal(copy, tensor)
    assert address(copy) != address(tensor)
    return copy


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    """A view or what autograd has saved holds it, too."""
    copies = Copies(PLAN, Spare())
    first = copy_of(copies, torch.ones(LARGE))
    place, part = address(first), first[:1].view(-1)
    del first
    second = copy_of(copies, torch.full(LARGE, 2.0))
    assert address(second) != place
    assert torch.equal(part, torch.ones(1024))
    place = address(second)
    squared = (second.requires_grad_() ** 2).sum()
    del second
    third = copy_of(copies, torch.full(LARGE, 3.0))
    assert address(third) != place
    squared.backward()
    place = address(third)
    del third
    assert address(copy_of(copies, torch.full(LARGE, 4.0))) == place


def test_each_run_that_waits_for_its_backward_has_its_own() -> None:
    """However many there are; only the last one's memory is kept."""
    spare = Spare()
    copies = Copies(PLAN, spare)
    held = [copy_of(copies, torch.full(LARGE, float(i))) for i in range(4)]
    assert [float(copy[0, 0]) for copy in held] == [0.0, 1.0, 2.0, 3.0]
    assert len({address(copy) for copy in held}) == 4
    place = address(held[-1])
    held.clear()
    assert address(copy_of(copies, torch.ones(LARGE))) == place
    assert [address(memory) for memory in spare.take()] == [place]


def test_graphs_share_their_memory() -> None:
    """A model that is captured again does not keep what its earlier graphs had."""
    spare = Spare()
    one, other = Copies(PLAN, spare), Copies(PLAN, spare)
    place = address(copy_of(one, torch.ones(LARGE)))
    assert address(copy_of(other, torch.zeros(LARGE))) == place
    copy_of(other, torch.zeros(2048, 1024))
    assert [tuple(memory.shape) for memory in spare.take()] == [(2048, 1024)]


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(LARGE, dtype=torch.float64),
        torch.ones(LARGE).T,
        torch.ones(600, 1024),
        torch.ones(2, 2),
    ],
    ids=["dtype", "strides", "shape", "small"],
)
def test_a_tensor_of_another_form_has_its_own_copy(other: Tensor) -> None:
    """Dtype, shape and strides are those of the tensor."""
    copies = Copies(PLAN, Spare())
    copy_of(copies, torch.ones(LARGE))
    copy = copy_of(copies, other)
    assert (copy.dtype, copy.shape, copy.stride()) == (other.dtype, other.shape, other.stride())


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_copy_takes_part_in_a_backward_as_its_input_does(requires_grad: bool) -> None:
    """Also in memory that served another before."""
    copies = Copies(PLAN, Spare())
    copy_of(copies, torch.ones(LARGE))
    copy = copy_of(copies, torch.ones(LARGE, requires_grad=requires_grad))
    assert copy.requires_grad == requires_grad
    assert copy.is_leaf


def test_inference_mode_changes_nothing() -> None:
    """What is made there is never written outside of it."""
    copies = Copies(PLAN, Spare())
    with torch.inference_mode():
        copy_of(copies, torch.ones(LARGE))
    copy_of(copies, torch.ones(LARGE))
    with torch.inference_mode():
        copy_of(copies, torch.ones(LARGE))


def test_free_memory_is_asked_for_large_copies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a quarter of it may be taken."""
    asked = []

    def free(device: torch.device) -> int:
        asked.append(device)
        return 4 * torch.Size(LARGE).numel() * 4

    monkeypatch.setattr(free_memory, "free_bytes", free)
    copies = Copies(PLAN, Spare())
    copy_of(copies, torch.ones(LARGE))
    assert not asked
    monkeypatch.setattr(free_memory, "SMALL", 0)
    copy_of(copies, torch.ones(LARGE))
    assert asked
    assert copies.of((None, torch.ones(513, 1024))) is None
