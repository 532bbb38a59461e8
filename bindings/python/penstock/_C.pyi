# ruff: noqa: N999
"""The extension module: the C engine with tensors in place of pointers."""

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from penstock._roll import Roll

__version__: str

class Runtime:
    def __init__(
        self,
        rank: int,
        world_size: int,
        deadline_seconds: float,
        device: torch.device,
        stream: int,
        roll: Roll,
    ) -> None: ...
    def destroy(self) -> None: ...
    def trace_start(self) -> None: ...
    def trace_stop(self) -> None: ...
    def trace_write(self, path: str) -> None: ...

class GroupLayout:
    shard_bytes: int
    gathered_bytes: int
    gradient_bytes: int

class ParameterLayout:
    first_row: int
    shard_rows: int
    shard_offset: int
    gathered_offset: int
    gradient_offset: int

class ZeroPlan:
    groups: int
    uses: int
    peak_bytes: int
    lower_bound_bytes: int
    hash: int

Operation = tuple[int, int, bool, int, int, int, int]
Budgets = tuple[int, int, int]  # prefetch_ahead, prefetch_bytes, keep_bytes

class Recording:
    def __init__(self, taken: list[Operation]) -> None: ...

def predict(
    grad: bool,
    stage: int,
    recording: Recording,
    groups: list[tuple[int, int, bool]],
    budgets: Budgets,
) -> Forecast: ...

class Forecast:
    step_ns: int
    exposed_ns: int
    peak_bytes: int
    kept_bytes: int
    keep_bytes: int

class Draft:
    prefetch_ahead: int
    keep_bytes: int
    peak_bytes: int
    step_ns: int
    exposed_ns: int

class GatherForecast:
    start_ns: int
    lands_ns: int
    used_ns: int

class GroupForecast:
    bytes: int
    keep: int
    gather_ns: int
    reduce_ns: int
    forward: GatherForecast
    backward: GatherForecast

class Engine:
    def __init__(
        self,
        *,
        runtime: Runtime,
        name: str,
        communicator: str,
        stage: int,
        gather: ProcessGroup | None,
        reduce: ProcessGroup | None,
        nodes: tuple[ProcessGroup, ProcessGroup] | None,
        prefetch_ahead: int,
        prefetch_bytes: int,
        bucket_bytes: int,
        part_bytes: int,
        verify: bool,
        time_waits: bool,
        segments: Callable[[int], torch.Tensor] | None,
    ) -> None: ...
    def destroy(self) -> None: ...
    def communicator(self) -> str: ...
    def why_not_ce(self) -> str: ...
    def add_parameter(self, name: str, rows: int, row_elements: int, trainable: bool) -> int: ...
    def add_group(
        self,
        name: str,
        parameters: list[int],
        dtype: torch.dtype,
        gather_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        forward_only: bool,
    ) -> int: ...
    def seal(self) -> None: ...
    def group_layout(self, group: int) -> GroupLayout: ...
    def parameter_layout(self, group: int, parameter: int) -> ParameterLayout: ...
    def make_shard(self, group: int) -> torch.Tensor: ...
    def bind_shard(self, group: int, shard: torch.Tensor) -> None: ...
    def attach(self, group: int, tensors: Sequence[torch.Tensor], messages: list[str]) -> None: ...
    def add_unit(self, name: str, groups: list[int]) -> int: ...
    def begin_forward(self, grad: bool) -> None: ...
    def use(self, unit: int) -> bool: ...
    def done(self, unit: int) -> bool: ...
    def refuse_written(self) -> None: ...
    def end_forward(self) -> None: ...
    def begin_backward(self, reduce: bool) -> None: ...
    def may_update(self, group: int) -> bool: ...
    def update(self, updates: list[AdamWUpdates]) -> None: ...
    def is_updated(self, group: int) -> bool: ...
    def gradients(self, group: int) -> None: ...
    def set_gradient(self, group: int, flat: torch.Tensor) -> None: ...
    def take_gradient(self, group: int) -> torch.Tensor | None: ...
    def take_kept(self, group: int) -> list[torch.Tensor]: ...
    def end_backward(self) -> None: ...
    def has_gradient(self, parameter: int) -> bool: ...
    def has_written(self, group: int) -> bool: ...
    def updated(self) -> None: ...
    def is_steady(self) -> bool: ...
    def drain(self) -> None: ...
    def begin_capture(self, stream: int) -> None: ...
    def end_capture(self) -> None: ...
    def before_graph(self) -> None: ...
    def after_graph(self) -> None: ...
    def recorded(self, grad: bool) -> list[Operation]: ...
    def compile(self, grad: bool, recording: Recording, budgets: Budgets) -> ZeroPlan: ...
    def make_drafts(self, grad: bool, recording: Recording, budgets: Budgets) -> list[Draft]: ...
    def plan_with(self, prefetch_ahead: int, keep_bytes: int) -> None: ...
    def forecast(self, grad: bool) -> Forecast: ...
    def group_forecast(self, grad: bool, group: int) -> GroupForecast: ...
    def set_replay(self, enabled: bool) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def reset_stats(self) -> None: ...

class AdamWUpdates: ...

class AdamWArguments(TypedDict):
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    seed: int
    lr_at: torch.Tensor | None
    gradient_scale: torch.Tensor | None
    gradient_factor: torch.Tensor | None
    found_inf: torch.Tensor | None
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    largest: list[torch.Tensor]
    copies: list[torch.Tensor]
    steps: list[torch.Tensor]
    firsts: list[int]
    rounds_randomly: bool

class AdamW:
    def __init__(self, device: torch.device) -> None: ...
    def step(self, stream: int, **given: Unpack[AdamWArguments]) -> None: ...
    def prepare_updates(
        self, stream: int, numbers: list[int], **given: Unpack[AdamWArguments]
    ) -> AdamWUpdates: ...

def make_released_tensor(
    shape: list[int], dtype: torch.dtype, device: torch.device, message: str
) -> torch.Tensor: ...
def make_view(whole: torch.Tensor, first: int, shape: list[int]) -> torch.Tensor: ...
def release(tensor: torch.Tensor, message: str) -> None: ...
