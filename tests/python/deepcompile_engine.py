"""An engine that keeps ZeRO's memory and calls the runtime of DeepCompile as DeepSpeed's engine
does, under the names of DeepSpeed's entry points. Its optimizer is SGD."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepcompile_passes import Compiled, make_backend, profile_with
from torch import nn


def configuration(**changes: Any) -> SimpleNamespace:
    """The fields of DeepSpeed's CompileConfig that the runtime reads."""
    fields = {
        "double_buffer": True,
        "symmetric_memory": False,
        "free_activation_threshold": 10 * 1024 * 1024,
        "sync_before_reduce": False,
        "sync_after_reduce": False,
        "sync_before_allgather": False,
        "sync_after_allgather": False,
        "offload_activation_pin_memory": True,
    }
    return SimpleNamespace(**{**fields, **changes})


class Sharded:
    """Stage 3: each parameter flat, padded to a multiple of the ranks, and cut in equal parts."""

    _next_id = 0  # unique in the process, as DeepSpeed's are

    def __init__(self, parameters: list[nn.Parameter], grad_dtype: torch.dtype | None) -> None:
        self.parameters = parameters
        self.world = dist.get_world_size()
        self.grad_dtype = grad_dtype
        self.shards, self.buffers = [], []
        for parameter in parameters:
            parameter.ds_id = Sharded._next_id
            Sharded._next_id += 1
            part = math.ceil(parameter.numel() / self.world)
            padded = torch.zeros(part * self.world, dtype=parameter.dtype)
            padded[: parameter.numel()] = parameter.detach().flatten()
            self.shards.append(padded[dist.get_rank() * part :][:part].clone())
            # What is used without being gathered shows.
            parameter.data.fill_(math.nan)
            dtype = grad_dtype or parameter.dtype
            elements = part if parameter.requires_grad else 0
            self.buffers.append(torch.full((elements,), math.nan, dtype=dtype))

    def register(self, handle: Any, persistent: tuple[int, ...]) -> None:
        for i, parameter in enumerate(self.parameters):
            handle.register_z3_param(
                parameter.ds_id,
                list(parameter.shape),
                self.shards[i],
                self.buffers[i],
                False,
                self.grad_dtype or parameter.dtype,
            )
        self.persistent = [self.parameters[i].ds_id for i in persistent]

    def before_backward(self, handle: Any, boundary: bool) -> None:
        pass

    def step(self, handle: Any, lr: float) -> None:
        for parameter, shard, buffer in zip(
            self.parameters, self.shards, self.buffers, strict=True
        ):
            if parameter.requires_grad:
                shard.sub_(lr * buffer.to(shard.dtype))

    def whole(self, parts: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [
            _gather(part)[: parameter.numel()].view(parameter.shape) if part.numel() else None
            for parameter, part in zip(self.parameters, parts, strict=True)
        ]

    def values(self) -> list[torch.Tensor | None]:
        return self.whole(self.shards)

    def gradients(self) -> list[torch.Tensor | None]:
        return self.whole(self.buffers)


class Partitioned:
    """Stages 1 and 2: whole parameters in one flat tensor per rank; each rank updates its part."""

    def __init__(
        self, parameters: list[nn.Parameter], grad_dtype: torch.dtype | None, stage: int
    ) -> None:
        self.stage = stage
        self.trainable = [p for p in parameters if p.requires_grad]
        self.parameters = self.trainable + [p for p in parameters if not p.requires_grad]
        for number, parameter in enumerate(self.parameters):
            parameter.param_id = number
        self.dtype = self.parameters[0].dtype
        self.grad_dtype = grad_dtype or self.dtype
        world, rank = dist.get_world_size(), dist.get_rank()
        total = sum(p.numel() for p in self.trainable)
        self.part = math.ceil(total / world)
        self.flat = torch.zeros(self.part * world, dtype=self.dtype)
        self.places = []  # (offset in the parameter, offset in this rank's part, elements)
        begin = 0
        for parameter in self.trainable:
            view = self.flat[begin : begin + parameter.numel()].view(parameter.shape)
            parameter.data = view.copy_(parameter.detach())
            low = max(begin, rank * self.part)
            high = min(begin + parameter.numel(), (rank + 1) * self.part)
            self.places.append((low - begin, low - rank * self.part, max(0, high - low)))
            begin += parameter.numel()
        self.own = self.flat[rank * self.part :][: self.part]
        self.gradient: torch.Tensor | None = None

    def _views(self) -> list[tuple[torch.Tensor, int]]:
        assert self.gradient is not None
        return [
            (self.gradient[at : at + count], offset) if count else (self._empty(), 0)
            for offset, at, count in self.places
        ]

    def _empty(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.grad_dtype)

    def register(self, handle: Any, persistent: tuple[int, ...]) -> None:
        self.persistent: list[int] = []
        if self.stage == 2:
            self.gradient = torch.full((self.part,), math.nan, dtype=self.grad_dtype)
            targets = self._views()
        else:
            targets = []
        targets += [(self._empty(), 0)] * (len(self.parameters) - len(targets))
        for parameter, (buffer, offset) in zip(self.parameters, targets, strict=True):
            handle.register_param(
                parameter.param_id, list(parameter.shape), parameter, buffer, offset
            )

    def before_backward(self, handle: Any, boundary: bool) -> None:
        """Stage 1: the gradient's memory lives from the boundary's backward to the step."""
        if self.stage == 1:
            self._release(handle)
            if boundary:
                self.gradient = torch.full((self.part,), math.nan, dtype=self.grad_dtype)
                for parameter, (buffer, offset) in zip(self.trainable, self._views(), strict=True):
                    if buffer.numel():
                        handle.update_param_grad_buffer(parameter.param_id, buffer, offset)

    def _release(self, handle: Any) -> None:
        for parameter, (_, _, count) in zip(self.trainable, self.places, strict=True):
            if count:
                handle.update_param_grad_buffer(parameter.param_id, self._empty(), 0)
        self.gradient = None

    def step(self, handle: Any, lr: float) -> None:
        for (gradient, _), (_, at, count) in zip(self._views(), self.places, strict=True):
            if count:
                self.own[at : at + count].sub_(lr * gradient.to(self.dtype))
        if self.stage == 1:
            self._release(handle)
        self.flat.copy_(_gather(self.own.clone()))

    def values(self) -> list[torch.Tensor | None]:
        return [p.detach() for p in self.parameters]

    def gradients(self) -> list[torch.Tensor | None]:
        assert self.gradient is not None
        whole = _gather(self.gradient)
        sizes = [p.numel() for p in self.trainable]
        pieces = whole[: sum(sizes)].split(sizes)
        shaped = [g.view(p.shape) for g, p in zip(pieces, self.trainable, strict=True)]
        return [*shaped, *([None] * (len(self.parameters) - len(shaped)))]


def _gather(part: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(part.numel() * dist.get_world_size(), dtype=part.dtype)
    dist.all_gather_into_tensor(whole, part.contiguous())
    return whole


class Engine:
    """Trains a model with gradient accumulation on the operators.

    handle: returns the module with the runtime's functions. Dynamo compiles anew for each shape of
    a batch.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int,
        handle: Callable[[], Any],
        accumulation: int = 1,
        grad_dtype: torch.dtype | None = None,
        persistent: tuple[int, ...] = (),
        prefetch: int = 0,
        bucket_elements: int = 64,
        lr: float = 0.1,
        profile: bool = False,
        **config: Any,
    ) -> None:
        self.module = module
        self.stage = stage
        self.handle = handle
        self.accumulation = accumulation
        self.grad_dtype = grad_dtype
        self.persistent = persistent
        self.prefetch = prefetch
        self.bucket_elements = bucket_elements
        self.lr = lr
        self.profile = profile
        self.config = configuration(**config)
        self.micro_step = 0
        self.order: list[Compiled] = []

    def compile(self) -> None:
        handle = self.handle()
        handle.init(dist.group.WORLD, self.config, self.bucket_elements)
        parameters = list(self.module.parameters())
        self.memory: Any
        if self.stage == 3:
            self.memory = Sharded(parameters, self.grad_dtype)
        else:
            self.memory = Partitioned(parameters, self.grad_dtype, self.stage)
        self.memory.register(handle, self.persistent)
        name = "ds_id" if self.stage == 3 else "param_id"
        backend = make_backend(
            lambda tensor: getattr(tensor, name),
            self._register_graph,
            gathers=self.stage == 3,
            prefetch=self.prefetch,
            order=self.order,
            profile=profile_with(self.handle) if self.profile else None,
        )
        self.compiled = torch.compile(self.module, backend=backend, dynamic=False)

    def _register_graph(self, graph_id: int, ids: list[int]) -> None:
        handle = self.handle()
        getattr(handle, f"register_graph_z{self.stage}")(graph_id, ids)
        for ds_id in self.memory.persistent:
            if ds_id in ids:
                handle.set_persistent(ds_id)

    def boundary(self) -> bool:
        return (self.micro_step + 1) % self.accumulation == 0

    def forward(self, *inputs: Any) -> torch.Tensor:
        output = self.compiled(*inputs)
        if output.requires_grad:
            output.register_hook(lambda _: self._backward_prologue())
        return output

    def __call__(self, *inputs: Any) -> torch.Tensor:
        return self.forward(*inputs)

    def _backward_prologue(self) -> None:
        self.memory.before_backward(self.handle(), self.boundary())
        self.handle().start_backward(self.boundary())

    def _backward_epilogue(self) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulation).backward()
        self._backward_epilogue()

    def step(self) -> None:
        if self.boundary():
            self.memory.step(self.handle(), self.lr)
        self.micro_step += 1

    def values(self) -> dict[str, torch.Tensor | None]:
        """Whole parameters by name."""
        return self._named(self.memory.values())

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Whole reduced gradients by name; None for frozen parameters."""
        return self._named(self.memory.gradients())

    def _named(self, tensors: list[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return {names[p]: t for p, t in zip(self.memory.parameters, tensors, strict=True)}

    def recompile(self) -> None:
        """As a schedule of passes does it between steps."""
        torch._dynamo.reset()
        self.handle().reset()
        self.order.clear()

    def destroy(self) -> None:
        self.handle().cleanup()
