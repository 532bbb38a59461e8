"""What the ranks do that test_demo.py starts: they train the demo, at each stage."""

import os
import sys
from pathlib import Path

import train_gpt

TINY = ["--steps", "6", "--layers", "2", "--width", "64", "--seq", "32", "--batch", "2"]


def train(folder, stage, optimizer):
    """Call the demo's main; what it prints and its trace go into a folder of that stage."""
    own = Path(folder) / f"stage_{stage}"
    own.mkdir(exist_ok=True)
    options = ["--stage", str(stage), "--optimizer", optimizer]
    sys.argv = ["train_gpt.py", *TINY, *options, "--check", "--trace", str(own / "trace.json")]
    with (own / "printed").open("a") as printed:
        os.dup2(printed.fileno(), sys.stdout.fileno())
    status = train_gpt.main()
    sys.stdout.flush()
    assert status == 0, (own / "printed").read_text()


def stage_1(folder):
    train(folder, 1, "adamw")


def stage_2(folder):
    train(folder, 2, "sgd")


def stage_3(folder):
    train(folder, 3, "sgd")
