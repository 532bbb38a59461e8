"""A training loop of one's own with Hugging Face's Accelerate, sharded: the line is `install()`.

torchrun --standalone --nproc-per-node 2 examples/hf_accelerate.py --output FOLDER
torchrun --standalone --nproc-per-node 3 examples/hf_accelerate.py --output FOLDER --resume
"""

import argparse

import penstock
import penstock.accelerate
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCHES = 4, 6  # batches of two rows each, in every step


def build():
    set_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 1))


def read():
    rows = torch.randn(2 * BATCHES * STEPS, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows.square().mean(1, keepdim=True)), batch_size=2)


class Progress:
    """The steps that were trained, which a checkpoint has too."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def train(output, *, resume=False, **more):
    """Train the steps that are left, saving behind the second; return each one's loss."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), **more)
    accelerator.gradient_accumulation_steps = BATCHES // accelerator.num_processes
    model = build()
    optimizer = penstock.AdamW(model, lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, read())
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if resume:
        accelerator.load_state(f"{output}/state")
        accelerator.step = 0  # it counts batches of a rank, of which there were others
        done = progress.steps * accelerator.gradient_accumulation_steps
        data = accelerator.skip_first_batches(data, done)

    losses = []
    for rows, targets in data:
        with accelerator.accumulate(model):
            loss = functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)))
        if accelerator.sync_gradients:
            progress.steps += 1
            if progress.steps == 2:
                accelerator.save_state(f"{output}/state")
    accelerator.save_model(model, f"{output}/model")  # whole weights in safetensors
    return torch.cat(losses).view(-1, BATCHES).mean(1).tolist()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)
    penstock.accelerate.install()
    losses = train(given.output, resume=given.resume)
    PartialState().print("losses", *(f"{loss:.5f}" for loss in losses))


if __name__ == "__main__":
    main()
