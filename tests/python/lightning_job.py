"""What the ranks do that test_lightning.py starts: a module is fitted as with DDP."""

import json
from pathlib import Path

import lightning_fit
import penstock
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from penstock.lightning import PenstockStrategy


def losses_of(fitted):
    """Return the loss of each step, over all ranks, and that of the validation."""
    trainer, module = fitted
    own = torch.stack(module.losses)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    steps = torch.stack(every, 1).view(-1, lightning_fit.BATCHES).mean(1)
    return [*steps.tolist(), trainer.callback_metrics["validation"].item()]


def in_shards():
    return PenstockStrategy(stage=2, save_distributed_checkpoint=True)


class ByHand(lightning_fit.Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()


class ShardedByHand(ByHand):
    def configure_model(self):
        penstock.shard(self.net)


def trainer_of(strategy, **more):
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def fit_by_hand(kind, strategy):
    module = kind()
    trainer_of(strategy, max_steps=3).fit(module, lightning_fit.read(0))
    return torch.stack(module.losses).tolist()


def optimize_by_hand():
    with pytest.raises(penstock.PenstockError, match="ByHand optimizes by hand"):
        fit_by_hand(ByHand, PenstockStrategy())
    torch.manual_seed(0)
    wanted = fit_by_hand(ByHand, "ddp")
    torch.manual_seed(0)
    assert fit_by_hand(ShardedByHand, PenstockStrategy()) == pytest.approx(wanted, rel=1e-5)


def fit_in_fewer_bits(folder, wanted):
    """As FSDP2 has mixed precision."""
    strategy = PenstockStrategy(param_dtype=torch.bfloat16)
    _, module = fitted = lightning_fit.fit(folder, strategy=strategy)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert losses_of(fitted) == pytest.approx(wanted, rel=2e-2)
    assert losses_of(fitted) != pytest.approx(wanted, rel=1e-5)


def fit_without_values(path, wanted):
    """Go on with a module of the meta device, which a checkpoint fills."""
    trainer = trainer_of(PenstockStrategy(), max_epochs=2)
    with trainer.init_module(empty_init=True):
        module = lightning_fit.Regression()
    assert all(parameter.is_meta for parameter in module.parameters())
    trainer.fit(module, lightning_fit.read(1), ckpt_path=path)
    assert wanted == pytest.approx(module.losses[0].item(), rel=1e-5)


def fit(folder):
    """Fit in every precision, beside DDP; what is to be gone on with lies in the folder."""
    for precision in ("bf16-true", "bf16-mixed", "32-true"):
        plain = lightning_fit.fit(f"{folder}/ddp", strategy="ddp", precision=precision)
        sharded = lightning_fit.fit(f"{folder}/one file", precision=precision)
        # The sums of gradients are rounded anew.
        tolerance = {"rel": 1e-5 if precision == "32-true" else 1e-2}
        assert losses_of(sharded) == pytest.approx(losses_of(plain), **tolerance), precision
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert {parameter.dtype for parameter in sharded[1].parameters()} == {dtype}
    stats = penstock.stats(sharded[1])
    assert stats.backwards == 3 * lightning_fit.STEPS  # of which each third reduces
    assert stats.reduces <= 4 * lightning_fit.STEPS
    trainer, module = sharded
    again = trainer.validate(module, lightning_fit.read(2), verbose=False)
    assert again[0]["validation"] == pytest.approx(losses_of(plain)[-1], rel=1e-5)
    lightning_fit.fit(f"{folder}/in shards", strategy=in_shards())
    fit_in_fewer_bits(f"{folder}/fewer bits", losses_of(plain))

    wanted = losses_of(lightning_fit.fit(f"{folder}/ddp", strategy="ddp", resume=True))
    by_ddp = lightning_fit.fit(f"{folder}/one file", strategy="ddp", resume=True)
    assert losses_of(by_ddp) == pytest.approx(wanted, rel=1e-5)
    fit_without_values(f"{folder}/one file/last.ckpt", by_ddp[1].losses[0].item())
    optimize_by_hand()
    if dist.get_rank() == 0:
        Path(folder, "wanted.json").write_text(json.dumps(wanted))


def resume(folder):
    """Go on as if nothing had been between."""
    wanted = json.loads(Path(folder, "wanted.json").read_text())
    for name, strategy in (("ddp", None), ("one file", None), ("in shards", in_shards())):
        again = lightning_fit.fit(f"{folder}/{name}", strategy=strategy, resume=True)
        assert losses_of(again) == pytest.approx(wanted, rel=1e-5), name
    lightning_fit.main(["--output", f"{folder}/one file", "--resume"])
