"""Marks: placeholder calls that record in a captured graph what a module received and returned.

A graph contains operations. It does not say that ``encoder.block.0`` returned *these* values for
*those* positional and keyword arguments, or that a user named a value. A mark is a function that
does nothing. TorchDynamo is told to put calls of it into the graph, the Plan reads them, and the
insertion pass removes them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["MARKS", "NOT_TENSOR", "NO_VALUE", "flatten", "module_returned", "value_named"]

# Prefix of a label without a tensor; the rest of the string is the label.
NO_VALUE = "None:"
NOT_TENSOR = "not a tensor:"


def module_returned(labels: tuple[str, ...], *tensors: Tensor) -> None:
    """Mark that a module call returned: a label for each row, a tensor for each label with one."""


def value_named(label: str, tensor: Tensor) -> None:
    """Mark that the user named this value."""


MARKS = frozenset({module_returned, value_named})

for mark in MARKS:
    torch.compiler.allow_in_graph(mark)


def flatten(label: str, value: Any, labels: list[str], tensors: list[Tensor]) -> None:
    """Append the rows of one argument or output; containers are entered with the key as index.

    TorchDynamo traces this function, hence its plain style.
    """
    if isinstance(value, Tensor):
        labels.append(label)
        tensors.append(value)
    elif value is None:
        labels.append(NO_VALUE + label)
    elif isinstance(value, dict):
        for key, item in value.items():
            flatten(f"{label}[{key}]", item, labels, tensors)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            flatten(f"{label}[{index}]", item, labels, tensors)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            flatten(f"{label}[{field.name}]", getattr(value, field.name), labels, tensors)
    else:
        labels.append(NOT_TENSOR + label)


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[tuple[str, ...], list[Tensor]]:
    """The rows of one call: first inputs, then outputs."""
    labels: list[str] = []
    tensors: list[Tensor] = []
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):  # most are, and a call would take as long as all of this
            labels.append(f"input[{name}]")
            tensors.append(value)
        else:
            flatten(f"input[{name}]", value, labels, tensors)
    flatten("output", output, labels, tensors)
    return tuple(labels), tensors


def rows_of(labels: Iterable[str], tensors: Iterable[Any]) -> Iterator[tuple[str, Any, str]]:
    """(label, tensor or None, note) of each row, from the result of :func:`flatten`."""
    remaining = iter(tensors)
    for label in labels:
        if label.startswith(NO_VALUE):
            yield label.removeprefix(NO_VALUE), None, "None"
        elif label.startswith(NOT_TENSOR):
            yield label.removeprefix(NOT_TENSOR), None, "not a tensor"
        else:
            yield label, next(remaining), ""
