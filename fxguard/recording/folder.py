"""A recording as a folder: ``record.json`` and the elements of values in safetensors."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fxguard.errors import UsageError
from fxguard.recording._form import DTYPES, decoded, encoded, name_of
from fxguard.recording.recorded import Leaf, Numbers, Operation, Recording, Value
from fxguard.records import Source
from fxguard.report.strict_json import strict_json

__all__ = ["need_safetensors", "read_folder", "refuse_to_overwrite", "write_folder"]

VERSION = 1
RECORD, VALUES = "record.json", "values.safetensors"
LARGEST = 2**29  # bytes of record.json
MOST_ELEMENTS = 2**40
KINDS = ("weight", "buffer", "input", "other")
# What reading a damaged file may raise: a wrong type, a missing name, too deep a nest.
DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OSError,
    RecursionError,
    OverflowError,
)
WORDS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def need_safetensors() -> None:
    """Refuse where safetensors is not installed; it is not imported yet.

    Raises:
        UsageError: if it is not.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError("records are kept with safetensors: pip install 'fxguard[record]'")


def refuse_to_overwrite(folder: Path) -> None:
    """Refuse a path that exists, unless it is an empty folder.

    Raises:
        UsageError: if something is there.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists: a record is not overwritten")


def write_folder(recording: Recording, folder: Path) -> None:
    """Write a recording; the folder appears when all of it is there.

    Args:
        recording: what to write.
        folder: a path at which nothing is, or an empty folder.

    Raises:
        UsageError: if something is there, or without safetensors.
        OSError: if the disk does not take it.
    """
    need_safetensors()
    refuse_to_overwrite(folder)
    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    unfinished.mkdir()
    (unfinished / RECORD).write_text(strict_json(_plain(recording)), encoding="utf-8")
    tensors = {str(number): x.contiguous() for number, x in recording.data.items()}
    save_file(tensors, unfinished / VALUES)
    unfinished.rename(folder)


def _plain(recording: Recording) -> dict[str, Any]:
    return {
        "fxguard_recording": VERSION,
        "name": recording.name,
        "about": recording.about,
        "values": [
            [list(value.shape), name_of(value.dtype), list(value.numbers)]
            for value in recording.values
        ],
        "operations": [
            {
                "name": each.name,
                "args": encoded(each.args),
                "kwargs": {name: encoded(x) for name, x in each.kwargs.items()},
                "made": list(each.made),
                "written": [list(pair) for pair in each.written],
                "module": each.module,
                "source": None
                if each.source is None
                else [each.source.file, each.source.line, each.source.code],
            }
            for each in recording.operations
        ],
        "leaves": [[leaf.value, leaf.kind, leaf.name] for leaf in recording.leaves],
        "outputs": [[name, value] for name, value in recording.outputs],
    }


def read_folder(folder: Path) -> Recording:
    """Read what :func:`write_folder` has written. Nothing in it is run or imported.

    Args:
        folder: the folder.

    Raises:
        UsageError: if it is no record, if it is one of another version, or if it is damaged.
    """
    need_safetensors()
    file = folder / RECORD
    if not file.is_file():
        raise UsageError(f"{folder} is no record of fxguard: it has no {RECORD}")
    if file.stat().st_size > LARGEST:
        raise UsageError(f"{file} has more than {LARGEST} bytes")
    from safetensors import SafetensorError

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["fxguard_recording"] != VERSION:
            raise UsageError(
                f"{folder} is a record of version {data['fxguard_recording']}, and this fxguard "
                f"reads version {VERSION}"
            )
        recording = _recording(data)
        recording.data = _tensors(folder / VALUES, recording)
    except (*DAMAGED, SafetensorError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise UsageError(f"{folder} is no record that can be read: {what}") from error
    return recording


def _recording(data: Mapping[str, Any]) -> Recording:
    values = [
        Value(_shape(shape), DTYPES[dtype], _numbers(numbers))
        for shape, dtype, numbers in data["values"]
    ]
    count = len(values)
    operations = [_operation(each, count) for each in data["operations"]]
    leaves = [Leaf(_value(v, count), _one_of(kind), str(name)) for v, kind, name in data["leaves"]]
    outputs = [(str(name), _value(v, count)) for name, v in data["outputs"]]
    about = {str(k): v for k, v in data["about"].items() if isinstance(v, (str, int, float, bool))}
    found = Recording(str(data["name"]), values, operations, leaves, outputs, {}, about)
    found.is_foreign = True
    return found


def _operation(data: Mapping[str, Any], count: int) -> Operation:
    source = data["source"]
    return Operation(
        str(data["name"]),
        tuple(decoded(data["args"], count)),
        {str(name): decoded(x, count) for name, x in data["kwargs"].items()},
        tuple(None if v is None else _value(v, count) for v in data["made"]),
        tuple((_value(a, count), _value(b, count)) for a, b in data["written"]),
        str(data["module"]),
        None if source is None else Source(str(source[0]), int(source[1]), str(source[2])),
    )


def _shape(sizes: Any) -> tuple[int, ...]:
    shape, count = tuple(sizes), 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError("a size that is no number of elements")
        count *= size
    if count > MOST_ELEMENTS:
        raise ValueError("a value that is too large")
    return shape


def _numbers(held: Any) -> Numbers:
    a, b, c, d, count = held
    return Numbers(_number(a), _number(b), _number(c), _number(d), int(count))


def _number(x: Any) -> float:
    return WORDS[x] if isinstance(x, str) else float(x)


def _value(x: Any, count: int) -> int:
    if type(x) is not int or not 0 <= x < count:
        raise ValueError("a value that is not there")
    return x


def _one_of(kind: Any) -> str:
    if kind not in KINDS:
        raise ValueError("a leaf of an unknown kind")
    return str(kind)


def _tensors(file: Path, recording: Recording) -> dict[int, Tensor]:
    from safetensors import safe_open

    found = {}
    with safe_open(str(file), framework="pt") as held:
        for key in held.keys():  # noqa: SIM118 - no dict
            number = _value(int(key), len(recording.values))
            tensor, value = held.get_tensor(key), recording.values[number]
            if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
                raise ValueError(f"value {number} has another shape or dtype than the record says")
            found[number] = tensor
    return found
