"""A LightningModule that can overflow in its steps, and a Trainer for it: also under torchrun."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


class Model(pl.LightningModule):
    def __init__(self, fault: int | None = None, logs: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.fault, self.logs = fault, logs

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        if self.logs:
            self.log(name, loss)
        return loss

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch, "train_loss")
        if index == self.fault:
            loss = torch.log(loss - loss) + loss
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.loss(batch, "val_loss")

    def test_step(self, batch: Any, index: int) -> None:
        self.loss(batch, "test_loss")

    def predict_step(self, batch: Any, index: int) -> Tensor:
        factor = 1e30 if index == self.fault else 1.0
        return self(batch[0]) * factor * factor

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sharded(Model):
    """Its layers under FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


def data() -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(32, n, generator=generator) for n in (8, 1)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=8)


def trainer(*callbacks: Any, **options: Any) -> Any:
    pl.seed_everything(0, verbose=False)
    return pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
