"""Train a model on the operators and, unsharded, beside it; compare."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_deepspeed
import penstock.deepspeed
import torch
import torch.distributed as dist
from equality import assert_close
from models import batch, make
from torch import nn

TOLERANCE = 1e-5


def engine_class() -> Any:
    """The class of engines, with Penstock's runtime in place."""
    torch._dynamo.reset()
    if "deepspeed" not in sys.modules:
        fake_deepspeed.put(
            Path(tempfile.mkdtemp(prefix="penstock-")), source=fake_deepspeed.declarations()
        )
    penstock.deepspeed.install()
    return sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine


class Twins:
    """An engine, and the same model unsharded.

    sizes: rows of the micro-batches of a step, as many as accumulate.
    """

    def __init__(
        self,
        kind: Callable[[], nn.Module],
        *,
        sizes: tuple[int, ...] = (4,),
        tolerance: float = TOLERANCE,
        **options: Any,
    ) -> None:
        self.reference = make(kind)
        self.sizes = sizes
        self.tolerance = tolerance
        self.engine = engine_class()(make(kind), accumulation=len(sizes), **options)
        self.engine.compile()
        self.done = 0  # micro-batches
        self.sums: dict[str, torch.Tensor] = {}  # of the reference's gradients, in fp32 or wider

    def step(self) -> None:
        for size in self.sizes:
            self.micro_step(size)
        self.update()

    def micro_step(self, size: int) -> None:
        loss = self.forward(size)
        self.engine.backward(loss)
        self.done += 1
        if self.done % len(self.sizes):
            self.engine.step()

    def forward(self, size: int) -> torch.Tensor:
        """The engine's loss; the reference's gradients are there already."""
        rank, world = dist.get_rank(), dist.get_world_size()
        wanted = None
        for other in range(world):
            value = self._loss(self.reference, other, size)
            (value / world / len(self.sizes)).backward()
            self._take_gradients()
            wanted = value if other == rank else wanted
        loss = self._loss(self.engine, rank, size)
        assert_close("loss", loss.detach(), wanted.detach(), self.tolerance)
        return loss

    def _take_gradients(self) -> None:
        for name, parameter in self.reference.named_parameters():
            if parameter.grad is not None:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self.sums[name] = self.sums.get(name, 0) + parameter.grad.to(wide)
                parameter.grad = None

    def _loss(self, model: Any, rank: int, size: int) -> torch.Tensor:
        return model(batch(self.done, rank, size), rank).square().mean()

    def update(self) -> None:
        """Compare gradients, and let both optimizers step."""
        got = self.engine.gradients()
        for name, wanted in self.sums.items():
            assert_close(f"gradient of {name}", got[name].to(wanted.dtype), wanted, self.tolerance)
        self.engine.step()
        with torch.no_grad():
            for name, parameter in self.reference.named_parameters():
                if name in self.sums:
                    parameter.sub_(self.engine.lr * self.sums[name].to(parameter.dtype))
        self.sums.clear()
        for name, value in self.engine.values().items():
            assert_close(name, value, self.reference.get_parameter(name).detach(), self.tolerance)

    def accumulate(self, sizes: tuple[int, ...]) -> None:
        """Go on with steps of other micro-batches."""
        self.sizes = sizes
        self.engine.accumulation = len(sizes)
        self.engine.micro_step = self.done = 0

    def close(self) -> None:
        self.engine.destroy()


def train_both(kind: Callable[[], nn.Module], **options: Any) -> None:
    """Steps of both, compared."""
    trained(kind, **options)


def trained(
    kind: Callable[[], nn.Module],
    *,
    steps: int = 3,
    then: tuple[int, ...] = (),
    twins: type[Twins] = Twins,
    **options: Any,
) -> Any:
    """As `train_both`; returns the engine. `then`: sizes of more such steps of the same graphs."""
    both = twins(kind, **options)
    for _ in range(steps):
        both.step()
    if then:
        both.accumulate(then)
        for _ in range(steps):
            both.step()
    both.close()
    return both.engine
