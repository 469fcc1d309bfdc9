"""Gathers weights that FSDP2 has sharded: by all ranks, for one that asks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module

from fxguard.ranks import agreement

__all__ = ["Gather", "gathered_for_one", "nothing_gathered"]

# Given qualified names of weights, makes them whole inside the block.
Gather = Callable[[Iterable[str]], AbstractContextManager[None]]


def nothing_gathered(names: Iterable[str]) -> AbstractContextManager[None]:
    """A ``Gather`` that gathers nothing."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def gathered_for_one(model: Module, asks: bool) -> Iterator[Gather]:
    """Let the first rank that asks gather weights, with the help of the others.

    All ranks have to enter the block. A rank that does not ask, or is not the first, waits here
    until the first one has left the block.

    Args:
        model: a model with sharded modules.
        asks: whether this rank needs weights.
    """
    leader = agreement.first_of(asks)
    if leader is None:
        yield nothing_gathered
    elif leader == agreement.current_rank():
        try:
            yield functools.partial(_lead, model, leader)
        finally:
            agreement.told_by(leader, None)
    else:
        _follow(model, leader)
        yield nothing_gathered


@contextlib.contextmanager
def _lead(model: Module, leader: int, names: Iterable[str]) -> Iterator[None]:
    around = {_sharded_around(model, name) for name in names}
    modules = sorted(name for name in around if name is not None)
    if not modules:
        yield
        return
    agreement.told_by(leader, modules)
    with _whole(model, modules):
        yield


def _follow(model: Module, leader: int) -> None:
    while (modules := agreement.told_by(leader)) is not None:
        with _whole(model, modules):  # a collective; the weights are not read here
            pass


@contextlib.contextmanager
def _whole(model: Module, names: Iterable[str]) -> Iterator[None]:
    modules: list[Any] = [model.get_submodule(name) for name in names]
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


def _sharded_around(model: Module, weight: str) -> str | None:
    """The name of the innermost module that shards a weight; None if there is none."""
    from torch.distributed.fsdp import FSDPModule  # imported only once somebody uses it

    name = weight
    while name:
        name = name.rpartition(".")[0]
        if isinstance(model.get_submodule(name), FSDPModule):
            return name
    return None
