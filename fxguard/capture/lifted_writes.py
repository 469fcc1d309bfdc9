"""Lets equal layers share a capture in which each sets its own key of a dictionary.

The cross attention of layer 3 runs ``cache.is_updated[3] = True``. TorchDynamo would look at the
number, and run ``cache.is_updated.update({3: True})`` behind the graph. Here it runs
``cache.is_updated[layer.layer_idx] = True`` there. Code that looks at the dictionary after that, in
the same capture, gets it as TorchDynamo has it, and then each layer is captured by itself.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``ConstDictVariable.items``: what it knows of a dictionary; each access goes through it.
- ``SideEffects.codegen_update_mutated``: writes the code that runs behind a graph, for each
  variable whose ``mutation_type.is_modified``.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.dicts import ConstDictVariable

__all__ = ["WrittenDictionary", "has_writes", "have_code", "write", "written"]

WRITTEN = "_fxguard_written"  # of SideEffects: the dictionaries
WRITES = "_fxguard_writes"  # of each: the translator, and pairs of a number and a value


class WrittenDictionary(ConstDictVariable):
    """A dictionary with keys set that nobody has looked at. It is an ordinary one when read."""

    @property
    def items(self) -> Any:
        """What is in it. Reading it looks at the numbers of the layer."""
        tx, writes = self.__dict__.pop(WRITES)
        self.__class__ = ConstDictVariable  # type: ignore[assignment]
        for number, value in writes:
            self.call_method(tx, "__setitem__", [number.realize(), value], {})
        return self.items

    def clone(self, **kwargs: Any) -> Any:
        """One that is like it, as an ordinary one."""
        assert self.items is not None  # read
        return self.clone(**kwargs)


def write(tx: Any, dictionary: Any, number: Any, value: Any) -> bool:
    """Set a key behind the graph; whether that is possible.

    Args:
        tx: the translator of the code.
        dictionary: a ``ConstDictVariable`` with a source, not changed otherwise in this capture.
        number: the key, with a source, not looked at.
        value: what it is set to.
    """
    effects = tx.output.side_effects
    if not value.is_python_constant() or len(tx.output.tracers) > 1:
        return False  # a body of checkpoint or the like is run again
    if not has_writes(dictionary):
        effects.mutation(dictionary)
        dictionary.__class__ = WrittenDictionary
        dictionary.__dict__[WRITES] = (tx, [])
        vars(effects).setdefault(WRITTEN, []).append(dictionary)
    dictionary.__dict__[WRITES][1].append((number, value))
    return True


def has_writes(dictionary: Any) -> bool:
    """Whether a key was set in this capture."""
    return type(dictionary) is WrittenDictionary


def written(dictionary: Any, number: Any) -> Any:
    """What a key was set to by the last write; None if that set another one.

    Args:
        dictionary: one that has writes.
        number: where the key comes from.
    """
    key, value = dictionary.__dict__[WRITES][1][-1]
    return value if key.source == number else None


@functools.cache
def have_code() -> None:
    """Teach TorchDynamo to write these keys; done once."""
    update = SideEffects.codegen_update_mutated

    @functools.wraps(update)
    def write_code(self: SideEffects, cg: Any, *args: Any, **kwargs: Any) -> None:
        dictionaries = list(filter(has_writes, getattr(self, WRITTEN, ())))
        for dictionary in dictionaries:
            dictionary.mutation_type.is_modified = False
        update(self, cg, *args, **kwargs)
        for dictionary in dictionaries:
            dictionary.mutation_type.is_modified = True
            for number, value in dictionary.__dict__[WRITES][1]:
                cg(value)
                cg(dictionary.source)
                cg(number.source)
                cg.append_output(create_instruction("STORE_SUBSCR"))

    SideEffects.codegen_update_mutated = write_code  # type: ignore[method-assign]
