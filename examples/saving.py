"""Save a sharded model, export its weights, and begin from them, a rank reading its own rows.

torchrun --standalone --nproc-per-node 2 examples/saving.py --output FOLDER
"""

import argparse
from pathlib import Path

import penstock
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)


def build():
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 1))


def train_a_step(model, optimizer):
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_beside_training(path, model, optimizer, group):
    """Begin to save what is there now; training goes on, which uses other process groups."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    return dcp.async_save(state, checkpoint_id=path, process_group=group)


def export(path, model):
    """Write whole weights, which any program reads."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)  # on rank 0, of which all are needed
    if dist.get_rank() == 0:
        save_file(weights, path)
    dist.barrier()


def begin_from(path, prefix=""):
    """Make a model of what was exported, or of a checkpoint; no rank ever holds all of it."""
    with torch.device("meta"):
        model = build()
    penstock.shard(model, device="cpu")
    penstock.load(model, path, prefix=prefix)
    return model


def run(folder):
    """Train, save and export; return three models with the same weights."""
    model = penstock.shard(build(), broadcast=True)
    optimizer = penstock.AdamW(model)
    train_a_step(model, optimizer)
    group = dist.new_group(backend="gloo")
    saving = save_beside_training(folder / "checkpoint", model, optimizer, group)
    export(folder / "model.safetensors", model)
    saving.result()  # an error is raised here
    exported = begin_from(folder / "model.safetensors")
    saved = begin_from(folder / "checkpoint", prefix="model.")
    return model, exported, saved


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=Path)
    models = run(parser.parse_args(arguments).output)
    outputs = [model(torch.ones(1, 16)).item() for model in models]
    if dist.get_rank() == 0:
        print("trained, exported, saved:", *(f"{output:.6f}" for output in outputs))
    return models


if __name__ == "__main__":
    main()
