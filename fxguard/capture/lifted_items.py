"""Lets equal layers share a capture in which each takes its own item of a list or dictionary.

The attention of layer 3 calls ``cache.update(keys, values, self.layer_idx)``, which reads
``self.layers[3]``, and a decoder's cross attention reads ``cache.is_updated.get(3)``. TorchDynamo
would look at the number, and capture each layer by itself. Here the graph is one with "the item at
the running layer's ``layer_idx``": what is read of that item is guarded as ever, and the number
only where it decides something.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``BuiltinVariable.call_function``: traces ``items[number]``.
- ``ConstDictVariable.call_method``: traces ``items.get(number)`` and ``items[number] = value``.
- ``compare_op_handlers``: trace ``number >= 12``.
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

from torch._dynamo.bytecode_transformation import create_binary_subscr, create_call_function
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._guards import ChainedSource
from torch.nn import Module

from fxguard.batch.active import here
from fxguard.capture import lifted_writes

__all__ = ["lift_items"]

# Methods of a dictionary, with the number of their arguments.
READS_OR_WRITES = {"get": 1, "__setitem__": 2}

# Comparisons, with their function's name in ``operator``.
COMPARISONS = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}

# What TorchDynamo has a list or a dictionary as. It is the second one after a key was set.
LISTS = (ListVariable,)
DICTIONARIES = (ConstDictVariable, lifted_writes.WrittenDictionary)


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
        return items[self.number_of_layer()]

    def number_of_layer(self) -> Any:
        """The number of the layer that runs now."""
        layer = None if here.layers is None else here.layers.running
        return operator.attrgetter(self.path)(layer)


@dataclasses.dataclass(frozen=True)
class GottenOfLayer(ItemOfLayer):
    """An item that a dictionary may lack: ``items.get(number)``."""

    def reconstruct(self, codegen: Any) -> None:
        """Write the code that reads it."""
        codegen.add_push_null(lambda: codegen.load_import_from("builtins", "dict"))
        codegen.append_output(codegen.create_load_attr("get"))
        codegen(self.base)
        codegen(self.number)
        codegen.extend_output(create_call_function(2, False))

    @functools.cached_property
    def _name_template(self) -> str:
        return f"{{0}}.get({self.number.name})"

    def find(self, items: Any) -> Any:
        """The item in the dictionary, or None, for the layer that runs now."""
        return items.get(self.number_of_layer())


@dataclasses.dataclass(frozen=True)
class ComparedOfLayer(ChainedSource):
    """How a number of the running layer compares with a constant: ``layer_idx >= 12``.

    Attributes:
        base: where the number comes from.
        sign: a key of ``COMPARISONS``.
        constant: what it is compared with.
    """

    sign: str
    constant: int

    def reconstruct(self, codegen: Any) -> None:
        """Write the code that computes it."""
        codegen.add_push_null(lambda: codegen.load_import_from("operator", COMPARISONS[self.sign]))
        codegen(self.base)
        codegen.append_output(codegen.create_load_const(self.constant))
        codegen.extend_output(create_call_function(2, False))

    @functools.cached_property
    def _name_template(self) -> str:
        return f"({{0}} {self.sign} {self.constant})"

    def find(self, number: Any) -> Any:
        """The comparison for a number."""
        return getattr(operator, COMPARISONS[self.sign])(number, self.constant)


@functools.cache
def lift_items() -> None:
    """Teach TorchDynamo these items; done once."""
    call_function = BuiltinVariable.call_function

    @functools.wraps(call_function)
    def call(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.fn is operator.getitem and len(args) == 2:
            source = _source_of(tx, args[0], args[1], LISTS)
            if source is not None:
                return VariableTracker.build(tx, _value_of(tx, source), source)
        return call_function(self, tx, args, kwargs)  # type: ignore[arg-type]

    BuiltinVariable.call_function = call  # type: ignore[method-assign]
    call_method = ConstDictVariable.call_method

    @functools.wraps(call_method)
    def of_dictionary(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in READS_OR_WRITES and len(args) == READS_OR_WRITES[name] and not kwargs:
            source = _source_of(tx, self, args[0], DICTIONARIES)
            if source is not None and type(_value_of(tx, source.base)) is dict:
                found = _read(tx, self, source) if name == "get" else _write(tx, self, *args)
                if found is not None:
                    return found
        return call_method(self, tx, name, args, kwargs)

    ConstDictVariable.call_method = of_dictionary  # type: ignore[method-assign]
    lifted_writes.have_code()
    for sign in COMPARISONS:
        _lift_comparison(sign)
    manager_from = GuardBuilder.get_guard_manager_from_source

    @functools.wraps(manager_from)
    def find(self: Any, source: Any) -> Any:
        if not isinstance(source, LIFTED) or source.name in self._cached_guard_managers:
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


def _read(tx: Any, dictionary: Any, item: ItemOfLayer) -> Any:
    """What ``dictionary.get(number)`` is; None if TorchDynamo has to find out."""
    if lifted_writes.has_writes(dictionary):
        return lifted_writes.written(dictionary, item.number)
    source = GottenOfLayer(item.base, item.number, item.path)
    return VariableTracker.build(tx, _value_of(tx, source), source)


def _write(tx: Any, dictionary: Any, number: Any, value: Any) -> Any:
    """What ``dictionary[number] = value`` is; None if TorchDynamo has to do it."""
    if lifted_writes.write(tx, dictionary, number, value):
        return ConstantVariable.create(None)
    return None


def _value_of(tx: Any, source: Any) -> Any:
    """The value that comes from a source."""
    return source.get_value({"G": tx.output.global_scope}, {"L": tx.output.local_scope}, {})


def _lift_comparison(sign: str) -> None:
    """Teach TorchDynamo a comparison of a layer's number, as in ``_source_of``, with a constant."""
    compare = compare_op_handlers[sign]

    @functools.wraps(compare)
    def lifted(tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number, other = args
        constant = other.value if type(other) is ConstantVariable else None
        if type(constant) is int and _path_of(tx, number) is not None:
            source = ComparedOfLayer(number.source, sign, constant)
            return VariableTracker.build(tx, _value_of(tx, source), source)
        return compare(tx, args, kwargs)

    compare_op_handlers[sign] = lifted


def _source_of(tx: Any, items: Any, number: Any, kinds: tuple[type, ...]) -> ItemOfLayer | None:
    """Where ``items[number]`` comes from, if a layer finds it by a number that nobody looked at."""
    path = _path_of(tx, number)
    if path is None:
        return None
    items = items.realize()
    if type(items) not in kinds or items.source is None:
        return None
    if tx.output.side_effects.is_modified(items) and not lifted_writes.has_writes(items):
        return None
    return ItemOfLayer(items.source, number.source, path)


def _path_of(tx: Any, number: Any) -> str | None:
    """A number that nobody looked at, as an attribute of the running layer; None for others."""
    layer = None if here.layers is None else here.layers.running
    if layer is None or not isinstance(number, LazyVariableTracker) or number.is_realized():
        return None
    source = number.source
    if not isinstance(source, AttrSource) or type(number.original_value()) is not int:
        return None
    holder = _value_of(tx, source.base)
    if not isinstance(holder, Module):
        return None
    path = next((name for name, each in layer.named_modules() if each is holder), None)
    if path is None:
        return None
    return f"{path}.{source.member}" if path else source.member


# What is found again by a function of Python.
LIFTED = (ItemOfLayer, ComparedOfLayer)
