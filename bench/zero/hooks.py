"""What the hooks of a sharded model cost the training thread: ``python bench/zero/hooks.py``.

A chain of tiny blocks, sharded over this process alone, beside the same unsharded, by turns; on the
CPU, where nothing is communicated: what differs is the hooks. A block has six of them a step: at
the beginning and the end of its forward, where its output's gradient is there, where those of its
two parameters are, where its input's is.
"""

from __future__ import annotations

import argparse
import statistics
import time

import penstock
import torch
from torch import nn

HOOKS = 6


class Block(nn.Module):
    """A residual block of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        return x + self.linear(x)


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Return the seconds that a forward and a backward take."""
    begin = time.perf_counter()
    model(x).sum().backward()
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=36)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = [nn.Sequential(*(Block() for _ in range(arguments.blocks))) for _ in range(2)]
    penstock.shard(models[1], stage=3, blocks=list(models[1]))
    x = torch.randn(4, 8, requires_grad=True)
    times: list[list[float]] = [[], []]
    for i in range(arguments.steps + 10):
        for model, taken in zip(models, times, strict=True):
            seconds = step(model, x)
            if i >= 10:
                taken.append(seconds)
    plain, sharded = (statistics.median(taken) * 1e6 / arguments.blocks for taken in times)
    print(f"us a block and step: unsharded {plain:.1f}, sharded {sharded:.1f}")
    print(f"us a hook: {(sharded - plain) / HOOKS:.2f}")
    penstock.close(models[1])


if __name__ == "__main__":
    main()
