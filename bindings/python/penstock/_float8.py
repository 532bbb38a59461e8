"""Which parameters have hooks of their gather: those that torchao makes, and matrices as float8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from penstock._arguments import Options, refuse
from penstock._extension import Extension, has_hooks
from penstock._units import Parameter, Unit

_LEAST = 64  # elements that have one scale


def find_extension(parameter: Parameter, unit: Unit, options: Options) -> Extension | None:
    """Return the hooks that a parameter of several ranks has, or is to have, if any.

    Parameters
    ----------
    parameter : Parameter
        Not sharded yet.
    unit : Unit
        Which it belongs to.
    options : Options
        As `shard` was called.
    """
    kind: type[Extension] | None = None
    if has_hooks(parameter.original):
        kind = Extension
    elif options.param_dtype == torch.float8_e4m3fn and _is_scaled(parameter, unit):
        kind = Scaled
    if kind is None:
        return None
    if options.offloads_shards:
        refuse(
            "offload",
            options.offload,
            f"parameter {parameter.name!r} is gathered as its hooks make it, on the device: leave "
            "it out",
        )
    module, _ = parameter.places[0]
    policy = MixedPrecisionPolicy(
        options.param_dtype, options.reduce_dtype, options.output_dtype, cast_forward_inputs=True
    )
    used = options.used_dtype or parameter.dtype
    return kind(parameter.name, parameter.shape, module, policy, used)


def _is_scaled(parameter: Parameter, unit: Unit) -> bool:
    """Whether it is one of a block's matrices, or a stack of them, that are multiplied with."""
    is_looked_up = any(isinstance(module, nn.Embedding) for module, _ in parameter.places)
    is_of_block = unit.name != "root" and not unit.beside_blocks
    is_matrix = len(parameter.shape) > 1 and parameter.shape[-1] >= _LEAST
    return is_of_block and is_matrix and not is_looked_up


class Scaled(Extension):
    """A matrix, or several, as float8 with a scale in fp32 for each row of each.

    A row's largest magnitude becomes the largest one of float8. So what travels is a byte an
    element, and 4 bytes a row. What modules have is made of that in `used_dtype`.
    """

    wire_dtype = torch.float8_e4m3fn
    is_captured = True

    def __init__(self, name: str, shape: torch.Size, *rest: Any) -> None:
        super().__init__(name, shape, *rest)
        self.rows.append(torch.Size([shape[1:-1].numel() * torch.float32.itemsize]))
        self._values: torch.Tensor

    def wrap(self, rows: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows: optimizers have them as they are."""
        return rows

    def take_hooks(self, local: torch.Tensor, mesh: Any = None) -> None:
        """Take the rows, of which a rank may have none; the hooks are here."""
        self._hooks, self._values = self, local

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], None]:
        """Return this rank's rows in float8, and the bytes of their scales."""
        values = self._values.detach().float()
        most = torch.finfo(self.wire_dtype).max
        scales = values.abs().amax(dim=-1, keepdim=True) / most
        scales.clamp_(min=torch.finfo(torch.float32).tiny)
        bytes_of_scales = scales.flatten(1).view(torch.uint8)
        return ((values / scales).to(self.wire_dtype), bytes_of_scales), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        """Make the whole matrix of all ranks' rows and scales."""
        values, bytes_of_scales = all_gather_outputs
        whole = torch.empty_like(values, dtype=param_dtype) if out is None else out
        whole.copy_(values)
        scales = bytes_of_scales.view(torch.float32).view(*self.shape[:-1], 1)
        torch.mul(whole, scales, out=whole)
        return whole, (whole,)
