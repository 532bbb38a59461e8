"""What updates under the next forward would bring: ``python bench/train/late.py --sequence 1024``.

The built-in model of `step.py`, 36 layers, on one GPU, its step as one CUDA graph: with every
layer's AdamW behind the backward, and with each before its layer's forward, on a stream of its own
beside what comes before it. Beside them the same step without updates, and the updates alone.
Gradients keep their memory and are zeroed behind their update in both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import penstock
import torch
from model import Shape, build
from torch import nn

ROUNDS, TOGETHER = 5, 5


class Trainer:
    """A step of which each module has an optimizer of its own."""

    def __init__(self, sequence: int) -> None:
        self.compute = torch.cuda.current_stream()
        self.beside = torch.cuda.Stream(priority=0)
        self.model = build(Shape(), 0, torch.device("cuda"), torch.bfloat16)
        for block in self.model.blocks():
            block.compile()
        modules = [self.model.embedding, *self.model.layers, self.model.norm]
        parameters = [list(module.parameters()) for module in modules]
        parameters[-1] += self.model.head.parameters()
        self.optimizers = [
            penstock.AdamW(some, lr=1e-5, moments=torch.bfloat16, capturable=True)
            for some in parameters
        ]
        self.updated: dict[nn.Module, torch.cuda.Event] = {}
        for module in modules:
            module.register_forward_pre_hook(self.wait)
        self.modules = modules
        self.tokens = torch.randint(self.model.vocabulary, (1, sequence), device="cuda")
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def wait(self, module: nn.Module, _: object) -> None:
        """Wait for the module's update, where it has one in this step."""
        if module in self.updated:
            self.compute.wait_event(self.updated[module])

    def update(self, number: int) -> None:
        """Update one module."""
        self.optimizers[number].step()
        self.optimizers[number].zero_grad(set_to_none=False)

    def update_all(self) -> None:
        """Update all modules, on the stream that is current."""
        for number in range(len(self.modules)):
            self.update(number)

    def train(self) -> None:
        """Compute the gradients."""
        self.model(self.tokens).backward()

    def step_at_the_end(self) -> None:
        """Update behind the backward."""
        self.train()
        self.update_all()

    def step_late(self) -> None:
        """Update beside the forward."""
        self.beside.wait_stream(self.compute)
        with torch.cuda.stream(self.beside):
            for number, module in enumerate(self.modules):
                self.update(number)
                self.updated[module] = self.beside.record_event()
        self.train()
        self.compute.wait_stream(self.beside)
        self.updated.clear()


def captured(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return it as a graph."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        function()
    return graph


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence", type=int, default=1024)
    given = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream(priority=-1))
    trainer = Trainer(given.sequence)
    graphs = {
        "behind the backward": captured(trainer.step_at_the_end),
        "under the forward": captured(trainer.step_late),
        "no updates": captured(trainer.train),
        "updates alone": captured(trainer.update_all),
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(1 + ROUNDS):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(TOGETHER):
                graph.replay()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e3 / TOGETHER)
    for name, (_, *taken) in times.items():
        print(f"{name:20} {statistics.median(taken):7.2f} ms ({min(taken):.2f}-{max(taken):.2f})")


if __name__ == "__main__":
    main()
