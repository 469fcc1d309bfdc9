"""Lightning's Trainer, for real."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import Tensor

import fxguard
from support.needs import needs
from support.torchrun import torchrun

needs("lightning")

from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from fxguard.integrations.lightning import STEPS, FxguardCallback  # noqa: E402
from support.in_lightning import Model, data, trainer  # noqa: E402

pytestmark = pytest.mark.slow_unless_campaign

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


class Watched(FxguardCallback):
    """Keeps what the guard knows when it is taken off."""

    guard: Any = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.guard = fxguard.guard_of(pl_module)
        self.titles = [frame.title for frame in self.guard.frames()]
        super().teardown(trainer, pl_module, stage)


class Counting:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph_module: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph_module.forward  # type: ignore[no-any-return]


def fitted(*callbacks: Any, compiled: bool = False, **options: Any) -> tuple[list[Tensor], Any]:
    """The weights after training, and what was logged."""
    made = trainer(*callbacks, **options)
    model = Model(logs=not compiled)  # torch 2.13 cannot compile Lightning's `log`
    backend = Counting()
    made.fit(torch.compile(model, backend=backend) if compiled else model, data(), data())
    assert bool(backend.graphs) == compiled
    return [p.detach() for p in model.parameters()], made.callback_metrics


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"accumulate_grad_batches": 2}),
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.campaign),
        pytest.param({"precision": "64-true"}, marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_training_is_what_it_was(options: Any) -> None:
    """Weights and losses, to the bit; each step is a batch, and is checked."""
    watched = Watched()
    weights, logged = fitted(watched, **options)
    expected, wanted = fitted(**options)
    assert all(map(torch.equal, weights, expected))
    assert logged == wanted
    assert watched.guard.batch_number == 2 + 2 * (4 + 4)  # a sanity check, two epochs
    assert "not checked" not in watched.guard.coverage()
    assert "mse_loss" in watched.titles
    assert "net.0 Linear" in watched.titles


def test_compiled() -> None:
    """The checks are in the graphs of the user's own compiler, and weights stay what they were."""
    watched = Watched()
    weights, _ = fitted(watched, compiled=True)
    expected, _ = fitted(compiled=True)
    assert all(map(torch.equal, weights, expected))
    assert "mse_loss" in watched.titles


@pytest.mark.parametrize(
    ("precision", "compiled"),
    [
        *(("32-true", True), ("bf16-mixed", False)),
        pytest.param("32-true", False, marks=pytest.mark.campaign),
        pytest.param("bf16-mixed", True, marks=pytest.mark.campaign),
    ],
)
def test_overflow_in_the_loss(precision: str, compiled: bool) -> None:
    """A fault in `training_step` itself, outside of any module."""
    made = trainer(FxguardCallback(), precision=precision)
    model = Model(fault=2, logs=not compiled)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    message = r"batch 2, optimizer step 2: log made -inf \(in_lightning.py:"
    with pytest.raises(fxguard.NonFiniteError, match=message):
        made.fit(run, data())
    left_alone(model)


def test_overflow_in_prediction() -> None:
    model = Model(fault=1)
    with pytest.raises(fxguard.NonFiniteError, match=r"batch 1, optimizer step 0: mul made inf"):
        trainer(FxguardCallback()).predict(model, data())
    left_alone(model)


def left_alone(model: Any) -> None:
    """Nothing is left on a module that was not compiled."""
    assert "_fxguard" not in model.__dict__
    if model._compiler_ctx is None:
        assert not {*STEPS, "log", "forward"} & set(model.__dict__)


def test_nothing_is_left() -> None:
    """After each use the module is what it was; the next use guards it again."""
    model, callback = Model(), FxguardCallback()
    for work in ("fit", "validate", "test", "predict"):
        getattr(trainer(callback), work)(model, data())
        left_alone(model)


def test_a_deep_copy_of_a_guarded_module_is_guarded_likewise() -> None:
    """Its steps are its own batches, `log` is its own, and it can be taken off on its own."""
    model = Model(fault=1, logs=False)
    FxguardCallback().setup(SimpleNamespace(global_step=0), model, "fit")  # type: ignore[arg-type]
    twin = copy.deepcopy(model)
    batch = (torch.ones(2, 8), torch.ones(2, 1))
    assert twin.log.__self__ is twin
    twin.training_step(batch, 0)
    assert [fxguard.guard_of(each).batch_number for each in (model, twin)] == [0, 1]
    with torch.no_grad():
        twin.net[0].weight.fill_(torch.nan)
    with pytest.raises(fxguard.NonFiniteError):
        twin.training_step(batch, 0)
    assert fxguard.guard_of(twin).model is twin
    assert not torch.isnan(model.training_step(batch, 0))
    fxguard.remove(twin)
    assert not {"log", *STEPS} & set(twin.__dict__)
    assert torch.isnan(twin.training_step(batch, 0))
    fxguard.remove(model)
    assert not {"log", *STEPS} & set(model.__dict__)


def test_wrong_options_fail_at_once() -> None:
    with pytest.raises(fxguard.FxguardError, match="on_detect"):
        FxguardCallback(on_detect="explode")


TESTS = Path(__file__).parents[1]
SCRIPT = """
import sys

sys.path.insert(0, sys.argv[1])
from fxguard.integrations.lightning import FxguardCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from support.in_lightning import Model, Sharded, data, trainer

sharded, faulty = ("sharded" in sys.argv[2], "fault" in sys.argv[2])
strategy = ModelParallelStrategy(2, 1) if sharded else "ddp"  # data and tensor parallel sizes
made = trainer(FxguardCallback(sync_ranks=True), strategy=strategy, devices=2)
model = (Sharded if sharded else Model)(1 if faulty else None)
made.fit(model, data(), data())
print("finished")
"""


@pytest.mark.parametrize(
    "how",
    [
        "fault",
        *(
            pytest.param(how, marks=pytest.mark.campaign)
            for how in ("sharded fault", "well", "sharded")
        ),
    ],
)
def test_two_ranks(tmp_path: Path, how: str) -> None:
    """Under Lightning's strategies for DistributedDataParallel and FSDP2: one report for all."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = torchrun(script, str(TESTS), how)
    fault = "fault" in how
    assert (ran.returncode == 0) == (not fault), ran.stderr[-3000:]
    assert ran.stdout.count("finished") == (0 if fault else 2)
    assert ran.stderr.count("Detected inf/nan during batch_number=3") == fault
    one_line = "rank 1: batch 3, optimizer step 1: log made -inf"
    assert sum(line.startswith(one_line) for line in ran.stderr.splitlines()) == fault


def test_a_step_of_its_optimizer() -> None:
    """Adam's eps is 0 in float16."""

    class Adam(Model):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return super().training_step(batch, index) * 1e-4

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    before = {*optimizers._global_optimizer_post_hooks}
    with pytest.raises(fxguard.NonFiniteError) as raised:
        trainer(FxguardCallback(), precision="16-true").fit(Adam(), data())
    report = raised.value.report
    assert report.one_line.startswith(
        "batch 0, optimizer step 0: Adam's step made weight net.0.weight "
    )
    assert (report.phase, report.origins[0].cause) == ("optimizer", "zero divisor")
    assert not torch.overrides._get_current_function_mode_stack()
    assert optimizers._global_optimizer_post_hooks.keys() <= before


def test_a_backward_in_its_hands() -> None:
    """A model that steps by itself: the loss goes on after the step, and is followed."""

    class Manual(Model):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = super().training_step(batch, index)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((loss - loss.detach()).abs().sqrt())
            optimizer.step()
            return loss

    with pytest.raises(fxguard.NonFiniteError, match="backward of sqrt made"):
        trainer(FxguardCallback()).fit(Manual(), data())


def test_a_scaler_of_its_precision_plugin() -> None:
    """A step that it rightly skips is no detection: the operation that forces it is a note."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    watched = Watched()
    made = trainer(watched, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    made.fit(Model(), data(), data())
    assert watched.guard.last_report is None
    assert scaler.get_scale() < 2.0**30
    assert all(note.phase == "backward" for note in watched.guard.notes)
    assert watched.guard.notes
    # TorchDynamo's functions behind graph breaks keep the trainer alive, and others look for it.
    scaler._enabled = False
