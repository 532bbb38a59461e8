"""Train so that a job which loses a machine goes on from its last checkpoint, on those left.

On each of two machines:

torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d \
    --rdzv-endpoint FIRST:29400 examples/elastic.py --output FOLDER

A rank that is lost is an error on all others, which names it; torchrun then starts anew those that
are there. The folder is one that all machines share.
"""

import argparse
from pathlib import Path

import penstock
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

ROWS = 12  # of a step, over all ranks


def build():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 1))


def draw(step):
    """Return a step's rows; each rank takes its part of them."""
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model, rows):
    return functional.mse_loss(model(rows), rows.square().mean(1, keepdim=True))


def newest(folder):
    """Return the newest checkpoint that is whole: dcp writes .metadata when all else is there."""
    whole = [path.parent for path in folder.glob("*/.metadata")]
    return max(whole, key=lambda path: int(path.name), default=None)


def save(path, model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)


def load(path, model, optimizer):
    """Take over a checkpoint, by however many ranks it was saved."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def train(folder, steps):
    """Train the steps that are left, and save behind each second one."""
    dist.init_process_group("gloo")
    model = penstock.shard(build(), stage=3)
    optimizer = penstock.AdamW(model, lr=1e-2)
    last = newest(folder)
    if last is not None:
        load(last, model, optimizer)
    begin = int(last.name) if last else 0
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks go on behind step {begin}", flush=True)
    for step in range(begin, steps):
        rows = draw(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 2 == 0:
            save(folder / str(step + 1), model, optimizer)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    train(given.output, given.steps)


if __name__ == "__main__":
    main()
