"""Thirty training runs whose loss jumps, or climbs, for a cause that was planted at some step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxguard.types import Event
from history.exam.architectures import ARCHITECTURES, text
from history.exam.training import Fault, Started, train

__all__ = ["PLANTED", "Planted"]

BEYOND = 40  # how many steps a run goes on after the planted one
CLIMB = 160  # the same for a cause whose effect grows slowly
BEND = 8  # steps: so near is the beginning of a climb found

# Right names where the gradients of all weights are changed: that of any of them.
ALL_GRADIENTS = ("gradient", "weight", "bias")


@dataclass(frozen=True)
class Planted:
    """A run and what is to blame: an `Event.what` that holds any of the strings of `what` is right.

    `train(started, steps=None)` runs it and returns the loss of each step. Without `steps` it ends
    some 40 steps after the planted one, or 160 where the cause grows.
    """

    name: str
    architecture: str
    dtype: str
    step: int
    cause: str
    what: tuple[str, ...]
    train: Callable[..., list[float]]

    def is_named_by(self, event: Event) -> bool:
        """Whether an event is this, by its kind, its name and its step."""
        apart = BEND if self.cause == "growth" else 1
        is_named = any(part in event.what for part in self.what)
        return event.cause == self.cause and is_named and abs(event.step - self.step) <= apart


# Data: from the planted step on, or in one batch.


def binary_files(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compressed bytes instead of text, as where an archive lies among the documents."""
    packed = zlib.compress(bytes(text().tolist()))
    bytes_ = torch.frombuffer(bytearray(packed), dtype=torch.uint8).long()
    count, length = tokens.shape
    starts = (torch.arange(count)[:, None] * 997 + tokens.sum()) % (len(bytes_) - length - 1)
    stretch = bytes_[starts + torch.arange(length + 1)]
    return stretch[:, :-1], stretch[:, 1:]


def padding_alone(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(tokens), torch.zeros_like(targets)


def one_further(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Targets that are shifted twice: the last one is that of the next sample."""
    return tokens, targets.flatten().roll(-1).view_as(targets)


def in_bytes(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Nobody has divided by 255."""
    return images * 255, labels


def random_labels(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, torch.randint(10, labels.shape)


def metres_in_millimetres(table: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    table[:, 6] *= 1000
    return table, labels


def enormous_sample(table: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    table[17] = table[17] * 3e4
    return table, labels


# Weights, written by something else than the optimizer.


@torch.no_grad()
def drawn_anew(model: nn.Module, name: str, std: float) -> None:
    model.get_parameter(name).normal_(std=std)


@torch.no_grad()
def multiplied(model: nn.Module, name: str, factor: float) -> None:
    model.get_parameter(name).mul_(factor)


@torch.no_grad()
def added(model: nn.Module, name: str, amount: float) -> None:
    model.get_parameter(name).add_(amount)


@torch.no_grad()
def row_of_zeros(model: nn.Module, name: str, row: int) -> None:
    model.get_parameter(name)[row] = 0


def other_deviation(model: nn.Module) -> None:
    """The deviations of a table that was scaled already."""
    model.get_buffer("standardize.std").fill_(1.0)


def loaded_from(model: nn.Module, name: str, other: str) -> None:
    model.get_submodule(name).load_state_dict(model.get_submodule(other).state_dict())


# The optimizer.


def restarted(optimizer: Optimizer) -> None:
    """A schedule starts again at the rate of another model, and decays from there."""
    for group in optimizer.param_groups:
        group["lr"] = 0.97 * group["lr"] if group["lr"] > 0.01 else 0.12


def set_option(optimizer: Optimizer, name: str, value: Any) -> None:
    for group in optimizer.param_groups:
        group[name] = value


def faster(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= factor


def scaled_state(optimizer: Optimizer, name: str, factor: float) -> None:
    for state in optimizer.state.values():
        state[name].mul_(factor)


# Gradients, between backward and step.


@torch.no_grad()
def all_scaled(model: nn.Module, factor: float) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.mul_(factor)


@torch.no_grad()
def noise_of(model: nn.Module, name: str, std: float) -> None:
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    gradient.add_(torch.randn_like(gradient), alpha=std)


# Operations: from the planted step on.


def attribute(model: nn.Module, modules: Sequence[str], name: str, value: Any) -> None:
    for module in modules:
        setattr(model.get_submodule(module), name, value)


def other_activation(model: nn.Module) -> None:
    """A smooth relu whose argument is not what its author meant."""
    model.get_submodule("blocks.0.mlp").act = nn.Softplus(beta=0.01)


def overwrites(model: nn.Module, module: str, feature: int, value: float) -> None:
    """A hook that somebody has left in writes one feature of what a module returns."""

    def write(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[..., feature] = value
        return output

    model.get_submodule(module).register_forward_hook(write)


PLANTED: list[Planted] = []


def plant(
    name: str, dtype: str, step: int, cause: str, what: str | tuple[str, ...], fault: Fault
) -> None:
    """Add a run; the first word of its name is its architecture."""
    architecture = name.partition("-")[0]
    length = step + (CLIMB if cause == "growth" else BEYOND)

    def run(started: Started, steps: int | None = None) -> list[float]:
        kind, seed = ARCHITECTURES[architecture], zlib.crc32(name.encode()) % 1000
        return train(kind, dtype, seed, started, length if steps is None else steps, fault, step)

    whats = (what,) if isinstance(what, str) else what
    PLANTED.append(Planted(name, architecture, dtype, step, cause, whats, run))


LONG, SHORT = "float32", "bfloat16"
TEXT = ("input", "targets")  # the targets of a language model are its inputs, moved

plant("gpt-binary-files", LONG, 210, "data", TEXT, Fault(data=binary_files, lasts=None))
plant("gpt-padding-alone", SHORT, 233, "data", TEXT, Fault(data=padding_alone))
plant("gpt-targets-one-further", LONG, 190, "data", "targets", Fault(data=one_further, lasts=None))
plant("vit-images-in-bytes", SHORT, 254, "data", "input", Fault(data=in_bytes, lasts=None))
plant("vit-random-labels", LONG, 302, "data", "targets", Fault(data=random_labels, lasts=None))
plant(
    *("mlp-column-in-other-units", SHORT, 271, "data", "input"),
    Fault(data=metres_in_millimetres, lasts=None),
)
plant("moe-enormous-sample", SHORT, 187, "data", "input", Fault(data=enormous_sample))

plant(
    *("gpt-weight-drawn-anew", SHORT, 175, "weights", "blocks.1.mlp.down.weight"),
    Fault(model=partial(drawn_anew, name="blocks.1.mlp.down.weight", std=4.0)),
)
plant(
    *("gpt-gain-multiplied", LONG, 248, "weights", "norm.weight"),
    Fault(model=partial(multiplied, name="norm.weight", factor=8)),
)
plant(
    *("mlp-buffer-overwritten", LONG, 222, "weights", "standardize.std"),
    Fault(model=other_deviation),
)
plant(
    *("mlp-loaded-from-another-layer", SHORT, 313, "weights", "layers.1."),
    Fault(model=partial(loaded_from, name="layers.1", other="layers.2")),
)
plant(
    *("moe-router-negated", LONG, 241, "weights", "layers.0.router.weight"),
    Fault(model=partial(multiplied, name="layers.0.router.weight", factor=-1)),
)
plant(
    *("moe-row-of-zeros", SHORT, 296, "weights", "head.weight"),
    Fault(model=partial(row_of_zeros, name="head.weight", row=1)),
)

plant(
    *("vit-learning-rate-times-30", SHORT, 226, "step", "learning rate"),
    Fault(optimizer=partial(faster, factor=30)),
)
plant(
    *("gpt-schedule-restarts", LONG, 268, "step", "learning rate"),
    Fault(optimizer=restarted, lasts=None),
)
plant(
    *("gpt-second-moments-of-zero", SHORT, 203, "step", "exp_avg_sq"),
    Fault(optimizer=partial(scaled_state, name="exp_avg_sq", factor=0)),
)
plant(
    *("mlp-momentum-turned", LONG, 164, "step", "momentum_buffer"),
    Fault(optimizer=partial(scaled_state, name="momentum_buffer", factor=-50)),
)

plant(
    *("vit-gradients-negated", LONG, 181, "gradient", ALL_GRADIENTS),
    Fault(gradients=partial(all_scaled, factor=-1), lasts=None),
)
plant(
    *("mlp-gradients-not-zeroed", LONG, 219, "gradient", ALL_GRADIENTS),
    Fault(keeps_gradients=True, lasts=None),
)
plant(
    *("mlp-noise-in-one-gradient", SHORT, 243, "gradient", "layers.1.linear.weight"),
    Fault(gradients=partial(noise_of, name="layers.1.linear.weight", std=1.0)),
)
plant(
    *("moe-clipping-left-out", LONG, 199, "gradient", ALL_GRADIENTS),
    Fault(leaves_out_clipping=True, lasts=None),
)

plant(
    *("gpt-missing-scale", LONG, 318, "operation", ("blocks.0.attn", "mul")),
    Fault(
        model=partial(
            attribute, modules=[f"blocks.{n}.attn" for n in range(3)], name="scale", value=1.0
        )
    ),
)
plant(
    *("gpt-mask-removed", SHORT, 310, "operation", "blocks.0.attn"),
    Fault(
        model=partial(
            attribute, modules=[f"blocks.{n}.attn" for n in range(3)], name="causal", value=False
        )
    ),
)
plant(
    *("vit-activation-swapped", SHORT, 168, "operation", "blocks.0.mlp"),
    Fault(model=other_activation),
)
plant(
    *("vit-hook-overwrites", LONG, 205, "operation", "blocks.1"),
    Fault(model=partial(overwrites, module="blocks.1.mlp", feature=7, value=1e3)),
)
plant(
    *("mlp-dropout-of-nearly-all", SHORT, 196, "operation", "layers.0.dropout"),
    Fault(
        model=partial(
            attribute, modules=[f"layers.{n}.dropout" for n in range(3)], name="p", value=0.9
        )
    ),
)
plant(
    *("moe-temperature", SHORT, 215, "operation", ("layers.1", "div")),
    Fault(model=partial(attribute, modules=["layers.1"], name="temperature", value=100.0)),
)

plant(
    *("gpt-warm-up-never-ends", SHORT, 150, "growth", ("learning rate", "blocks", "matmul")),
    Fault(optimizer=partial(faster, factor=1.035), lasts=None),
)
plant(
    *("vit-logit-scale-grows", LONG, 158, "growth", ("logit_scale", "exp", "mul")),
    Fault(model=partial(added, name="logit_scale", amount=0.035), lasts=None),
)
plant(
    *("moe-decay-of-wrong-sign", LONG, 172, "growth", ("layers", "experts", "head", "weight")),
    Fault(optimizer=partial(set_option, name="weight_decay", value=-3.0), lasts=None),
)
