"""Command line of train_gpt.py."""

import argparse
import os
from pathlib import Path
from typing import IO

import penstock
import torch
from torch import nn

from gpt.model import Shape

LEARNING_RATES = {"adamw": 1e-3, "penstock-adamw": 1e-3, "sgd": 0.03}


class Parser(argparse.ArgumentParser):
    """Parser whose help and errors are printed once, by rank 0, though every rank parses."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the options; errors end the process with status 2, as argparse does."""
    parser = Parser(description="Train a byte-level GPT with penstock.")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=80, help="default %(default)s")
    training.add_argument("--text", type=Path, help="default: sources of the standard library")
    training.add_argument("--optimizer", choices=list(LEARNING_RATES), default="adamw")
    training.add_argument("--lr", type=float, help="default 1e-3, with sgd 0.03")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--batch", type=positive, default=8, help="sequences a rank and step")
    training.add_argument("--seq", type=positive, default=128, help="bytes a sequence")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive, default=6)
    model.add_argument("--width", type=positive, default=192, help="a multiple of 32")
    sharding = parser.add_argument_group("sharding")
    sharding.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="of ZeRO")
    sharding.add_argument(
        "--prefetch-ahead", type=int, default=2, help="groups gathered ahead of their use"
    )
    sharding.add_argument(
        "--bucket-kib",
        type=positive,
        default=1024,
        help="of gradients that a rank takes over in one reduction",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU a rank where there are enough",
    )
    parser.add_argument("--trace", type=Path, help="file of the trace; default: a temporary one")
    parser.add_argument(
        "--check", action="store_true", help="train unsharded as well; status 1 if they differ"
    )
    options = parser.parse_args(arguments)
    if options.width % Shape.head_width:
        parser.error(f"--width {options.width} is not a multiple of {Shape.head_width}")
    if options.trace and not options.trace.parent.is_dir():
        parser.error(f"--trace: there is no folder {options.trace.parent}")
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    return options


def shape(options: argparse.Namespace) -> Shape:
    """Return the model's size that the options ask for."""
    return Shape(layers=options.layers, width=options.width, context=options.seq)


def optimizer(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer over the model's parameters, sharded or not."""
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=options.lr)
    if options.optimizer == "penstock-adamw":
        return penstock.AdamW(model, lr=options.lr)
    return torch.optim.AdamW(model.parameters(), lr=options.lr)
