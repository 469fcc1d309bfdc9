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
def versions_of(tensors: object, /) -> tuple[int, ...] | None: ...
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

class Record: ...

class Operations:
    pauses: bool
    has_bad: bool
    is_direct: bool
    __self__: Any
    @property
    def count(self) -> int: ...
    def __new__(
        cls,
        hooks: object,
        plain_types: frozenset[type],
        apart: frozenset[Any],
        views: frozenset[Any],
        unknown: object,
        setitem: object,
        tolist: object,
        getter: type,
        leaves: dict[int, ref[Tensor]],
        noted: str,
        is_grad_enabled: Callable[[], bool],
        most_depth: int,
        most_known: int,
        /,
    ) -> Operations: ...
    def __call__(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, /
    ) -> Any: ...
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, /) -> Any: ...
    def of(self, tensor: Tensor, /) -> Record | None: ...
