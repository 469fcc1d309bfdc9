"""A small GPT-2 that can overflow, and transformers' Trainer for it: also under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from support import zoo

LENGTH = 32


def pieces() -> list[dict[str, Tensor]]:
    """A data set: pieces of a file of this repository, as bytes."""
    texts = [zoo.TEXT[i : i + LENGTH] for i in range(0, 16 * LENGTH, LENGTH)]
    return [{"input_ids": ids, "labels": ids} for ids in map(torch.tensor, map(list, texts))]


def small() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Overflows(nn.Module):
    """In place of an activation: what it makes is too large once it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(())  # no buffer: those are the same on all ranks

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor * 1e38 * self.factor / 1e38


class Fault(TrainerCallback):
    """Lets it overflow from an optimizer step on, or from the second batch of an evaluation."""

    def __init__(self, model: Any, step: int) -> None:
        self.factor, self.step = model.transformer.h[1].mlp.act.factor, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.factor.fill_(1e38 if state.global_step == self.step else 1.0)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.factor.fill_(1e38)


def overflowing(step: int = 1) -> tuple[Any, Fault]:
    """A model, and the callback that lets it overflow."""
    model = small()
    model.transformer.h[1].mlp.act = Overflows()
    return model, Fault(model, step)


def trainer(folder: Path, text: Any, model: Any, *callbacks: Any, **arguments: Any) -> Any:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    return Trainer(
        model,
        TrainingArguments(**{**given, **arguments}),
        train_dataset=text,
        eval_dataset=text[:4],
        callbacks=list(callbacks),
    )
