"""What a node of an FX graph tells about itself, whichever tool captured the graph."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.records import Role

__all__ = [
    "attribute_of",
    "calls_of",
    "class_name",
    "class_of",
    "elements_of",
    "example_of",
    "input_name",
    "label_of",
    "leaves",
    "memory_of",
    "path_of",
    "placeholder_role",
    "storage_of",
]


def example_of(node: Node) -> Any:
    """The fake result that the capture kept."""
    # TorchDynamo and torch.export use different keys.
    return node.meta.get("example_value", node.meta.get("val"))


def elements_of(
    example: Any, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Every tensor in a result, with the indices that lead to it."""
    if isinstance(example, Tensor):
        yield path, example
    elif isinstance(example, (tuple, list)):
        for index, item in enumerate(example):
            yield from elements_of(item, (*path, index))


def label_of(name: str, path: tuple[int, ...]) -> str:
    """``output[1][0]``."""
    return name + "".join(f"[{index}]" for index in path)


def leaves(argument: Any) -> list[Any]:
    """Every item in nested arguments of a node."""
    if isinstance(argument, (tuple, list)):
        items: Iterable[Any] = argument
    elif isinstance(argument, dict):
        items = argument.values()
    elif isinstance(argument, slice):
        items = (argument.start, argument.stop, argument.step)
    else:
        return [argument]
    found: list[Any] = []
    for item in items:
        if isinstance(item, (tuple, list, dict, slice)):
            found += leaves(item)
        else:
            found.append(item)
    return found


def memory_of(example: Any) -> int | None:
    """A key that results sharing memory have in common; None if the capture does not tell."""
    storage = storage_of(example)
    return None if storage is None else int(storage._cdata)


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """The storage of a tensor's elements; None if it has no storage of its own."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()
    except (RuntimeError, NotImplementedError):  # wrapper subclasses have no storage
        return None


def placeholder_role(node: Node) -> tuple[Role, str]:
    """Role and name of a graph's input."""
    source = getattr(node, "_dynamo_source", None)  # set by TorchDynamo on graph inputs
    text = source.name if source is not None else ""
    text = text() if callable(text) else text  # a method before torch 2.10
    match = re.search(r"\.(_parameters|_buffers)\['([^']+)'\]$", text)
    if match:
        module = clean_path(text[: match.start()])
        name = f"{module}.{match[2]}".lstrip(".")
        return (Role.WEIGHT if match[1] == "_parameters" else Role.BUFFER), name
    if isinstance(example_of(node), torch.nn.Parameter):
        return Role.WEIGHT, clean_path(text) or input_name(text) or str(node.target)
    return Role.INPUT, input_name(text) or str(node.target)


def input_name(source: str) -> str:
    """The user's name for an input of a graph, from its TorchDynamo source.

    Example:
        >>> input_name("L['batch']['x']"), input_name("L['args'][0]")
        ("batch['x']", "input[0]")
        >>> input_name("L['cache'].layers[L['self']._modules['attn'].layer_idx].keys")
        "cache.layers[self.attn.layer_idx].keys"
    """
    # Torch calls modules with these.
    source = re.sub(r"^L\['args'\](?=\[)", "input", source)
    source = re.sub(r"^L\['kwargs'\]\['(\w+)'\]", r"input[\1]", source)
    source = re.sub(r"^G\['__import_\w+'\]\.", "", source)  # a global of another module
    source = re.sub(r"\._modules\['([^']+)'\]", r".\1", source)
    return re.sub(r"(^|(?<=\[))[LG]\['(\w+)'\]", r"\2", source)


def attribute_of(graph_module: GraphModule, target: str) -> Any:
    """The object that a ``get_attr`` node reads."""
    value: Any = graph_module
    for name in target.split("."):
        value = getattr(value, name)
    return value


def clean_path(source: str) -> str:
    """``L['self']._modules['encoder'].block`` to ``encoder.block``."""
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", source)
    path = re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", path)  # it has no name in a report
    path = re.sub(r"^L\['args'\]\[0\]", "L['self']", path)  # torch calls a method with these
    path = re.sub(r"^[LG]\['\w+'\](\.__self__)?\.?", "", path)
    if path.endswith("__self__"):  # of a method that the model called, so of the model itself
        return ""
    return path.removeprefix("self.") if path != "self" else ""


def stack_of(node: Node) -> dict[str, tuple[str, Any]]:
    """The module calls around a node, outermost first: key to (path, class)."""
    return node.meta.get("nn_module_stack") or {}


def calls_of(node: Node) -> tuple[str, ...]:
    """Keys of the module calls around a node, outermost first. A second call has another key."""
    keys = tuple(stack_of(node))
    if node.op == "call_module" and (not keys or stack_of(node)[keys[-1]][0] != node.target):
        return (*keys, f"{node.target}@{node.name}")
    return keys


def path_of(key: str, entry: tuple[str, Any], names: Mapping[int, str]) -> str:
    """The qualified name of the module of one stack entry.

    TorchDynamo's keys are ``id(module)``, with ``@n`` for the n-th call of the same module. After a
    graph break paths may start anywhere, but the identity is still right.
    """
    identity = key.partition("@")[0]
    if identity.isdigit() and int(identity) in names:
        return names[int(identity)]
    return clean_path(entry[0])


def class_of(entry: tuple[str, Any]) -> str:
    """The class name of a stack entry; export keeps a dotted string, others the class."""
    kind = entry[1]
    return kind.rpartition(".")[2] if isinstance(kind, str) else class_name(kind)


def class_name(kind: type) -> str:
    """The name of a module's class; the user's class if ``fully_shard`` has derived its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and kind.__bases__[:1] == (fsdp.FSDPModule,) and len(kind.__bases__) == 2:
        return kind.__bases__[1].__name__
    return kind.__name__
