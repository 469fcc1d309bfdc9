"""What the tensors that Python passes between the graphs of a model are in another form."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["Carried"]

Form = TypeVar("Form")


class Carried(Generic[Form]):
    """The other form of each tensor that a graph was given or has returned.

    A tensor that was written since is another one, and has none.
    """

    def __init__(self) -> None:
        # By `id`. The tensor is kept alive, so that no other one gets its identity.
        self._known: dict[int, tuple[Tensor, int | None, Form]] = {}

    def keep(self, tensor: Tensor, version: int | None, form: Form) -> None:
        """Note the other form of a tensor.

        Args:
            tensor: a tensor of the model.
            version: how often it had been written by then.
            form: the same in the other form.
        """
        self._known[id(tensor)] = tensor, version, form

    def of(self, tensor: Tensor, version: int | None) -> Form | None:
        """The other form of a tensor; None if there is none."""
        _, known, form = self._known.get(id(tensor), (None, None, None))
        return form if known == version else None
