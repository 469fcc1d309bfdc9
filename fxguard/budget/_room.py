"""Where the float64 run keeps what its backward needs: in memory, and in files once that is short.

Autograd keeps the operands of every operation until the backward. The captured graph of a model is
often one, so that recomputing it graph by graph would keep all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.errors import UsageError
from fxguard.measure import free_memory

__all__ = ["NoRoom", "Room", "first_sample"]

KEPT = 12  # bytes of an element: in float64, as autograd saves it, and its own error in float32
STEP = 2**26  # bytes: so often free memory is asked for
LEAST = 2**28  # bytes that stay free
SHORT = 2**30  # bytes: with fewer that are free, files begin
SMALL = 2**16  # elements that are kept in memory all the same


class NoRoom(UsageError):  # noqa: N818 - a reason, as NotJudged is
    """Memory does not suffice."""


class _Saved:
    """What autograd has saved: in memory, until it is written."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor


class Room:
    """Keeps what the float64 run needs until its backward.

    Attributes:
        in_files: whether memory is short, and large tensors go to files.
    """

    def __init__(self) -> None:
        self.in_files = False
        self._kept = 0
        self._asked = 0
        self._open = contextlib.ExitStack()
        self._has_hooks = False  # or may have none
        # What autograd has saved in memory, by where this begins.
        self._saved: dict[int, weakref.WeakSet[_Saved]] = {}

    @contextlib.contextmanager
    def open(self, *, writes: bool, hooks: bool) -> Iterator[None]:
        """A block in which a graph runs, and autograd saves what its backward needs.

        Args:
            writes: whether the graph writes its values in place.
            hooks: whether it allows hooks of saved tensors. Derivatives of torch.func do not.
        """
        self._has_hooks = not hooks
        with self._open:
            if self.in_files or writes:
                self._hook()
            yield

    def take(self, tensor: Tensor) -> None:
        """Count a result of the model.

        Raises:
            NoRoom: when hardly any memory is left.
        """
        self._kept += tensor.numel() * KEPT
        if self._kept - self._asked < STEP:
            return
        self._asked = self._kept
        free = free_memory.free_bytes(tensor.device)
        if free is None:
            return
        if free < LEAST and self.in_files:
            raise NoRoom("there is no error budget: the float64 run does not fit into memory")
        if free < max(SHORT, self._kept // 4):
            self.in_files = True
            self._hook()

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor that nobody writes; the result returns it.

        Raises:
            NoRoom: when the disk is full.
        """
        if not self.in_files or tensor.numel() <= SMALL:
            return lambda: tensor
        try:
            held = _in_file(tensor.detach())
        except OSError as error:
            raise NoRoom("there is no error budget: memory and disk are full") from error
        device = tensor.device
        return lambda: held.to(device)

    def before_write(self, tensor: Tensor) -> None:
        """Copy what autograd has saved of the memory that an operation is about to write."""
        for each in self._saved.pop(tensor.untyped_storage().data_ptr(), ()):
            each.tensor = each.tensor.clone()

    def _hook(self) -> None:
        """Let autograd save here, to the end of the block."""
        if not self._has_hooks:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept())
            self._open.enter_context(hooks)
            self._has_hooks = True

    def _save(self, tensor: Tensor) -> Callable[[], Tensor]:
        if self.in_files and tensor.numel() > SMALL:
            return self.keep(tensor)
        saved, where = _Saved(tensor), tensor.untyped_storage().data_ptr()
        self._saved.setdefault(where, weakref.WeakSet()).add(saved)
        return saved


def _in_file(tensor: Tensor) -> Tensor:
    """A copy of a tensor whose memory is that of a file, which is gone when the copy is.

    Raises:
        OSError: when the disk is full.
    """
    given = tensor.cpu().contiguous()
    size = given.numel() * given.dtype.itemsize
    with tempfile.TemporaryDirectory(prefix="fxguard-") as folder:
        path = Path(folder, "tensor")
        # Written, not mapped: a full disk raises here, and would end the process there.
        path.write_bytes((ctypes.c_char * size).from_address(given.data_ptr()))
        held = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return held.view(given.dtype).view(given.shape)


def first_sample(inputs: Any) -> tuple[Any, int]:
    """The first sample of a batch, and how many there are; 1 if that is not known.

    The batch is the first size that most tensors have in common.

    Example:
        >>> first_sample(((torch.ones(8, 3),), {"mask": torch.ones(8, 3, 3)}))[1]
        8
    """
    tensors = [x for x in trees.tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()]
    found = Counter(x.shape[0] for x in tensors).most_common(1)
    batch = found[0][0] if found else 1

    def first(x: Any) -> Any:
        is_batch = isinstance(x, Tensor) and x.dim() and x.shape[0] == batch
        return x[:1] if is_batch else x

    return (trees.tree_map(first, inputs), batch) if batch > 1 else (inputs, 1)
