"""The name of what returned the results of a batch, where "the model" may mean another module."""

from __future__ import annotations

from torch.nn import Module

from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.graph.nodes import class_name
from fxguard.torch_names import Criterion

__all__ = ["returned_by"]


def returned_by(batch: Batch, flow: DataFlow, model: Module | None) -> str:
    """``criterion``, ``CrossEntropyLoss``; "" for the model.

    A module of several has the name that the script has for it. Others that are not the model have
    the name of their class: criteria, functions, modules without weights, and modules that read
    what a model returned.

    Args:
        batch: the batch.
        flow: its data flow.
        model: the module that is guarded; None for the graphs of a backend.
    """
    if flow.held_as or model is None:
        return flow.held_as
    is_given = isinstance(model, Criterion) or bool(batch.given) or batch.received is not None
    is_function = "__wrapped__" in vars(model)
    has_weights = next(model.parameters(), None) is not None
    return "" if has_weights and not (is_given or is_function) else class_name(type(model))
