"""Lets equal layers share a capture in which each takes its own item of a list.

The attention of layer 3 calls ``cache.update(keys, values, self.layer_idx)``, which reads
``self.layers[3]``. TorchDynamo would look at the number, and capture each layer by itself. Here the
graph is one with "the item at the running layer's ``layer_idx``": what is read of that item is
guarded as ever, and the number only where it decides something.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``BuiltinVariable.call_function``: traces ``items[number]``.
- ``LazyVariableTracker``: a value that the code has not looked at yet.
- ``AttrSource``, ``ChainedSource``: say where a value comes from.
- ``GuardBuilder.get_guard_manager_from_source``: finds the value again when guards are checked.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch._dynamo.bytecode_transformation import create_binary_subscr
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._guards import ChainedSource
from torch.nn import Module

from fxguard.batch.active import here

__all__ = ["lift_items"]


@dataclasses.dataclass(frozen=True)
class ItemOfLayer(ChainedSource):
    """Where an item comes from that the running layer finds by a number of its own.

    Attributes:
        base: where the list comes from.
        number: where the number comes from.
        path: the number as an attribute of the layer: ``attn.layer_idx``.
    """

    number: AttrSource
    path: str

    def reconstruct(self, codegen: Any) -> None:
        """Write the code that reads it."""
        codegen(self.base)
        codegen(self.number)
        codegen.append_output(create_binary_subscr())

    @functools.cached_property
    def _name_template(self) -> str:
        return f"{{0}}[{self.number.name}]"

    def find(self, items: Any) -> Any:
        """The item in the list, for the layer that runs now."""
        layer = None if here.layers is None else here.layers.running
        return items[operator.attrgetter(self.path)(layer)]


@functools.cache
def lift_items() -> None:
    """Teach TorchDynamo these items; done once."""
    call_function = BuiltinVariable.call_function

    @functools.wraps(call_function)
    def call(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.fn is operator.getitem and len(args) == 2:
            source = _source_of(tx, *args)
            if source is not None:
                return VariableTracker.build(tx, _value_of(tx, source), source)
        return call_function(self, tx, args, kwargs)  # type: ignore[arg-type]

    BuiltinVariable.call_function = call  # type: ignore[method-assign]
    manager_from = GuardBuilder.get_guard_manager_from_source

    @functools.wraps(manager_from)
    def find(self: Any, source: Any) -> Any:
        if not isinstance(source, ItemOfLayer) or source.name in self._cached_guard_managers:
            return manager_from(self, source)
        item = self.get(source)
        self.guard_tree_values[id(item)] = item
        manager = manager_from(self, source.base).lambda_manager(
            python_lambda=source.find,
            source=source.name,
            example_value=item,
            guard_manager_enum=self.get_guard_manager_type(source, item),
        )
        self._cached_guard_managers[source.name] = manager
        return manager

    GuardBuilder.get_guard_manager_from_source = find  # type: ignore[method-assign]


def _value_of(tx: Any, source: Any) -> Any:
    """The value that comes from a source."""
    return source.get_value({"G": tx.output.global_scope}, {"L": tx.output.local_scope}, {})


def _source_of(tx: Any, items: Any, number: Any) -> ItemOfLayer | None:
    """Where ``items[number]`` comes from, if a layer finds it by a number that nobody looked at."""
    layer = None if here.layers is None else here.layers.running
    if layer is None or not isinstance(number, LazyVariableTracker) or number.is_realized():
        return None
    source = number.source
    if not isinstance(source, AttrSource) or type(number.original_value()) is not int:
        return None
    items = items.realize()
    if type(items) is not ListVariable or items.source is None:
        return None
    if tx.output.side_effects.is_modified(items):
        return None
    holder = _value_of(tx, source.base)
    if not isinstance(holder, Module):
        return None
    path = next((name for name, each in layer.named_modules() if each is holder), None)
    if path is None:
        return None
    return ItemOfLayer(items.source, source, f"{path}.{source.member}" if path else source.member)
