"""Hugging Face's Trainer with FSDP2 and with Penstock: milliseconds a step, and memory.

    torchrun --standalone --nproc-per-node 2 bench/train/trainer.py --with fsdp2
    torchrun --standalone --nproc-per-node 2 bench/train/trainer.py --with penstock

One script for both: what differs is `penstock.accelerate.install()`. A causal model of Qwen3's
kind, of random weights in float32, is trained under `bf16=True` on random tokens. A time is between
ends of steps, on the device; the longest of all ranks', a median, with the first and last decile.
Memory is the peak that torch's allocator has, and the device's own count at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from causal_lm import QWEN3_8B
from torch.utils.data import Dataset
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

GIB = 1 << 30
TINY = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 128,
}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences, the same every time."""

    def __init__(self, vocabulary: int, sequence: int, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(vocabulary, (count, sequence), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Clock(TrainerCallback):
    """When steps have ended, as the device has it."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note it."""
        if torch.cuda.is_available():
            self.ends.append(torch.cuda.Event(enable_timing=True))
            self.ends[-1].record()
        else:
            self.ends.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Return what each step but the first took."""
        pairs = zip(self.ends, self.ends[1:], strict=False)
        if not torch.cuda.is_available():
            return [(end - begin) * 1e3 for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def make_trainer(given: argparse.Namespace, folder: str, clock: Clock) -> Trainer:
    """Prepare the training, the same for both."""
    fields = QWEN3_8B | (TINY if given.tiny else {}) | {"num_hidden_layers": given.layers}
    config = Qwen3Config(use_cache=False, pad_token_id=None, eos_token_id=None, **fields)
    set_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = Qwen3ForCausalLM(config)
    steps = given.warm + given.steps
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=device.type == "cpu",
        max_steps=steps,
        per_device_train_batch_size=given.batch,
        bf16=True,
        optim="adamw_torch_fused",
        learning_rate=1e-5,
        save_strategy="no",
        logging_steps=steps,
        report_to=[],
        disable_tqdm=True,
        torch_compile=given.compile,
        gradient_checkpointing=given.checkpoint,
        fsdp=True,
        fsdp_config={
            "fsdp_version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
        },
    )
    count = steps * given.batch * int(os.environ["WORLD_SIZE"])
    tokens = Tokens(config.vocab_size, given.sequence, count)
    return Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[clock])


def report(given: argparse.Namespace, trainer: Trainer, times: list[float]) -> None:
    """Print what the slowest rank took."""
    device = trainer.args.device
    slowest = torch.tensor(times[given.warm - 1 :], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    tenths = statistics.quantiles(slowest.tolist(), n=10, method="inclusive")
    memory = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        memory = (
            f"  peak allocated {torch.cuda.max_memory_allocated() / GIB:.1f} GiB, "
            f"device {(total - free) / GIB:.1f} GiB"
        )
    loss = trainer.state.log_history[-1]["train_loss"]
    if dist.get_rank() == 0:
        median = statistics.median(slowest.tolist())
        name = getattr(given, "with")
        print(
            f"{name:9} {median:8.2f} ms ({tenths[0]:.2f}-{tenths[-1]:.2f}){memory}  loss {loss:.4f}"
        )


def main() -> None:
    """Train, by one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--with", choices=("fsdp2", "penstock"), required=True, help="fsdp2: on GPUs"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--warm", type=int, default=6, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="Trainer's torch_compile")
    parser.add_argument(
        "--checkpoint", action="store_true", help="Trainer's gradient_checkpointing"
    )
    parser.add_argument("--tiny", action="store_true", help="does it run?")
    given = parser.parse_args()
    if getattr(given, "with") == "fsdp2" and not torch.cuda.is_available():
        parser.error("--with fsdp2 wants GPUs: on CPUs Accelerate takes DDP instead")
    if getattr(given, "with") == "penstock":
        import penstock.accelerate

        penstock.accelerate.install()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(given, folder, clock)
        trainer.train()
    report(given, trainer, clock.milliseconds())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
