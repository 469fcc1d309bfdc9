"""All objects of a class are found, and nothing else is touched."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from fxguard.capture.instances import instances_of


class Kind:
    pass


class Below(Kind):
    pass


class Pretender:
    """A proxy that nothing is behind. Without a dict it is itself what refers to the class."""

    __slots__ = ("kind",)

    @property
    def __class__(self) -> Any:
        raise RuntimeError("somebody looked")


@pytest.fixture(autouse=True)
def without_garbage() -> None:
    gc.collect()


def test_objects_of_a_class_and_of_its_subclasses() -> None:
    """In a list, as an attribute, in a cycle; the classes themselves are not among them."""
    assert instances_of(Kind) == []
    held, below = [Kind()], Below()
    cycle = Kind()
    cycle.itself = cycle  # type: ignore[attr-defined]
    assert set(instances_of(Kind)) == {held[0], below, cycle}
    assert instances_of(Below) == [below]


def test_what_is_gone_is_not_found() -> None:
    one = Kind()
    assert instances_of(Kind) == [one]
    del one
    assert instances_of(Kind) == []


def test_proxies_are_left_alone() -> None:
    """What refers to the class, and looks like something else, is not asked what it is."""
    pretender = Pretender()
    pretender.kind = Kind
    assert instances_of(Kind) == []
