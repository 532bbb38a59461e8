"""What the ranks do that test_bench_train.py starts: they measure tiny models."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "train"))
# What is compiled is traced, and run as the graphs that that makes: machine code takes a minute.
os.environ["TORCH_COMPILE_OVERRIDE_BACKENDS"] = ">=0:aot_eager"

import step  # noqa: E402
import trainer  # noqa: E402

FEW = ["--sequence", "16", "--warm", "2", "--steps", "2", "--alternations", "2"]
BOTH = ["--ways", "fsdp2", "penstock"]
TINY_QWEN3 = [
    *("--model", "qwen3-8b", "--layers", "2", "--no-compile"),
    *("--set", "hidden_size=64", "intermediate_size=96", "head_dim=16", "vocab_size=203"),
    *("num_attention_heads=4", "num_key_value_heads=2"),
]


def measure(folder, name, *arguments):
    """Call the benchmark's main; what it prints goes into a file of that name."""
    sys.argv = ["step.py", *FEW, *BOTH, *arguments]
    with Path(folder, name).open("a") as printed:
        os.dup2(printed.fileno(), sys.stdout.fileno())
    status = step.main()
    sys.stdout.flush()
    assert status == 0, Path(folder, name).read_text()


def by_trainer(folder):
    """Call the main of trainer.py."""
    few = ["--tiny", "--layers", "2", "--sequence", "32", "--warm", "2", "--steps", "3"]
    sys.argv = ["trainer.py", "--with", "penstock", *few]
    with Path(folder, "by_trainer").open("a") as printed:
        os.dup2(printed.fileno(), sys.stdout.fileno())
    trainer.main()
    sys.stdout.flush()


def compiled(folder):
    measure(folder, "compiled", "--tiny", "--trace", f"{folder}/{{rank}}.json", "--time-waits")


def hosted(folder):
    options = ["--tiny", "--no-compile", "--shards", "float32", "--offload", "parameters"]
    measure(folder, "hosted", *options, "--optimizer", "penstock")


def checkpointed(folder):
    micro = ["--tiny", "--batch", "2", "--micro-batches", "2", "--no-compile"]
    measure(folder, "checkpointed", *micro, "--checkpoint", "auto", "--memory", "300000")


def of_transformers(folder):
    measure(folder, "of_transformers", *TINY_QWEN3)
