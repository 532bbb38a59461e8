"""The ways to train a model that the benchmark compares."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import penstock as library
import torch
from model import Model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

WAYS = ("compute", "compute-captured", "fsdp2", "penstock", "captured")
USUAL_WAYS = ("compute", "fsdp2", "penstock", "captured")  # one model that is not sharded
# What penstock takes for them: checkpoint=, and offload= beside that of shards.
CHECKPOINTS: dict[str, tuple[str | None, list[str]]] = {
    "none": (None, []),
    "all": ("*", []),
    "selective": ("selective", []),
    "auto": ("auto", []),
    "offload": (None, ["activations"]),
    "selective-offload": ("selective", ["activations"]),
    "auto-offload": ("auto", ["activations"]),
}
SHARDS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COMPUTE = torch.bfloat16
EAGER_STEPS = 3  # of a step before it is captured

Shard = Callable[[Model, argparse.Namespace], object]  # in place
Step = Callable[[torch.Tensor], torch.Tensor]


def torch_adamw(model: Model, fused: bool, capturable: bool) -> torch.optim.Optimizer:
    """Return torch's, which is fused on GPUs."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused, capturable=capturable)


def penstock_adamw(model: Model, fused: bool, capturable: bool) -> torch.optim.Optimizer:
    """Return Penstock's, whose moments are of the parameters' own dtype, as torch's are."""
    moments = next(model.parameters()).dtype
    return library.AdamW(model, lr=1e-5, moments=moments, capturable=capturable)


def penstock_adamw_in_backward(
    model: Model, fused: bool, capturable: bool
) -> torch.optim.Optimizer:
    """Return the same, which updates beside the backward."""
    moments = next(model.parameters()).dtype
    return library.AdamW(model, lr=1e-5, moments=moments, in_backward=True)


OPTIMIZERS = {
    "torch": torch_adamw,
    "penstock": penstock_adamw,
    "in-backward": penstock_adamw_in_backward,
}


class Implementation:
    """One way to train the model, and what was measured of it."""

    def __init__(self, name: str, model: Model, given: argparse.Namespace) -> None:
        self.name = name
        self.model = model
        self.has_optimizer = not given.no_optimizer
        self.micro_batches = given.micro_batches
        cuda = next(model.parameters()).is_cuda
        is_compute_captured = cuda and name == "compute-captured"
        is_fused = cuda or given.offload
        self.optimizer = OPTIMIZERS[given.optimizer](model, is_fused, is_compute_captured)
        self.is_penstock = name.startswith(("penstock", "captured"))
        self.is_captured = name.startswith("captured") or is_compute_captured
        self.parameters = sum(p.numel() for p in model.parameters())  # of all ranks together
        self.losses: list[float] = []
        self.times: list[float] = []
        self.host_times: list[float] = []
        self.events: list[torch.cuda.Event] = []  # around the last eager step of the optimizer
        if cuda:
            self.optimizer.register_step_pre_hook(partial(self.note_event, 0))
            self.optimizer.register_step_post_hook(partial(self.note_event, 1))

        self.step: Step = self.step_eagerly
        if name.startswith("captured"):
            self.step = library.step(model, self.optimizer)(self.step_eagerly)
        elif is_compute_captured:
            self.step = Captured(self.step_eagerly)

    def step_eagerly(self, tokens: torch.Tensor) -> torch.Tensor:
        """One training step; the loss, on the device."""
        total = torch.zeros((), device=tokens.device)
        for micro_batch in tokens.chunk(self.micro_batches):
            loss = self.model(micro_batch) / self.micro_batches
            loss.backward()
            total += loss.detach()
        self.update()
        return total

    def update(self) -> None:
        """Consume the gradients."""
        self.step_optimizer()
        self.optimizer.zero_grad()

    def step_optimizer(self) -> None:
        """Update by the gradients, and leave them."""
        if self.has_optimizer:
            self.optimizer.step()

    def note_event(self, number: int, *_: object) -> None:
        """Have the stream note the time, unless all of it is captured."""
        if torch.cuda.is_current_stream_capturing():
            return
        self.events[number:] = [torch.cuda.Event(enable_timing=True)]
        self.events[number].record()

    def optimizer_ns(self) -> float:
        """Return what the device took for it, or 0 where there was none."""
        return self.events[0].elapsed_time(self.events[1]) * 1e6 if self.events else 0.0

    def forget_times(self) -> None:
        """Measure from now on."""
        self.times.clear()
        self.host_times.clear()


class Captured:
    """A step as one CUDA graph, by torch alone."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.stream = torch.cuda.Stream()  # the default one cannot be captured
        self.graph = torch.cuda.CUDAGraph()
        self.calls = 0
        self.tokens = torch.empty(0)
        self.loss = torch.empty(0)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Train a step: first as it is, then captured."""
        self.calls += 1
        if self.calls <= EAGER_STEPS:
            return self.on_stream(tokens)
        if self.calls == EAGER_STEPS + 1:
            self.tokens = tokens.clone()
            with torch.cuda.graph(
                self.graph, stream=self.stream, capture_error_mode="thread_local"
            ):  # threads of other implementations may call CUDA
                self.loss = self.step(self.tokens)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.loss.clone()

    def on_stream(self, tokens: torch.Tensor) -> torch.Tensor:
        """Train a step on the stream of the capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(tokens)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss


def checkpoint_layers(name: str, model: Model, given: argparse.Namespace) -> None:
    """Checkpoint layers as FSDP2's users do, before they are compiled; penstock has its own way."""
    if given.checkpoint == "none" or name.startswith(("penstock", "captured")):
        return
    chosen = {id(block) for block in model.blocks()[:: given.every]}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)


def compute_alone(model: Model, given: argparse.Namespace) -> None:
    """Leave each rank the whole model: no communication."""


def fsdp2(model: Model, given: argparse.Namespace) -> None:
    """Shard as FSDP2's users do: by layers, the embedding, and the head with its norm."""
    groups = [*([block] for block in model.blocks()), *model.beside()]
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE)
    is_pinned = torch.cuda.is_available()
    offload = CPUOffloadPolicy(pin_memory=is_pinned) if given.offload else OffloadPolicy()
    for group in [*groups, model]:
        fully_shard(
            group,
            reshard_after_forward=not given.keep,
            mp_policy=policy,
            offload_policy=offload,
        )


def penstock(model: Model, given: argparse.Namespace, part_mib: int) -> None:
    """Shard with Penstock."""
    checkpoint, more = CHECKPOINTS[given.checkpoint]
    library.shard(
        model,
        stage=2 if given.keep else 3,
        param_dtype=COMPUTE,
        prefetch_ahead=given.prefetch_ahead,
        bucket_bytes=given.bucket_mib << 20,
        part_bytes=part_mib << 20 or None,
        communicator=given.communicator,
        time_waits=given.time_waits,
        checkpoint=checkpoint,
        memory=given.memory,
        offload=[*more, given.offload] if given.offload else more,
        keep_copies=given.keep_copies,
    )


def ways_of(given: argparse.Namespace) -> dict[str, Shard]:
    """Return what is asked for by name; penstock once a size of parts."""
    ways: dict[str, Shard] = {
        "compute": compute_alone,
        "compute-captured": compute_alone,
        "fsdp2": fsdp2,
    }
    for mib in given.part_mib:
        for way in ("penstock", "captured"):  # as it is, and by penstock.step as one CUDA graph
            ways[f"{way}/{mib}" if mib else way] = partial(penstock, part_mib=mib)
    return {name: way for name, way in ways.items() if name.partition("/")[0] in given.ways}
