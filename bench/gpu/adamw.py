"""GB/s of a step of penstock.AdamW beside torch's and a plain copy, on a GPU or on the host.

Parameters are those of Qwen3-8B's shape, as many layers as fit; the same one element off what
vectors are aligned to; and many tiny ones. Ours, torch's and the copy take turns, the optimizers on
the same tensors. Bytes are those that a step has to read and write; a copy's are both of its sides.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import penstock
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from model import Shape  # noqa: E402

COPY_BYTES = 1 << 30
TINY_COUNT, TINY_MOST = 3000, 300
SEVERAL = 4  # steps that are timed as one


@dataclass(frozen=True)
class Kind:
    """Dtypes of a run, and whether torch's AdamW has them."""

    name: str
    parameter: torch.dtype
    moments: torch.dtype
    masters: bool = False
    stochastic_rounding: bool = False

    @property
    def is_torchs(self) -> bool:
        """Whether all is of one dtype."""
        return self.parameter == self.moments and not self.masters and not self.stochastic_rounding

    def bytes_held(self) -> int:
        """Return bytes an element that tensors take."""
        wide = 4 if self.masters else 0
        return 2 * self.parameter.itemsize + 2 * self.moments.itemsize + wide

    def bytes_moved(self) -> int:
        """Return bytes an element that a step reads and writes."""
        master = 8 - self.parameter.itemsize if self.masters else 0  # then parameters are written
        return 3 * self.parameter.itemsize + 4 * self.moments.itemsize + master


KINDS = (
    Kind("fp32", torch.float32, torch.float32),
    Kind("bf16", torch.bfloat16, torch.bfloat16),
    Kind("bf16, rounded randomly", torch.bfloat16, torch.bfloat16, stochastic_rounding=True),
    Kind("bf16, fp32 moments", torch.bfloat16, torch.float32),
    Kind("bf16, fp32 moments and masters", torch.bfloat16, torch.float32, masters=True),
)


# ---- parameters ---------------------------------------------------------------------------------


def layer_sizes(shape: Shape) -> list[int]:
    """Return the elements of a layer's parameters."""
    heads, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    matrices = [heads, keys, keys, heads, shape.hidden, shape.hidden, shape.hidden]
    return [rows * shape.width for rows in matrices] + [shape.head_width] * 2 + [shape.width] * 2


def model_sizes(shape: Shape, layers: int) -> list[int]:
    """Return the elements of all parameters."""
    outer = [shape.vocabulary * shape.width] * 2 if layers == shape.layers else []
    return layer_sizes(shape) * layers + [*outer, shape.width]


def layers_that_fit(shape: Shape, kind: Kind, room: float) -> int:
    """Return how many layers' tensors are no larger than `room` bytes, at least one."""
    whole = sum(model_sizes(shape, shape.layers)) * kind.bytes_held()
    if whole <= room:
        return shape.layers
    return max(1, min(shape.layers - 1, int(room / (sum(layer_sizes(shape)) * kind.bytes_held()))))


def make(sizes: list[int], kind: Kind, device: str, offset: int) -> list[nn.Parameter]:
    """Make parameters with gradients, each `offset` elements into memory of its own."""
    made = []
    for size in sizes:
        values = [
            torch.empty(size + offset, device=device, dtype=kind.parameter)[offset:]
            for _ in range(2)
        ]
        made.append(nn.Parameter(values[0].normal_()))
        made[-1].grad = values[1].normal_()
    return made


# ---- time ---------------------------------------------------------------------------------------


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Return the seconds that one of several runs takes, on the device's clock."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(SEVERAL):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / SEVERAL


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return the run as a CUDA graph, so that the host takes no part in its time."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def optimizers(
    parameters: list[nn.Parameter], kind: Kind, device: str
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield what is compared, on the same state."""
    is_gpu = device != "cpu"
    ours = penstock.AdamW(
        parameters,
        moments=kind.moments,
        masters=kind.masters,
        stochastic_rounding=kind.stochastic_rounding,
        capturable=is_gpu,
    )
    ours.step()
    yield "penstock", ours
    if not kind.is_torchs:
        return
    theirs = torch.optim.AdamW(parameters, fused=True, capturable=is_gpu)
    theirs.load_state_dict(ours.state_dict())
    theirs.param_groups[0].update(fused=True)
    yield "torch, fused", theirs


def measure(
    sizes: list[int], kind: Kind, device: str, offset: int, rounds: int
) -> dict[str, float]:
    """Return the median GB/s of each, which take turns."""
    parameters = make(sizes, kind, device, offset)
    moved = sum(sizes) * kind.bytes_moved()
    runs: dict[str, tuple[Callable[[], object], int]] = {}
    for name, optimizer in optimizers(parameters, kind, device):
        runs[name] = (optimizer.step, moved)
        if device != "cpu":
            runs[f"{name}, captured"] = (captured(optimizer.step), moved)
    source = torch.ones(COPY_BYTES // (1 if device != "cpu" else 8), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    runs["copy"] = (lambda: target.copy_(source), 2 * source.numel())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (run, _) in runs.items():
            taken = seconds_of(run, device)
            if number > 0:
                times[name].append(taken)
    return {name: runs[name][1] / statistics.median(times[name]) / 1e9 for name in runs}


# ---- the table ----------------------------------------------------------------------------------


def row(what: str, kind: Kind, sizes: list[int], found: dict[str, float]) -> str:
    """Return one run as a line."""
    captured_ours = found.get("penstock, captured", found["penstock"])
    names = [name for name in found if name != "copy"]
    return (
        f"{kind.name:31} {what:10} {len(sizes):5} {sum(sizes) / 1e6:8.1f}  "
        + "  ".join(f"{name} {found[name]:7.1f}" for name in names)
        + f"  copy {found['copy']:7.1f}  ({100 * captured_ours / found['copy']:.0f} %)"
    )


def main() -> int:
    """Measure all kinds and places."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="default: what fits")
    parser.add_argument(
        "--width", type=int, help="another width than Qwen3-8B's; hidden 3 times it"
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    shape = Shape()
    if options.width:
        shape = Shape(width=options.width, hidden=3 * options.width, vocabulary=1024)
    where = "the host" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"A step of AdamW on {where}, torch {torch.__version__}, GB/s read and written;")
    print("in brackets ours (captured, where there are graphs) as a part of the copy's.\n")
    print(f"{'dtypes':31} {'parameters':10} {'count':>5} {'millions':>8}")
    room = 0.85 * torch.cuda.mem_get_info()[0] if options.device != "cpu" else 1 << 30
    generator = torch.Generator().manual_seed(0)
    tiny = torch.randint(1, TINY_MOST, (TINY_COUNT,), generator=generator).tolist()
    for kind in KINDS:
        layers = options.layers or layers_that_fit(shape, kind, room - 2 * COPY_BYTES)
        whole = model_sizes(shape, layers)
        odd = [size - 1 for size in layer_sizes(shape) * min(layers, 4)]
        for what, sizes, offset in (
            ("model", whole, 0),
            ("unaligned", odd, 1),
            ("tiny", tiny, 0),
        ):
            found = measure(sizes, kind, options.device, offset, options.rounds)
            print(row(what, kind, sizes, found), flush=True)
            if options.device != "cpu":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
