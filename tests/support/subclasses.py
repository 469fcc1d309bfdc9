"""Subclasses of tensors, as users write them, and functions that compute with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing


class Tagged(Tensor):
    """A user's subclass that watches torch functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Replacing(Tensor):
    """A user's subclass that replaces one function by another."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = torch.expm1 if func is torch.exp else func
        return super().__torch_function__(replaced, types, args, kwargs or {})


class Wrapper(Tensor):
    """A wrapper subclass: what it computes is done by the tensor inside."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # torch writes its logs with it
        return f"Wrapper({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, meta: Any, size: Any, stride: Any) -> Wrapper:
        return Wrapper(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = pytree.tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs))
        result = pytree.tree_map_only(Tensor, Wrapper, func(*inside[0], **inside[1]))
        return return_and_correct_aliasing(func, args, kwargs, result)


aten = torch.ops.aten


class Int8(Tensor):
    """A quantized weight as torchao has it: it knows a handful of operations and no others."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, whole.size(), dtype=scale.dtype, device=whole.device
        )

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __repr__(self) -> str:
        return f"Int8({tuple(self.whole.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, meta: Any, size: Any, stride: Any) -> Int8:
        return cls(tensors["whole"], tensors["scale"])

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def floating(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[0]
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(func(weight.whole), func(weight.scale))
        if func is aten.t.default:
            return weight.floating().t()
        raise NotImplementedError(f"{func}")


class Int8Function(Int8):
    """The same, but it takes ``linear`` as a torch function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.floating(), bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.t.default:
            raise NotImplementedError("linear was not taken as a function")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Quantized(nn.Module):
    """A linear layer with such a weight."""

    kind: type[Int8] = Int8

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).requires_grad_(False)
        self.linear.weight = nn.Parameter(self.kind.of(self.linear.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x))


class QuantizedByFunction(Quantized):
    kind = Int8Function


def tagged_given(x: Tensor) -> Tensor:
    return torch.exp(x * 2)


def tagged_inside(x: Tensor) -> Tensor:
    return torch.exp(x.as_subclass(Tagged) * 2).as_subclass(Tensor)


def replaced_inside(x: Tensor) -> Tensor:
    return torch.exp(x.as_subclass(Replacing) * 2).as_subclass(Tensor)


def wrapper_given(x: Tensor) -> Tensor:
    return torch.exp(x * 2)


def wrapper_inside(x: Tensor) -> Tensor:
    return torch.exp(Wrapper(x) * 2).inner
