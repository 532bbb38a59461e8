"""An unsharded run in place of the 50 % tolerance of DeepSpeed's own comparison."""

from __future__ import annotations

import copy
import random

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.zero import GatheredParameters

# of the losses, relative; half precision: a few units in the last place
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Unsharded:
    """The step on one device: every rank's batch, gradients averaged and clipped in fp32."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, rate: float) -> None:
        self.clip = GRADIENT_CLIPPING_DEFAULT
        self.master = copy.deepcopy(model).float().to(get_accelerator().current_device_name())
        self.working = copy.deepcopy(self.master).to(dtype)
        trained = [one for one in self.master.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        """Train on one batch of every rank; return their losses."""
        losses = []
        sums = {}
        for batch in batches:
            self.working.zero_grad()
            loss = self.working(*batch)
            loss.backward()
            losses.append(loss.item())
            for name, parameter in self.working.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + parameter.grad.float() / len(batches)
        for name, parameter in self.master.named_parameters():
            parameter.grad = sums.get(name)
        torch.nn.utils.clip_grad_norm_(self.master.parameters(), self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for mine, of in zip(self.working.parameters(), self.master.parameters(), strict=True):
                mine.copy_(of)
        return losses


def seed_all(seed: int) -> None:
    """Seed every generator a model or its data may use."""
    random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def sharded(model: torch.nn.Module, config: dict):
    """Return DeepSpeed's compiled engine with that model's weights."""
    model = copy.deepcopy(model)
    if config["zero_optimization"]["stage"] == 3:
        values = [parameter.detach().clone() for parameter in model.parameters()]
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = type(model)(model.linears[0].in_features)
        with GatheredParameters(model.parameters(), modifier_rank=0):
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.data.copy_(value)
    engine, *_ = deepspeed.initialize(
        config=config, model=model, model_parameters=model.parameters()
    )
    engine.compile()
    return engine


def compare_parameters(engine, reference: Unsharded, update: float) -> None:
    """Compare all parameters with the unsharded run's: a last place, or that far in an update."""
    with GatheredParameters(engine.parameters()):
        for found, (name, wanted) in zip(
            engine.parameters(), reference.working.named_parameters(), strict=True
        ):
            room = update + torch.finfo(found.dtype).eps * wanted.abs().float()
            far = ((found.detach().float() - wanted.float()).abs() - room).max().item()
            assert far <= 0, f"{name} is {far:.3e} beyond its tolerance"


def compare_with_unsharded(
    self, config, dtype, *, iteration=5, hidden_dim_override=None, model_cls=None
) -> None:
    """Train under DeepSpeed and unsharded from equal weights; losses and parameters agree.

    It stands where DeepSpeed's tests have ``compare_loss``, with its arguments.
    """
    from unit.simple_model import SimpleModel

    width = hidden_dim_override or 10
    rate = config["optimizer"]["params"]["lr"]
    seed_all(123)  # the same model everywhere
    model = (model_cls or SimpleModel)(width)
    reference = Unsharded(model, dtype, rate)
    engine = sharded(model, config)

    ranks, rank = dist.get_world_size(), dist.get_rank()
    precision = dtype
    if config.get("torch_autocast"):
        precision = getattr(torch, config["torch_autocast"]["dtype"])
    tolerance = LOSS_TOLERANCE[precision]
    device = get_accelerator().current_device_name()
    for step in range(iteration):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(ranks, 2, 1, width, generator=generator).to(device, dtype)
        wanted = reference.step([(x, y) for x, y in data])
        loss = engine(*data[rank])
        engine.backward(loss)
        engine.step()
        far = abs(loss.item() - wanted[rank]) / max(abs(wanted[rank]), 1.0)
        assert far <= tolerance, f"step {step}: loss {loss.item()}, unsharded {wanted[rank]}"
        # an update is at most the rate; where a gradient is noise its sign may differ
        compare_parameters(engine, reference, rate / 10 if precision == torch.float32 else 4 * rate)
    engine.destroy()
