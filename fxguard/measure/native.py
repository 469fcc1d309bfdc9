"""The magnitude ranges of tensors in memory, read by this package's C extension.

The extension is built if there is a C compiler when fxguard is installed. Everything works without
it, but :mod:`fxguard.measure.eager` then measures with torch's operations, which takes several
times as long.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxguard.torch_names import FakeTensor, dispatch_mode_count, func_level

__all__ = [
    "Operations",
    "Record",
    "abs_min_max",
    "all_finite",
    "all_hooked",
    "any_filled",
    "are_finite",
    "are_here",
    "below",
    "bind_losses",
    "is_built",
    "is_dense",
    "is_observed",
    "largest",
    "launch",
    "norms",
    "packed",
    "reading_dense_or",
    "reading_or",
    "state_of",
    "versions_of",
]

LIBRARY = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(
    sys.platform, "libtorch_cpu.so"
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = frozenset((*FLOATS, *SIGNED, *UNSIGNED))

Pair = tuple[float, float]
Reader = Callable[[object], Pair | None]

# Bound here because they are called at each check.
_dispatch_modes = dispatch_mode_count
_func_levels = func_level


def is_observed() -> bool:
    """Whether somebody may be tracing, batching or differentiating the code that runs now."""
    return bool(_dispatch_modes() or _func_levels() is not None)


def is_dense(example: object) -> bool:
    """Whether a capture shows that a value is a dense tensor on a CPU, outside every transform."""
    return (
        isinstance(example, Tensor)
        and type(example) in (Tensor, FakeTensor)
        and example.device.type == "cpu"
        and example.layout is torch.strided
        and not example.is_nested
        and example.dtype in DTYPES
        and _func_levels() is None
    )


class _NotBuilt:
    """The interface of the C extension if it is not built."""

    @staticmethod
    def abs_min_max(value: object) -> Pair | None:
        return None

    packed = abs_min_max

    @staticmethod
    def state_of(references: object) -> None:
        return None

    versions_of = state_of

    @staticmethod
    def are_finite(tensors: object) -> bool:
        return False

    @staticmethod
    def are_here(tensors: object, copies: object, most: object) -> bool:
        return False

    @staticmethod
    def norms(tensors: object, most: object) -> None:
        return None

    @staticmethod
    def changes(tensors: object, copies: object, most: object) -> None:
        return None

    @staticmethod
    def copied(tensors: object, copies: object, most: object) -> bool:
        return False

    @staticmethod
    def described(tensor: object) -> None:
        return None

    @staticmethod
    def largest(tensors: object, most: object) -> None:
        return None

    @staticmethod
    def reading_or(otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return otherwise

    reading_dense_or = reading_or

    @staticmethod
    def below(
        known: list[tuple[int, float]], number_of_run: Callable[[], int]
    ) -> Callable[[Any], bool]:
        return lambda tensor: False

    @staticmethod
    def all_finite(numbers: bytearray) -> bool:
        raise NotImplementedError

    launch = None


def _bound() -> Any:
    try:
        from fxguard.measure import _native

        exchange = Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
        plain = (Tensor, torch.nn.Parameter, torch.strided, DTYPES)
        _native.bind_observers(_dispatch_modes, _func_levels)
        _native.bind(exchange, *plain, _parallel_for())
    except (ImportError, AttributeError):
        # Not built, built for another version, or without support for this version of DLPack.
        return _NotBuilt
    return _native


def _parallel_for() -> int:
    """The address of a function that distributes work among torch's threads; 0 if not found.

    It is part of torch's stable C interface (``torch/csrc/stable/c/shim.h``).
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / LIBRARY))
        return ctypes.cast(library.torch_parallel_for, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # another system or version
        return 0


_functions = _bound()

# The smallest and the largest magnitude in a tensor, or None if it has to be measured otherwise: a
# tensor that is empty, of a subclass, on another device, without its own memory, or of a rare
# dtype; or not a tensor. If there is a NaN, the largest is NaN and the smallest is that of the
# other elements.
abs_min_max: Reader = _functions.abs_min_max

# Given a function, returns one that reads like `abs_min_max` and calls the given function for
# values that it cannot read or that are observed. A check in a graph is one call of it, without a
# Python frame.
reading_or: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = _functions.reading_or

# The same for values that a capture has shown to be dense: it asks less of each. A checkout whose
# extension was built before has only the other one.
reading_dense_or: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
reading_dense_or = getattr(_functions, "reading_dense_or", _functions.reading_or)

# Given a list of one pair, the number of a run and a magnitude, and a function that gives the
# number of the run of now, returns a function that tells whether the largest magnitude of a tensor
# is above 0 and below this one, in this run. It says no where C cannot read the tensor.
below: Callable[[list[tuple[int, float]], Callable[[], int]], Callable[[Any], bool]]
below = getattr(_functions, "below", _NotBuilt.below)

# The Euclidean norm of each tensor of a tuple. Of more elements than a number, as many are read,
# evenly spread; 0 reads all. None where C cannot read one of them.
norms: Callable[[tuple[Tensor, ...], int], list[float] | None] = _functions.norms

# Given a tuple of copies as well, the norms of each tensor minus its copy, of the tensor, and of
# the copy, which then becomes the tensor. None as above, with nothing written.
changes: Callable[
    [tuple[Tensor | None, ...], tuple[Tensor, ...], int],
    tuple[list[float], list[float], list[float]] | None,
]
changes = _functions.changes

# Whether the copies have become what is taken of the tensors. False as above, with nothing written.
copied: Callable[[tuple[Tensor | None, ...], tuple[Tensor, ...], int], bool]
copied = getattr(_functions, "copied", _NotBuilt.copied)

# Whether they can read all of them; the copies may be None.
are_here: Callable[[tuple[Any, ...], tuple[Tensor, ...] | None, int], bool] = _functions.are_here

# The largest magnitude of each tensor of a tuple, of as many elements; None as above.
largest: Callable[[tuple[Tensor, ...], int], list[float] | None] = _functions.largest

# The largest magnitude of a tensor; and of up to 8,192 elements, evenly spread, the mean, the share
# of zeros, and the geometric mean of the other magnitudes, or of integers how many are distinct.
# None as above.
described: Callable[[Tensor], tuple[float, float, float, float] | None] = _functions.described

# The numbers of a list of such pairs as doubles, or None if it holds anything else.
packed: Callable[[object], bytearray | None] = _functions.packed

# Whether no second number of a pair is NaN or inf.
all_finite: Callable[[bytearray], bool] = _functions.all_finite

# How often each tensor of a tuple of weak references was written, and where its elements lie; None
# where that has to be asked otherwise.
state_of: Callable[[object], tuple[tuple[int | None, ...], tuple[int, ...]] | None]
state_of = getattr(_functions, "state_of", _NotBuilt.state_of)

# How often each tensor of a tuple was written; None where that has to be asked otherwise.
versions_of: Callable[[object], tuple[int | None, ...] | None]
versions_of = getattr(_functions, "versions_of", _NotBuilt.versions_of)

# Whether each tensor of a tuple can be read here, and is finite. False where that has to be asked
# otherwise.
are_finite: Callable[[object], bool] = getattr(_functions, "are_finite", _NotBuilt.are_finite)

# Starts a kernel through the CUDA driver and returns its answer, 0 where all is well; None if the
# extension is not built.
launch: Callable[..., int] | None = _functions.launch

# Whether anything is in a container that one of some weakly referenced objects has under one of
# some names; and whether each leaf among some values has the hook whose handle is kept under its
# id. None where the extension lacks them: who asks goes through them in Python.
any_filled: Callable[[list[Any], tuple[str, ...]], bool] | None
any_filled = getattr(_functions, "any_filled", None)
all_hooked: Callable[[tuple[Any, ...], dict[int, Any]], bool] | None
all_hooked = getattr(_functions, "all_hooked", None)

# Run the operations of a script and keep records of them (:mod:`fxguard.script.operations`, where
# the same is in Python). None where the extension lacks them.
Operations: Any = getattr(_functions, "Operations", None)
if not hasattr(Operations, "followed"):  # built before
    Operations = None
Record: Any = getattr(_functions, "Record", None)

# Takes what plain operations of losses are written down with
# (:mod:`fxguard.batch.plain_operations`). None where the extension lacks it.
bind_losses: Callable[..., None] | None = getattr(_functions, "bind_losses", None)

is_built = _functions is not _NotBuilt
