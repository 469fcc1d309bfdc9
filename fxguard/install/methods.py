"""The methods of a model that a guard replaces."""

from __future__ import annotations

from torch.nn import Module

__all__ = ["Methods"]


class Methods:
    """The methods of a model that a guard replaces: each call of one is a batch.

    A subclass can also change other attributes of the model while the guard is installed. A copy of
    the model has a deep copy of this object.
    """

    names: tuple[str, ...] = ("forward",)

    def before_install(self, model: Module) -> None:
        """Called when the model is plain and the guard is about to be installed."""

    def after_install(self, model: Module) -> None:
        """Called when the guard is in front of the model's methods."""

    def before_uninstall(self, model: Module) -> None:
        """Called before the guard is removed; it expects its functions where it put them."""

    def after_uninstall(self, model: Module) -> None:
        """Called when the guard has been removed."""
