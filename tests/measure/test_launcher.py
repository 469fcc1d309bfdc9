"""Kernels that the CUDA driver starts: what it is handed, and which kernels Triton has to start."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest

from fxguard.measure import launcher, native
from support.needs import do_without

ANSWER = 7
START = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *[ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p],
    *[ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p],
)


@pytest.mark.parametrize("size", [5, 2**31 + 5])
def test_what_the_driver_is_handed(size: int) -> None:
    """Grid, threads, memory and stream, and the places of seven arguments."""
    if native.launch is None:
        do_without("the part in C is not built")
    seen: list[Any] = []

    def start(function: int, *rest: Any) -> int:
        *numbers, stream, places, extra = rest
        kinds = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, *[ctypes.c_uint] * 2]
        kinds += [ctypes.c_uint64] * 2
        arguments = [kind.from_address(places[at]).value for at, kind in enumerate(kinds)]
        seen.extend([function, numbers, stream, arguments, extra])
        return ANSWER

    stub = START(start)
    address = ctypes.cast(stub, ctypes.c_void_p).value
    elements, row = 2**40 + 16, 2**40 + 64
    assert native.launch(address, 111, 256, 64, 222, elements, row, size, 3, 4) == ANSWER
    assert seen == [111, [3, 1, 1, 256, 1, 1, 64], 222, [elements, row, size, 3, 4, 0, 0], None]


def test_a_long_list_of_arguments() -> None:
    """Each in a place of its own, with the two that Triton may add; again in the same memory."""
    seen: list[Any] = []

    def begin(function: int, *rest: Any) -> int:
        *numbers, stream, places, extra = rest
        arguments = [ctypes.c_int64.from_address(places[at]).value for at in range(9)]
        seen.append((function, numbers, stream, arguments, extra))
        return len(seen) - 1

    stub = START(begin)
    address = ctypes.cast(stub, ctypes.c_void_p).value
    assert address is not None
    known = address, 111, 256, 64
    for stream, started in ((222, True), (0, False)):
        arguments = [2**40 + stream, 1, 2, 3, 4, 5, 6]
        assert launcher.start(known, stream, 5, arguments) is started
        assert seen[-1] == (
            *(111, [5, 1, 1, 256, 1, 1, 64], stream or None, [*arguments, 0, 0], None),
        )


TAKES = {"table": ("i32", "i64"), "row": "*i32", "block": "constexpr"}
ARGUMENTS = 3


def compiled(takes: dict[str, Any] = TAKES, **changed: Any) -> Any:
    """What Triton returns for a call, as far as it is looked at."""
    known = {"num_warps": 8, "shared": 64, "global_scratch_size": 0, "num_ctas": 1}
    target = types.SimpleNamespace(warp_size=32)
    metadata = types.SimpleNamespace(**{**known, "target": target, **changed})
    source = types.SimpleNamespace(signature=takes)
    return types.SimpleNamespace(metadata=metadata, function=111, src=source)


@pytest.mark.parametrize(
    "changed", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"num_ctas": 2}], ids=str
)
def test_a_kernel_that_needs_more_is_started_by_triton(
    changed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_address_of_start", lambda: 99)
    monkeypatch.setattr(native, "launch", lambda *_: 0)
    assert launcher.known_to_the_driver(compiled(), ARGUMENTS) == (99, 111, 256, 64)
    assert launcher.known_to_the_driver(compiled(**changed), ARGUMENTS) is None


def test_a_kernel_that_has_one_of_its_arguments_in_it_is_started_by_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver would give it the others in the wrong places."""
    monkeypatch.setattr(launcher, "_address_of_start", lambda: 99)
    monkeypatch.setattr(native, "launch", lambda *_: 0)
    without = compiled({**TAKES, "table": ("constexpr", "i64")})
    assert launcher.known_to_the_driver(without, ARGUMENTS) is None


def test_without_a_driver_triton_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "launch", lambda *_: 0)
    monkeypatch.setattr(launcher, "DRIVER", "there_is_no_such_library.so")
    launcher._address_of_start.cache_clear()
    assert launcher.known_to_the_driver(compiled(), ARGUMENTS) is None
    assert launcher.known_to_the_driver(None, ARGUMENTS) is None  # from Triton's interpreter
    launcher._address_of_start.cache_clear()
