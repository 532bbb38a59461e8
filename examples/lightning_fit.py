"""Fit a small network with Lightning, sharded: the line is the strategy.

torchrun --standalone --nproc-per-node 2 examples/lightning_fit.py --output FOLDER
torchrun --standalone --nproc-per-node 3 examples/lightning_fit.py --output FOLDER --resume
"""

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from penstock.lightning import PenstockStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCHES = 4, 6  # batches of two rows each, in every step


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(*blocks, nn.Linear(16, 1))
        self.losses = []  # of this rank

    def forward(self, rows):
        return self.net(rows)

    def training_step(self, batch, batch_idx):
        rows, targets = batch
        loss = functional.mse_loss(self(rows), targets)
        self.losses.append(loss.detach().float())
        return loss

    def validation_step(self, batch, batch_idx):
        rows, targets = batch
        self.log("validation", functional.mse_loss(self(rows), targets), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def read(epoch):
    rows = torch.randn(2 * BATCHES * STEPS, 16, generator=torch.Generator().manual_seed(epoch))
    data = TensorDataset(rows, rows.square().mean(1, keepdim=True))
    return DataLoader(data, batch_size=2, shuffle=False)


def fit(output, *, strategy=None, resume=False, epochs=1, **more):
    """Train an epoch, or one more; return the trainer and the module."""
    seed_everything(0, verbose=False)
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        strategy=strategy or PenstockStrategy(stage=3),
        accelerator="auto",
        devices=ranks,
        max_epochs=2 if resume else epochs,
        accumulate_grad_batches=BATCHES // ranks,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    module = Regression()
    last = f"{output}/last.ckpt" if resume else None
    trainer.fit(module, read(int(resume)), read(2), ckpt_path=last)
    if not resume:
        trainer.save_checkpoint(f"{output}/last.ckpt")
    return trainer, module


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)
    trainer, _ = fit(given.output, precision=given.precision, resume=given.resume)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['validation']:.5f}")


if __name__ == "__main__":
    main()
