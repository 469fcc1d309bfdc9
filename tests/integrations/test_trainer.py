"""transformers' Trainer, for real, on the text of this repository."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import Tensor

import fxguard
from support.needs import needs
from support.torchrun import torchrun

transformers = needs("transformers")
needs("accelerate")

from transformers import (  # noqa: E402
    GPT2LMHeadModel,
)

from fxguard.integrations.transformers import (  # noqa: E402
    FxguardCallback,
    use_for_debug_option,
)
from support.in_trainer import overflowing, pieces, small, trainer  # noqa: E402

pytestmark = [
    pytest.mark.slow_unless_campaign,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def text() -> list[dict[str, Tensor]]:
    return pieces()


def run(made: Any) -> dict[str, Any]:
    """Train, evaluate and predict; everything that came of it."""
    with contextlib.redirect_stdout(io.StringIO()):
        made.train()
        evaluated = made.evaluate()
        predicted = made.predict(made.eval_dataset)
    return {
        "losses": [entry["loss"] for entry in made.state.log_history if "loss" in entry],
        "eval_loss": evaluated["eval_loss"],
        "predictions": torch.tensor(predicted.predictions),
        "parameters": [p.detach() for p in made.model.parameters()],
    }


ARGUMENTS = {
    "plain": {},
    "fp16": {"fp16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "everything": {
        "bf16": True,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "torch_compile": True,
        "torch_compile_backend": "aot_eager",
    },
}


@pytest.mark.campaign  # on each change: `test_overflow_in_training`
@pytest.mark.parametrize("name", ARGUMENTS)
def test_training_is_what_it_was(tmp_path: Path, text: Any, name: str) -> None:
    """Losses, weights and predictions, to the bit; every call is a checked batch."""
    made = trainer(tmp_path / "ours", text, small(), FxguardCallback(), **ARGUMENTS[name])
    ours = run(made)
    guard = fxguard.guard_of(made.model)
    torch._dynamo.reset()
    theirs = run(trainer(tmp_path / "theirs", text, small(), **ARGUMENTS[name]))
    assert ours["losses"] == theirs["losses"]
    assert len(ours["losses"]) == 3
    assert ours["eval_loss"] == theirs["eval_loss"]
    assert torch.equal(ours["predictions"], theirs["predictions"])
    assert all(map(torch.equal, ours["parameters"], theirs["parameters"]))
    accumulated = ARGUMENTS[name].get("gradient_accumulation_steps", 1)
    assert guard.batch_number == 3 * accumulated + 2 + 2  # training, evaluation, prediction
    assert guard.optimizer_step == 3
    assert "not checked" not in guard.coverage()


@pytest.mark.parametrize("name", ["plain", pytest.param("everything", marks=pytest.mark.campaign)])
def test_overflow_in_training(tmp_path: Path, text: Any, name: str) -> None:
    """The report names operation, batch and optimizer step."""
    accumulated = ARGUMENTS[name].get("gradient_accumulation_steps", 1)
    batch = 2 * accumulated
    made = trainer(tmp_path, text, *overflowing(2), FxguardCallback(), **ARGUMENTS[name])
    message = f"batch {batch}, optimizer step 2: mul in transformer.h.1.mlp.act made inf"
    with pytest.raises(fxguard.NonFiniteError, match=message):
        run(made)
    report = fxguard.guard_of(made.model).last_report
    assert report is not None
    assert report.optimizer_step == 2
    assert f"batch_number={batch} optimizer_step=2\n" in str(report)


@pytest.mark.parametrize("work", ["evaluate", "predict"])
def test_overflow_without_training(tmp_path: Path, text: Any, work: str) -> None:
    """A Trainer that only evaluates or predicts is guarded, too."""
    made = trainer(tmp_path, text, *overflowing(), FxguardCallback())
    with pytest.raises(fxguard.NonFiniteError, match="batch 1, optimizer step 0: mul in"):
        made.evaluate() if work == "evaluate" else made.predict(text[:4])


def test_callback_that_comes_late(tmp_path: Path, text: Any) -> None:
    """Added to a Trainer that exists, it guards from the next training on."""
    made = trainer(tmp_path, text, *overflowing())
    made.add_callback(FxguardCallback(on_detect="warn"))
    with pytest.warns(RuntimeWarning, match="batch 1, optimizer step 1: mul in"):
        made.train()


def test_removed_afterwards(tmp_path: Path, text: Any) -> None:
    """The model is what it was before the Trainer."""
    model = small()
    made = trainer(tmp_path, text, model, FxguardCallback())
    made.evaluate()
    fxguard.remove(model)
    assert "_fxguard" not in model.__dict__
    assert type(model).forward is GPT2LMHeadModel.forward
    with pytest.raises(fxguard.FxguardError, match="not instrumented"):
        fxguard.guard_of(model)


def detections(work: Callable[[], Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="inf"):
            work()
    return printed.getvalue()


def test_debug_option(tmp_path: Path, text: Any) -> None:
    """``--debug underflow_overflow`` uses fxguard's class while it is told to, and no longer."""

    def train() -> Any:
        return trainer(tmp_path, text, *overflowing(), debug="underflow_overflow").train()

    original = transformers.trainer.DebugUnderflowOverflow
    with use_for_debug_option():
        assert transformers.trainer.DebugUnderflowOverflow is not original
        ours = detections(train)
    assert transformers.trainer.DebugUnderflowOverflow is original
    theirs = detections(train)
    for printed in (ours, theirs):
        assert "Detected inf/nan during batch_number=1" in printed
        assert "transformer.h.1.mlp.act Overflows" in printed


def test_debug_option_trains_twice(tmp_path: Path, text: Any) -> None:
    """The Trainer asks for the debugger in each training; one is enough."""
    with use_for_debug_option():
        made = trainer(tmp_path, text, small(), debug="underflow_overflow")
        made.train()
        made.train()
    assert fxguard.guard_of(made.model).batch_number == 6
    replaced = use_for_debug_option()  # without `with`, for a whole script
    assert transformers.trainer.DebugUnderflowOverflow.__module__.startswith("fxguard")
    replaced.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("precision", "backend"),
    [
        ("bf16", "no"),
        pytest.param("no", "no", marks=pytest.mark.campaign),
        pytest.param("bf16", "aot_eager", marks=pytest.mark.campaign),
        pytest.param("no", "aot_eager", marks=pytest.mark.campaign),
    ],
)
def test_accelerate(text: Any, precision: str, backend: str) -> None:
    """`accelerator.prepare(fxguard.instrument(model))` is what it was without, and raises."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    batch = {name: torch.stack([piece[name] for piece in text[:4]]) for name in text[0]}

    def step(model: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=precision, dynamo_backend=backend)
        prepared = accelerator.prepare(model)
        torch.manual_seed(0)
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        return [loss.detach(), *(p.grad for p in model.parameters())]

    model, _ = overflowing()
    plain, _ = overflowing()
    ours = step(fxguard.instrument(model))
    torch._dynamo.reset()
    assert all(map(torch.equal, ours, step(plain)))
    model.transformer.h[1].mlp.act.factor.fill_(1e38)
    with pytest.raises(fxguard.NonFiniteError, match=r"mul in transformer.h.1.mlp.act made inf"):
        step(model)


TESTS = Path(__file__).parents[1]
SCRIPT = """
import os
import sys

sys.path.insert(0, sys.argv[1])
from fxguard.integrations.transformers import FxguardCallback
from support.in_trainer import overflowing, pieces, trainer

model, fault = overflowing()
callbacks = [FxguardCallback(sync_ranks=sys.argv[2] == "sync")]
if os.environ["RANK"] == "1" and sys.argv[2] != "well":
    callbacks.append(fault)
trainer(sys.argv[3], pieces(), model, *callbacks).train()
print("rank", os.environ["RANK"], "finished")
"""


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=pytest.mark.campaign) for how in ("well", "alone")),
        "sync",
    ],
)
def test_two_ranks(tmp_path: Path, how: str) -> None:
    """A Trainer under torchrun: a fault on one rank ends it, with one report."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = torchrun(script, str(TESTS), how, str(tmp_path))
    well = how == "well"
    assert (ran.returncode == 0) == well, ran.stderr[-3000:]
    assert ran.stdout.count("finished") == (2 if well else 0)
    detected = ran.stderr.count("Detected inf/nan during batch_number=1 optimizer_step=1 rank=1")
    assert detected == (not well)
    message = "rank 1: batch 1, optimizer step 1: mul in transformer.h.1.mlp.act made inf"
    assert ran.stderr.count(f"rank 0: told by {message}") == (how == "sync")
    assert (message in ran.stderr) == (not well)


def test_a_loss_that_the_trainer_computes(tmp_path: Path, text: Any) -> None:
    """It belongs to the batch whose outputs it is made of."""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        step = made.state.global_step
        return (outputs.logits.square() * (step != 1)).sum().log()

    made = trainer(tmp_path, text, small(), FxguardCallback())
    made.compute_loss_func = loss
    message = r"batch 1, optimizer step 1: log made -inf \(test_trainer.py:"
    with pytest.raises(fxguard.NonFiniteError, match=message) as raised:
        made.train()
    assert raised.value.report.phase == "loss"
    assert raised.value.report.frames[-1].kind == "log"


def test_a_step_of_its_optimizer(tmp_path: Path, text: Any) -> None:
    """AdamW's eps is 0 in float16, and rows of an embedding have no gradient."""
    made = trainer(tmp_path, text, small().half(), FxguardCallback(), optim="adamw_torch")
    made_bad = "AdamW's step made weight transformer.wte.weight NaN: division by zero"
    before = {*optimizers._global_optimizer_post_hooks}
    with pytest.raises(fxguard.NonFiniteError) as raised:
        made.train()
    assert raised.value.report.one_line.startswith(f"batch 0, optimizer step 0: {made_bad}")
    assert raised.value.report.phase == "optimizer"
    assert "eps 1e-08 is 0 in float16" in raised.value.report.origins[0].operands
    fxguard.remove(made.model)
    assert optimizers._global_optimizer_post_hooks.keys() <= before


def test_a_scaler_of_gradients(tmp_path: Path, text: Any) -> None:
    """A step that accelerate's scaler rightly skips is no detection; what no scale mends is."""

    def trained(model: Any, scale: float) -> Any:
        made = trainer(tmp_path, text, model, FxguardCallback(), fp16=True)
        # Without a GPU, accelerate makes none.
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        made.accelerator.native_amp = True
        made.train()
        return made

    made = trained(small(), 2.0**26)
    guard = fxguard.guard_of(made.model)
    assert guard.last_report is None
    assert made.accelerator.scaler.get_scale() < 2.0**26
    assert [note.phase for note in guard.notes[:1]] == ["backward"]
    broken = small()
    broken.transformer.h[1].mlp.act = Flat()
    with pytest.raises(fxguard.NonFiniteError, match=r"backward of sqrt in transformer\.h\.1\.mlp"):
        trained(broken, 2.0**10)


class Flat(torch.nn.Module):
    """Its gradient is infinite, whatever the scale."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).sqrt()
