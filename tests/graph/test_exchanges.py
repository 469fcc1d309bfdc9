"""What a call of ``torch.distributed`` exchanges, read from the call alone: no rank runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxguard.graph.exchanges import Exchange, brought_later, exchange_of

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="torch was built without torch.distributed"
)

FUNCTIONAL, C10D = torch.ops._c10d_functional, torch.ops.c10d


@pytest.mark.parametrize(
    ("operator", "args", "writes"),
    [
        (FUNCTIONAL.all_reduce.default, ("sum", "0"), False),
        (FUNCTIONAL.all_reduce, ("sum", "0"), False),
        (FUNCTIONAL.all_reduce_.default, ("sum", "0"), True),
        (C10D.allgather_into_tensor_coalesced_.default, (None,), True),
        (C10D.send.default, (None, 0, 0), True),
    ],
    ids=["a result of its own", "packet", "in place", "c10d", "c10d sends"],
)
def test_an_operator_writes_what_it_declares(
    operator: Any, args: tuple[Any, ...], writes: bool
) -> None:
    """Those of c10d declare nothing, so each of their tensors counts as written."""
    x = torch.ones(2)
    exchange = exchange_of(operator, (x, *args), {})
    assert exchange is not None
    assert [each is x for each in exchange.reads] == [True]
    assert [each is x for each in exchange.writes] == [True] * writes


@pytest.mark.parametrize(
    ("func", "result", "is_over"),
    [
        (dist.recv, 0, True),
        (dist.irecv, torch.futures.Future(), False),  # something to wait for
        (FUNCTIONAL.all_reduce.default, torch.ones(2), False),
        (FUNCTIONAL.all_reduce, torch.ones(2), False),
    ],
    ids=["recv", "irecv", "operator", "packet"],
)
def test_what_an_exchange_brings_is_there_when_it_has_ended(
    func: Any, result: Tensor | int, is_over: bool
) -> None:
    """A call has ended it, unless it returns something to wait for; an operator has not."""
    x = torch.zeros(2)
    later = brought_later(func, result, Exchange((), (x,)))
    assert later is None if is_over else later is not None and later[0] is x
