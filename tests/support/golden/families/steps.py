"""Optimizers, scalers and schedules that spoil weights, under ``watch``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from support import zoo

from ..records import Cases, Record, of_reports, raised_by

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Lamb(torch.optim.Optimizer):
    """The trust ratio divides by the norm of an update."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    ratio = weight.norm() / weight.grad.norm()
                    weight.add_(weight.grad * ratio, alpha=-group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1),
    "sgd, momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "sgd, nan": lambda weights: torch.optim.SGD(weights, math.nan),
    "sgd, huge": lambda weights: torch.optim.SGD(weights, 1e38),
    "adam": lambda weights: torch.optim.Adam(weights, 1e-3),
    "adam, foreach": lambda weights: torch.optim.Adam(weights, 1e-3, foreach=True),
    "adam, huge": lambda weights: torch.optim.Adam(weights, 1e30),
    "adamw, eps": lambda weights: torch.optim.AdamW(weights, 1e-3, eps=1e-8),
    "adamw, amsgrad": lambda weights: torch.optim.AdamW(weights, 1e-3, amsgrad=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, 1e-3),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, 1e-3),
    "nadam": lambda weights: torch.optim.NAdam(weights, 1e-3),
    "lamb": Lamb,
}


def square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def faint(y: Tensor) -> Tensor:
    """Its gradients are small, and some of them are 0."""
    return y.flatten()[0] * 1e-3


def steep(y: Tensor) -> Tensor:
    return y.float().square().sum() * 100


def flat(y: Tensor) -> Tensor:
    """Its gradients are 0."""
    return (y * 0).sum()


LOSSES = {each.__name__: each for each in (square, faint, steep, flat)}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)


def cases() -> Cases:
    """Optimizers times losses in two dtypes; what scripts do between backward and step."""
    for optimizer, make in OPTIMIZERS.items():
        for place, (loss, function) in enumerate(LOSSES.items()):
            run = functools.partial(stepped, make, function)
            yield f"{optimizer}/{loss}/float16", functools.partial(run, dtype=torch.float16)
            if place % 2 == 0:
                yield f"{optimizer}/{loss}/float32", run
    for name, between in BETWEEN.items():
        for loss in ("square", "flat"):
            run = functools.partial(stepped, OPTIMIZERS["sgd"], LOSSES[loss], between=between)
            yield f"between/{name}/{loss}", run
            yield f"between/{name}/{loss}/raise", functools.partial(run, on_detect="raise")
    for name, script in SCRIPTS.items():
        yield f"script/{name}", functools.partial(watched, script)
        yield f"script/{name}/warn", functools.partial(watched, script, on_detect="warn")
    for name in ("cnn", "twice", "encoder", "lstm", "t5"):
        for optimizer in ("sgd", "adam, huge", "sgd, nan"):
            run = functools.partial(of_the_zoo, name, OPTIMIZERS[optimizer])
            yield f"zoo/{name}/{optimizer}", run


def stepped(
    make: Make,
    loss: Callable[[Tensor], Tensor],
    between: Callable[[nn.Module], None] = lambda model: None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Record:
    """What is said of three steps."""

    def script(model: nn.Module) -> None:
        optimizer = make(iter(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.ones(2, 4, dtype=dtype))).backward()
            between(model)
            optimizer.step()

    return watched(script, net(dtype), **options)


def watched(
    script: Callable[[nn.Module], None], model: nn.Module | None = None, **options: Any
) -> Record:
    """What is said of a script that trains a model."""
    model = net() if model is None else model
    reports: list[fxguard.types.Report] = []

    def run() -> Record:
        with fxguard.watch(model, **{"on_detect": reports.append, **options}):
            script(model)
        return {}

    return {**raised_by(run), **of_reports(reports)}


def of_the_zoo(name: str, make: Make) -> Record:
    """What is said of three steps of a model of the zoo."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)

    def script(model: nn.Module) -> None:
        optimizer = make(iter(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            zoo.loss_of(model(*args, **kwargs)).backward()
            optimizer.step()

    return watched(script, entry.model(train=True))


# What scripts do with gradients and weights between backward and step.


def spoil_a_gradient(model: Any) -> None:
    model[2].bias.grad[1] = math.inf


def clip_after_that(model: nn.Module) -> None:
    spoil_a_gradient(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_by_hand(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.mul_(1.0 / weight.grad.norm())


def divide_by_nothing(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.div_(0)


@torch.no_grad()
def write_a_weight(model: Any) -> None:
    model[0].weight[0, 0] = math.nan


@torch.no_grad()
def normalize_weights(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.div_((weight - weight).norm())


@torch.no_grad()
def average(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.lerp_(torch.full_like(weight, math.inf), 0.1)


BETWEEN: dict[str, Callable[[nn.Module], None]] = {
    function.__name__: function
    for function in (
        *(spoil_a_gradient, clip_after_that, clip_by_hand, divide_by_nothing),
        *(write_a_weight, normalize_weights, average),
    )
}


# Whole scripts.


def scaler(model: nn.Module, first: float = 2.0**40, unscales: bool = True) -> None:
    """A scale that overflows float16 until it is small enough."""
    scaled = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(2, 4)).square().mean()
        scaled.scale(loss).backward()
        if unscales:
            scaled.step(optimizer)
        else:
            optimizer.step()
        scaled.update()


def scaler_and_a_plain_step(model: nn.Module) -> None:
    scaler(model, 2.0**20, unscales=False)


def schedule(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.inf if step else 1.0)
    for _ in range(3):
        optimizer.zero_grad()
        square(model(torch.ones(2, 4))).backward()
        optimizer.step()
        decay.step()


def lbfgs(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e38, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = square(model(torch.ones(2, 4)))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def accumulation(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(4):
        output = model(torch.ones(2, 4))
        (square(output) / (0 if step == 3 else 2)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def two_losses(model: nn.Module) -> None:
    for scale in 1.0, 1e38:
        output = model(torch.ones(2, 4))
        square(output).backward(retain_graph=True)
        (output * scale).square().sum().backward()


def evaluation_between(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e20)
    for _ in range(3):
        optimizer.zero_grad()
        square(model(torch.ones(2, 4))).backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(3, 4)).log().mean().item()


def growing(model: nn.Module) -> None:
    """Weights that double, and more, from step to step."""
    optimizer = torch.optim.SGD(model.parameters(), 30.0)
    for _ in range(12):
        optimizer.zero_grad()
        square(model(torch.ones(2, 4))).backward()
        optimizer.step()


SCRIPTS: dict[str, Callable[[nn.Module], None]] = {
    function.__name__: function
    for function in (
        *(scaler, scaler_and_a_plain_step, schedule, lbfgs, accumulation, two_losses),
        *(evaluation_between, growing),
    )
}
