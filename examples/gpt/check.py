"""Comparison of a sharded training run with the same training unsharded in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gpt.text import Batches

LOSS_LIMIT = 1e-5
GRADIENT_LIMIT = 1e-5
PARAMETER_LIMITS = {
    "adamw": 2e-3,  # amplifies rounding: summing a batch in another order already gives 7e-4
    "penstock-adamw": 2e-3,
    "sgd": 1e-5,
}


Tensors = dict[str, Tensor]  # whole tensors by parameter name


@dataclass(frozen=True)
class Run:
    """What a training run leaves behind for a comparison."""

    losses: list[list[float]]  # of each step, by rank
    gradients: Tensors  # of the first step
    parameters: Tensors  # after the last step


def gradients(model: nn.Module) -> Tensors:
    """Copy the whole gradients; with sharded parameters a collective."""
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> Tensors:
    """Copy the whole parameters; with sharded parameters a collective."""
    return {n: whole(p) for n, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor, on every rank."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train_unsharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    *,
    ranks: int,
    steps: int,
    progress: Callable[[int], None],
) -> Run:
    """Train on all ranks' micro-batches, summed in rank order; calls progress(step) after each."""
    losses: list[list[float]] = []
    first: Tensors = {}
    for step in range(steps):
        losses.append([])
        for rank in range(ranks):
            loss = model(*batches.draw(step, rank))
            loss.backward()
            losses[step].append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= ranks
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        progress(step)
    return Run(losses, first, parameters(model))


@dataclass(frozen=True)
class Comparison:
    """The worst relative deviation of one kind of tensor, and where it is."""

    what: str
    name: str
    deviation: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the deviation is within the limit."""
        return self.deviation <= self.limit  # false for NaN


def relative(tensor: Tensor | None, reference: Tensor | None) -> float:
    """||tensor - reference|| / ||reference||; infinite where only one exists or shapes differ."""
    if tensor is None or reference is None or tensor.shape != reference.shape:
        return float("inf")
    norm = reference.double().norm().item()
    difference = (tensor.double() - reference.double()).norm().item()
    return difference / norm if norm else (0.0 if difference == 0 else float("inf"))


def worst(
    what: str, tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor], limit: float
) -> Comparison:
    """Compare tensors of equal names; one that only one side has deviates infinitely."""
    deviations = {
        name: relative(tensors.get(name), reference.get(name))
        for name in [*reference, *(set(tensors) - set(reference))]
    }
    # NaN compares as nothing: it has to count as the largest.
    name = max(deviations, key=lambda n: (deviations[n] != deviations[n], deviations[n]))
    return Comparison(what, name, deviations[name], limit)


def compare(run: Run, reference: Run, optimizer: str) -> list[Comparison]:
    """Compare losses of every step, the first step's gradients and the final parameters."""
    return [
        worst("loss", _mean_losses(run), _mean_losses(reference), LOSS_LIMIT),
        worst("gradients, step 1", run.gradients, reference.gradients, GRADIENT_LIMIT),
        worst(
            "final parameters", run.parameters, reference.parameters, PARAMETER_LIMITS[optimizer]
        ),
    ]


def _mean_losses(run: Run) -> dict[str, Tensor]:
    return {
        f"step {step}": torch.tensor(losses, dtype=torch.float64).mean()
        for step, losses in enumerate(run.losses, start=1)
    }
