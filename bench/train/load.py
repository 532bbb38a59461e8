"""GB/s of `penstock.load` beside plain reads of the same file, and the memory that it takes.

    torchrun --nproc-per-node 2 bench/train/load.py [--gb 4] [--folder FOLDER] [--rounds 3]

Rank 0 writes random weights in bf16 to the folder. In each round all ranks load them into a model
from the meta device, then rank 0 reads the file in pieces and throws them away: first with what the
kernel has cached of the file dropped, then with it in the cache. The folder needs room for it, and
the machine memory for the shards as well. Takes GPUs where torch finds them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import penstock
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 4096
PIECE_BYTES = 4 << 20


def write_file(path: Path, layers: int) -> None:
    """Write a file of safetensors with so many square matrices, each at another roll of one."""
    size = 2 * WIDTH * WIDTH
    header = {
        f"{i}.weight": {
            "dtype": "BF16",
            "shape": [WIDTH, WIDTH],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(layers)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    matrix = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in range(layers):
            file.write(matrix.roll(i).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())


def drop_cache(path: Path) -> None:
    """Let the kernel forget the file, which is on the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(path: Path) -> None:
    """Read all of the file, a piece at a time."""
    piece = bytearray(PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def seconds_of(function: Callable[[], object]) -> float:
    """Return how long all ranks take."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - begin


def measure(model: nn.Module, path: Path, cached: bool) -> tuple[float, float]:
    """Return the seconds of a load and of plain reads by rank 0."""
    is_first = dist.get_rank() == 0
    found = []
    for function in (
        lambda: penstock.load(model, path),
        lambda: read_plainly(path) if is_first else None,
    ):
        if is_first and not cached:
            drop_cache(path)
        found.append(seconds_of(function))
    return found[0], found[1]


def report(path: Path, rounds: int) -> None:
    """Load the file and print what rank 0 sees."""
    with torch.device("meta"):
        layers = os.stat(path).st_size // (2 * WIDTH * WIDTH)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    penstock.shard(model.to(torch.bfloat16))
    rank, size = dist.get_rank(), dist.get_world_size()
    gb = os.stat(path).st_size / 1e9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    for cached in (False, True):
        for _ in range(rounds):
            load, plain = measure(model, path, cached)
            if rank == 0:
                print(
                    f"{size} ranks, {gb:.2f} GB {'cached' if cached else 'on disk'}: "
                    f"load {gb / load:.2f} GB/s, plain read {gb / plain:.2f} GB/s",
                    flush=True,
                )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"rank {rank}: peak RSS {before:.3f} GB with its shards, {after:.3f} GB after the loads")


def main() -> None:
    """Write, load, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the file")
    parser.add_argument("--folder", type=Path, help="where it is written; a temporary one")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folders = [made]
        dist.broadcast_object_list(folders)
        path = Path(folders[0]) / "model.safetensors"
        if dist.get_rank() == 0:
            write_file(path, max(1, round(options.gb * 1e9 / (2 * WIDTH * WIDTH))))
        dist.barrier()
        report(path, options.rounds)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
