"""Train by FSDP2, then with the one line that takes its place; the losses are the same.

torchrun --standalone --nproc-per-node 2 examples/from_fsdp2.py
"""

import penstock
import torch
import torch.distributed as dist
from gpt.model import Shape, build
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

STEPS, BATCHES = 3, 2  # whose gradients add up in a step


def shard_by_fsdp2(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def shard_by_penstock(model):
    penstock.shard(model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train(shard):
    """Return the losses of this rank."""
    model = build(Shape(layers=2, width=32, context=16), seed=0)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for batch in range(BATCHES):
            model.set_requires_gradient_sync(batch == BATCHES - 1)
            tokens = draw(step * BATCHES + batch)
            loss = model(tokens[:, :-1], tokens[:, 1:]) / BATCHES
            loss.backward()
            losses.append(loss.item())
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def draw(number):
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    return torch.randint(256, (2, 17), generator=generator)


def main():
    dist.init_process_group("gloo")
    for name, shard in (("FSDP2", shard_by_fsdp2), ("Penstock", shard_by_penstock)):
        losses = train(shard)
        if dist.get_rank() == 0:
            print(f"{name:8}", *(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
