"""Models that a script calls itself are named by what holds them there.

Functions with an ``assert`` hold no models here: pytest makes them read ``locals()``, and variables
of a function that does so are not looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options
from fxguard.report.report import Report

X = torch.ones(2, 4)


def block(out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, out))


class VAE(nn.Module):
    """Nobody calls its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = block(), block()
        self.blocks = nn.ModuleList([block()])

    def encode(self, x: Tensor) -> Any:
        return self.encoder(x)

    def decode(self, x: Tensor) -> Any:
        return self.decoder(x) * 1


class Agent:
    """A plain object with two models."""

    def __init__(self) -> None:
        self.actor, self.critic = block(), block()

    def evaluate(self, x: Tensor) -> Any:
        return self.actor(x), self.critic(x)


class Trainer:
    """A plain object with one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(4))

    def fit(self) -> Any:
        return self.criterion(self.model(X), torch.zeros(2, dtype=torch.int64))


class Lit(nn.Module):
    """A module that trains another one, and is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def training_step(self, x: Tensor) -> Any:
        return self.net(x).sum()


def by_a_method() -> Any:
    vae = VAE()
    vae.decode(vae.encode(X))
    return vae


def by_a_function() -> Any:
    def loss_of(model: VAE) -> Any:
        return model.blocks[0](X).sum() + model.encoder[2](X).sum()

    vae = VAE()
    loss_of(vae)
    return vae


def by_an_object() -> Any:
    agent = Agent()
    agent.evaluate(X)
    return agent


def by_nobody_but_self() -> Any:
    return Agent().evaluate(X)


def by_variables() -> Any:
    generator, discriminator = block(), block()
    discriminator(generator(X))
    return generator, discriminator


def by_a_dictionary() -> Any:
    nets = {"g": block(), "d": block()}
    nets["d"](nets["g"](X))
    return nets


def by_a_list() -> Any:
    parts = [block(), VAE()]
    parts[0](X), parts[1].encode(X)  # type: ignore[operator]
    return parts


def by_an_attribute_of_an_attribute() -> Any:
    run = SimpleNamespace(agent=SimpleNamespace(policy=VAE()))
    run.agent.policy.encode(X)
    return run


def by_two_names() -> Any:
    first, other = block(), block()
    second = first
    second(X), other(X)
    return first, other


def by_a_module_that_trains_it() -> Any:
    lit = Lit()
    lit.training_step(X)
    return lit


def alone() -> Any:
    model = block()
    copied = torch.ones(3)
    model(X), copied.sum()
    return model


def alone_in_a_trainer() -> Any:
    trainer = Trainer(block())
    trainer.fit()
    return trainer


def by_nobody() -> Any:
    return block()(X)


def as_a_part_of_what_is_called() -> Any:
    inner = block()
    model = nn.Sequential(inner)
    model(X)
    return model


HELD = [
    (by_a_method, ["vae.encoder", "vae.decoder"]),
    (by_a_function, ["vae.blocks.0", "vae.encoder.2"]),
    (by_an_object, ["agent.actor", "agent.critic"]),
    (by_variables, ["generator", "discriminator"]),
    (by_a_dictionary, ["nets.g", "nets.d"]),
    (by_a_list, ["parts.0", "parts.1.encoder"]),
    (by_an_attribute_of_an_attribute, ["run.agent.policy.encoder"]),
    (by_two_names, ["first", "other"]),
    (by_a_module_that_trains_it, ["lit.net"]),
    (alone, [""]),
    (alone_in_a_trainer, [""]),
    (as_a_part_of_what_is_called, [""]),
]


@pytest.fixture
def outermost() -> Iterator[SimpleNamespace]:
    """The models of a script, guarded as by ``fxguard run``; with the reports and refusals."""
    torch.manual_seed(0)
    reports: list[Report] = []
    refused: list[tuple[str, str]] = []
    options = Options(on_detect=reports.append, ignore=["*ignored*:log", "0:log"])
    with OutermostModules(
        options, follow_losses=True, on_refusal=lambda *why: refused.append(why)
    ) as models:
        yield SimpleNamespace(models=models, reports=reports, refused=refused)


@pytest.mark.parametrize(("run", "expected"), HELD)
def test_a_model_is_named_by_what_holds_it(
    run: Callable[[], Any], expected: list[str], outermost: SimpleNamespace
) -> None:
    """By the attribute, the item or the variable; one that is alone, or held by nobody, needs no
    name. Names of its modules begin with its own."""
    holder = run()
    assert holder is not None  # a model that nobody holds any more is freed
    guards = [g for g in outermost.models.guards if g.model_name != "CrossEntropyLoss"]
    frames = [guard.frames() for guard in guards]
    assert [each[-1].name for each in frames] == expected
    for name, each in zip(expected, frames, strict=True):
        assert all(frame.name.startswith(name) for frame in each)
        linear = next(frame for frame in each if frame.kind == "Linear")
        assert [row.label for row in linear.rows[:2]] == ["weight", "bias"]
        assert linear.rows[0].abs_max  # the weights are found under the longer name, too


@pytest.mark.parametrize(
    ("run", "expected"), [(by_nobody_but_self, ["actor", "critic"]), (by_nobody, [""])]
)
def test_a_model_that_is_gone_after_its_call_had_its_name(
    run: Callable[[], Any], expected: list[str], outermost: SimpleNamespace
) -> None:
    """An object without a variable lends its attributes; what nobody holds has no name."""
    run()
    assert [guard.recorder.held_as for guard in outermost.models.guards] == expected


def test_frames_are_in_order_of_execution_in_all_models_of_a_step(
    outermost: SimpleNamespace,
) -> None:
    """What the script computed lies between its models, as it ran; the climb crosses them."""
    ran: list[str] = []

    def step() -> None:
        vae = VAE()
        with torch.no_grad():
            vae.decoder[2].weight.copy_(1e18 * 2.0 ** torch.arange(16.0).reshape(4, 4))
        names = {each: f"vae.{name}" for name, each in vae.named_modules()}
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, *_: ran.append(names[module])
        )
        z = vae.encode(X)
        ran.append("mul")
        z = z * 1e6
        y = vae.decode(z)
        ran.extend(["mul", "sub", "square"])
        loss = (y - X).square().mean()
        hook.remove()
        loss.backward()

    step()
    report = outermost.reports[0]
    assert [each.kind if each.is_op else each.name for each in report.frames] == ran
    climbed = [climb.title for climb in report.origins[0].climb]
    assert "mul" in climbed
    assert "vae.decoder.2 linear" in climbed


class Whole(nn.Module):
    """Two models and what lies between them, as one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = block(), block()

    def forward(self, x: Tensor) -> Any:
        return (self.b(self.a(x) * 1e20) * 1e15).square()


def test_a_climb_through_several_models_is_that_of_one_model(outermost: SimpleNamespace) -> None:
    """The same operations, lines and numbers as where one module computes all of it."""
    whole = Whole()
    whole.b[1] = nn.Identity()
    a, b = whole.a, whole.b
    (b(a(X) * 1e20) * 1e15).square().sum().backward()
    fxguard.instrument(whole, on_detect=outermost.reports.append)(X)
    parts, one = (outermost.reports[i].origins[0].climb for i in (0, -1))
    assert [(c.before, c.after) for c in parts] == [(c.before, c.after) for c in one]
    assert len(parts) > 1


def test_a_bad_gradient_is_that_of_a_named_weight(outermost: SimpleNamespace) -> None:
    """Two models whose weights have the same names inside."""

    def step() -> None:
        agent = Agent()
        mean, value = agent.evaluate(X)
        (mean.sum() + (value * 0).sum().sqrt()).backward()

    step()
    verdict = "\n".join(outermost.reports[0].verdict)
    assert "agent.critic.2.weight" in verdict
    assert "agent.actor" not in verdict


class Ignored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return (x * self.weight).log()


def test_globs_name_operations_with_and_without_the_name_of_the_model(
    outermost: SimpleNamespace,
) -> None:
    """``*ignored*:log`` names a model by its variable, ``0:log`` a module inside of one."""

    def step() -> None:
        ignored, holder, seen = Ignored(), nn.Sequential(Ignored()), Ignored()
        ignored(X), holder(X), seen(X)

    step()
    assert [report.origins[0].frame.name for report in outermost.reports] == ["seen"]


def test_looking_for_names_keeps_nothing_and_changes_no_variables(
    outermost: SimpleNamespace,
) -> None:
    """Reading the variables of a function would keep what they hold until it returns, and would
    show in a dictionary that ``locals()`` gave to it."""

    def keeps() -> Any:
        model, other = block(), block()
        kept = torch.ones(3)
        reference = weakref.ref(kept)
        other(model(X))
        del kept
        return reference() is None

    def reads() -> Any:
        before = locals()
        model, other = block(), block()
        other(model(X))
        return sorted(before)

    assert keeps()
    assert reads() == []


class Own(nn.Module):
    """As in gpytorch: a ``__call__`` that calls the forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Any:
        return self.forward(x)

    def forward(self, x: Tensor) -> Any:
        return (self.linear(x) * 0).log()


class OwnAndSuper(Own):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)


class NoForward(nn.Module):
    """Its ``__call__`` computes everything, with a part that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.part = block()

    def __call__(self, x: Tensor) -> Any:
        return self.part(x)


class OtherForward(NoForward):
    def forward(self, x: Tensor) -> Any:
        return x


def test_a_module_with_a_call_of_its_own_is_guarded(outermost: SimpleNamespace) -> None:
    """Where that calls the forward, also in a class that was defined later."""

    class Later(OwnAndSuper):
        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x)

    for kind in (Own, OwnAndSuper, Later):
        model = kind()
        assert not model(X).isfinite().any()
    kinds = [report.origins[0].message.partition(" (")[0] for report in outermost.reports]
    assert kinds == ["log made -inf"] * 3
    assert outermost.refused == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NoForward, "it has a __call__ and no forward"),
        (OtherForward, "its own __call__ ran no forward"),
    ],
)
def test_a_call_without_a_forward_is_said_not_to_be_checked(
    kind: type[NoForward], reason: str, outermost: SimpleNamespace
) -> None:
    """Once; the modules that it calls are guarded then."""

    def step() -> None:
        model = kind()
        for _ in range(3):
            model(X)

    step()
    assert outermost.refused == [(kind.__name__, reason)]
    held = [guard.recorder.held_as for guard in outermost.models.guards if guard.batch_number]
    assert held == ["model.part"]


def test_classes_have_their_own_call_again_afterwards() -> None:
    """Whether they were there before or came later; what a user has put there since stays."""
    before = vars(Own)["__call__"]

    def mine(self: Any, x: Tensor) -> Any:
        return x

    with OutermostModules(Options()):
        assert vars(Own)["__call__"] is not before
        assert vars(Own)["__call__"].__doc__ == before.__doc__

        class Later(nn.Module):
            def __call__(self, x: Tensor) -> Any:
                return x

        OwnAndSuper.__call__, kept = mine, vars(OwnAndSuper)["__call__"]  # type: ignore[method-assign]
    assert vars(Own)["__call__"] is before
    assert vars(Later)["__call__"].__qualname__.endswith("Later.__call__")
    assert vars(OwnAndSuper)["__call__"] is mine
    OwnAndSuper.__call__ = kept.__wrapped__  # type: ignore[method-assign]
    assert "__init_subclass__" not in vars(nn.Module)


def test_parts_of_a_watched_model_have_their_names_in_a_loss() -> None:
    """A script may call them after the model: what they compute belongs to the loss."""
    vae, x = VAE(), X
    vae.forward = lambda x: vae.decode(vae.encode(x))  # type: ignore[assignment]
    with pytest.raises(fxguard.NonFiniteError) as raised, fxguard.watch(vae):  # noqa: PT012
        y = vae(x)
        (vae.encode(y) + vae.blocks[0][2](y)).mul(0).log().sum().backward()
    named = [(f.name, f.kind) for f in raised.value.report.frames if f.phase == "loss"]
    assert named == [
        *(("encoder.0", "linear"), ("encoder.1", "tanh"), ("encoder.2", "linear")),
        *(("blocks.0.2", "linear"), ("", "add"), ("", "mul"), ("", "log")),
    ]


def test_the_loss_of_one_model_is_told_as_before(outermost: SimpleNamespace) -> None:
    """The clean twin: no names are added, and a healthy step is healthy."""
    model = block()
    F.mse_loss(model(X), X).backward()
    assert outermost.reports == []
    with torch.no_grad():
        model[2].bias.fill_(1e30)
    F.mse_loss(model(X), X).backward()
    frames = outermost.reports[0].frames
    assert [frame.name for frame in frames][-5:] == ["0", "1", "2", "", ""]
    assert frames[-1].kind == "mse_loss"
