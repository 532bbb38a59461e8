"""Train a small Qwen3 under DeepSpeed's DeepCompile; write the losses of all steps."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("losses", type=Path, help="where the losses go, the mean of all ranks")
parser.add_argument("--penstock", action="store_true", help="put Penstock under DeepCompile")
parser.add_argument("--plain", action="store_true", help="without DeepCompile")
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--offload", choices=("nothing", "activations", "states", "optimizer"))
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of what is computed")
parser.add_argument("--attention", help="of transformers; on CPUs stage 3 wants eager")
parser.add_argument("--backend", default="inductor")
parser.add_argument("--profiling-turn", help="a file: those that name it profile one at a time")
parser.add_argument("--dump-after", type=float, help="print the stacks after so many seconds")
options = parser.parse_args()
if options.dump_after:
    faulthandler.dump_traceback_later(options.dump_after)
begun = time.perf_counter()

if options.penstock:
    import penstock.deepspeed

    penstock.deepspeed.install()

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from profiling_turn import ProfilingTurn  # noqa: E402

SEQUENCE = 128
VOCABULARY = 1024
WARM_UP = 8  # DeepCompile compiles again before the sixth step
BATCHES = 8


def configuration() -> dict:
    """Return what is asked for, in DeepSpeed's words."""
    zero = {"stage": options.stage, "reduce_bucket_size": 1 << 20}
    compiling = {"deepcompile": not options.plain}
    if options.offload == "activations":
        compiling["offload_activation"] = True
        os.environ.setdefault("DS_DC_OFFLOAD_ACT_BUDGET_GB", "0.01")
        os.environ.setdefault("DS_DC_OFFLOAD_ACT_MIN_SIZE_MB", "0.01")
    if options.offload == "states":
        compiling["offload_opt_states"] = True
        os.environ.setdefault("DS_DC_OFFLOAD_OPT_BUDGET_GB", "0.01")
    if options.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.accumulation,
        "bf16": {"enabled": options.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "compile": compiling,
        "steps_per_print": 1000000,
    }


class Loss(torch.nn.Module):
    """A model's loss alone.

    DeepSpeed divides gradients by the accumulation's steps at every output, so twice where one
    output leads to another, as logits do to a loss that is not compiled.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def make_model() -> torch.nn.Module:
    """Return a Qwen3 with the same random weights in every run."""
    torch.manual_seed(0)
    shape = transformers.Qwen3Config(
        hidden_size=256,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
        attn_implementation=options.attention,
    )
    return Loss(transformers.Qwen3ForCausalLM(shape))


class Clock:
    """Says on rank 0 how long everything took so far."""

    def __init__(self, turn: ProfilingTurn) -> None:
        self.turn = turn

    def __call__(self, what: str) -> None:
        if dist.get_rank() == 0:
            profiling = (
                f"profiling {self.turn.held_s:.1f} s, waiting for it {self.turn.waited_s:.1f} s"
            )
            print(f"{what} after {time.perf_counter() - begun:.1f} s, {profiling}", flush=True)


def main() -> None:
    """Train."""
    deepspeed.init_distributed()
    turn = ProfilingTurn(options.profiling_turn or os.devnull)
    if options.profiling_turn and not options.plain:
        turn.install()
    say = Clock(turn)
    say("imported")
    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=configuration()
    )
    if not options.plain:
        engine.compile(backend=options.backend)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    device = get_accelerator().current_device_name()
    batches = torch.randint(VOCABULARY, (BATCHES, 2, SEQUENCE), generator=generator).to(device)
    losses = []
    for step in range(options.steps * options.accumulation):
        tokens = batches[step % BATCHES]
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
        if step == WARM_UP * options.accumulation:
            say("warm")
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        options.losses.write_text(json.dumps((mean / dist.get_world_size()).tolist()))
    say("trained")
    engine.destroy()
    dist.barrier()
    os._exit(0)  # DeepSpeed leaves groups behind whose end can hang


main()
