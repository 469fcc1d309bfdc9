"""Runs recorded operations again, in float64: what the model would compute without roundings.

An operation runs again only if it is one of torch's own, by its registered name, and draws no
random numbers. The results of others are those that were recorded.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.forgiving import theirs
from fxguard.recording.recorded import Operation, Recording, Ref

__all__ = ["Replay", "arguments_by_name", "arguments_of", "called", "operation_named"]

WIDE = {
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
# What reads the bits of elements, memory that holds nothing yet, files, or settings of a device.
NEVER = frozenset(
    [
        *("from_file", "set_", "resize_", "record_stream", "_pin_memory", "to_file"),
        *("_local_scalar_dense", "is_pinned", "_to_sparse", "_cslt_compress"),
    ]
)
SMALL = 2**24  # elements: more are allocated only if the record says so
TEXTS = frozenset(["approximate", "rounding_mode", "reduce", "mode", "padding_mode", "indexing"])


class Replay:
    """The values of a recording, computed once more.

    Args:
        recording: what ran.
        instead: elements of leaves to take in place of those that were kept.
        differentiable: whether gradients flow back through it.

    Attributes:
        now: what each value's tensor holds now, as operations go on; a value that was neither kept
            nor can be computed is absent.
        told: values that were not computed again but recorded, with what was made of these.
        not_run: names of operations that did not run again, with the reason.
    """

    def __init__(
        self,
        recording: Recording,
        instead: Mapping[int, Tensor] | None = None,
        *,
        differentiable: bool = False,
    ) -> None:
        self.recording, self.differentiable = recording, differentiable
        self.now: dict[int, Tensor] = {}
        self.told: set[int] = set()
        self.not_run: dict[str, str] = {}
        for leaf in recording.leaves:
            kept = recording.data.get(leaf.value) if instead is None else instead.get(leaf.value)
            kept = recording.data.get(leaf.value) if kept is None else kept
            if kept is not None:
                x = wide(kept).clone()
                if differentiable and x.is_floating_point():
                    x = x.requires_grad_().clone()
                self.now[leaf.value] = x

    def run(self, operation: Operation) -> None:
        """Run the next operation, and note what it made in :attr:`now`."""
        why = self._why_not(operation)
        if not why:
            try:
                self._again(operation)
            except theirs() as error:  # no float64 kernel, or a device's own
                why = f"{type(error).__name__}: {error}".splitlines()[0]
        if why:
            self.not_run.setdefault(operation.kind, why)
            self._as_recorded(operation)
        elif any(ref.value in self.told for ref in reads_of(operation)):
            self.told.update(x for x in operation.made if x is not None)
            self.told.update(now for _, now in operation.written)

    def _why_not(self, operation: Operation) -> str:
        missing = [ref.value for ref in reads_of(operation) if ref.value not in self.now]
        if missing:
            return "an operand was not kept"
        overload = operation_named(operation.name)
        if overload is None:
            return "not one of torch's own operations"
        return "it draws random numbers" if draws(overload, operation) else ""

    def _again(self, operation: Operation) -> None:
        overload = operation_named(operation.name)
        assert overload is not None
        args, kwargs = self.arguments(operation)
        if self.recording.is_foreign:
            _refuse_other_sizes(self.recording, operation, overload, args, kwargs)
        with torch.set_grad_enabled(self.differentiable):
            result = called(overload, args, kwargs)
        for number, tensor in zip(operation.made, trees.tree_leaves(result), strict=True):
            if number is not None:
                self.now[number] = tensor
        for before, after in operation.written:
            self.now.setdefault(after, self.now[before])

    def _as_recorded(self, operation: Operation) -> None:
        data = self.recording.data
        for number in operation.made:
            if number is not None and number in data:
                self.now[number] = wide(data[number]).clone()
                self.told.add(number)
        for before, after in operation.written:
            if after in data and before in self.now:
                with torch.no_grad():
                    self.now[before].copy_(wide(data[after]))
                self.now[after] = self.now[before]
                self.told.add(after)

    def arguments(self, operation: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an operation, with tensors and in wide dtypes."""
        return arguments_of(operation, self.now)


def arguments_of(
    operation: Operation, now: Mapping[int, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation, in wide dtypes.

    Args:
        operation: any one.
        now: what each value holds.

    Raises:
        KeyError: if it reads a value that is not there.
    """

    def given(x: Any) -> Any:
        if isinstance(x, Ref):
            return now[x.value]
        if isinstance(x, torch.dtype):
            return wide_dtype(x)
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if isinstance(x, (list, tuple)):
            return [given(item) for item in x]
        return x

    return tuple(map(given, operation.args)), {k: given(x) for k, x in operation.kwargs.items()}


def arguments_by_name(
    overload: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of an operation of ATen by name, with defaults."""
    named = {x.name: x.default_value for x in overload._schema.arguments}
    return named | dict(zip(named, args, strict=False)) | dict(kwargs)


def called(
    overload: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
) -> Any:
    """The result of an operation of ATen in float64.

    Args:
        overload: it.
        args: its arguments.
        kwargs: likewise.
        instead: what is called in its place, with these three.
    """
    name = overload.overloadpacket.__name__
    with warnings.catch_warnings(), _in_float64():
        warnings.simplefilter("ignore")
        if instead is not None:
            return instead(overload, args, dict(kwargs))
        try:
            result = overload(*args, **kwargs)
        except RuntimeError:
            if name != "view":  # of what another kernel has laid out otherwise
                raise
            result = args[0].reshape(args[1])
        if name.startswith(("empty", "new_empty")):
            result.zero_()
    return result


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """Let integers become float64 where an operation makes floating-point numbers of them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _refuse_other_sizes(
    recording: Recording, operation: Operation, overload: Any, args: Any, kwargs: Any
) -> None:
    """Refuse an operation that would allocate something else than the record says.

    Raises:
        ValueError: if it would.
    """
    sizes = {recording.values[number].shape for number in operation.made if number is not None}

    def as_meta(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        return x.detach().to("meta") if isinstance(x, Tensor) else x

    try:
        on_meta = trees.tree_map(as_meta, (args, dict(kwargs)))
        if not reads_of(operation):
            on_meta[1]["device"] = torch.device("meta")
        made = overload(*on_meta[0], **on_meta[1])
    except (
        NotImplementedError,
        RuntimeError,
        TypeError,
    ) as error:  # what depends on elements is small
        if not reads_of(operation):
            raise ValueError("it allocates what cannot be checked") from error
        return
    for x in trees.tree_leaves(made):
        if isinstance(x, Tensor) and tuple(x.shape) not in sizes and x.numel() > SMALL:
            raise ValueError("its result would have another shape than the record says")


def reads_of(operation: Operation) -> list[Ref]:
    """The tensors among the arguments of an operation."""
    found: list[Ref] = []

    def look(x: Any) -> None:
        if isinstance(x, Ref):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            for item in x:
                look(item)

    look(operation.args)
    look(list(operation.kwargs.values()))
    return found


@functools.cache
def operation_named(name: str) -> Any:
    """An operation of ATen that may run again, by its name; None for any other."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace != "aten" or packet in NEVER or not packet.isidentifier():
        return None
    try:
        found = getattr(getattr(torch.ops.aten, packet), overload or "default")
    except AttributeError:
        return None
    schema = getattr(found, "_schema", None)
    if schema is None:
        return None
    for argument in schema.arguments:
        if "str" in str(argument.type) and argument.name not in TEXTS:
            return None
        if packet == "view" and str(argument.type) == "ScalarType":
            return None
    return found


def draws(overload: Any, operation: Operation) -> bool:
    """Whether an operation draws random numbers; attention does not where nothing is dropped."""
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    for at, argument in enumerate(overload._schema.arguments):
        if argument.name == "dropout_p":
            given = operation.args[at] if at < len(operation.args) else None
            given = operation.kwargs.get("dropout_p", given)
            return bool(argument.default_value if given is None else given)
    return True


def is_view(overload: Any) -> bool:
    """Whether the result of an operation shares the memory of an operand."""
    return bool(getattr(overload, "is_view", False)) or str(overload) in VIEWS


VIEWS = frozenset(["aten._unsafe_view.default"])


def wide(tensor: Tensor) -> Tensor:
    """A tensor with floating-point numbers in float64; integers and booleans as they are."""
    return tensor.to(wide_dtype(tensor.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are computed again."""
    return WIDE.get(dtype, torch.float64 if dtype.is_floating_point else dtype)
