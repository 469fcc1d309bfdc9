from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, dtype, layout

def bind(
    exchange: object,
    tensor: type[Tensor],
    parameter: type[Tensor],
    strided: layout,
    dtypes: frozenset[dtype],
    parallel_for: int,
    /,
) -> None: ...
def bind_observers(
    count_modes: Callable[[], int], innermost_transform: Callable[[], object], /
) -> None: ...
def abs_min_max(tensor: object, /) -> tuple[float, float] | None: ...
def reading_or(otherwise: Callable[[Any], Any], /) -> Callable[[Any], Any]: ...
def reading_dense_or(otherwise: Callable[[Any], Any], /) -> Callable[[Any], Any]: ...
def below(
    known: list[tuple[int, float]], number_of_run: Callable[[], int], /
) -> Callable[[Any], bool]: ...
def packed(pairs: object, /) -> bytearray | None: ...
def all_finite(numbers: bytearray, /) -> bool: ...
def state_of(references: object, /) -> tuple[tuple[int, ...], tuple[int, ...]] | None: ...
def any_filled(references: list[ref[Any]], names: tuple[str, ...], /) -> bool: ...
def all_hooked(values: tuple[Any, ...], handles: dict[int, Any], /) -> bool: ...
def launch(
    start: int,
    function: int,
    threads: int,
    shared: int,
    stream: int,
    elements: int,
    row: int,
    size: int,
    programs: int,
    rounds: int,
    /,
) -> int: ...
