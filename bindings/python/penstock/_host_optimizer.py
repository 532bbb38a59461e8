"""DeepSpeed's optimizer offload under DeepCompile: gradients get to the optimizer on the host.

The runtime reduces gradients in device memory. An optimizer on the host steps with gradients of its
own, which DeepSpeed fills in hooks that DeepCompile takes away: nothing would be trained.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

GRADIENT_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def keep_gradients_on_device(optimizer: Any) -> None:
    """Give ZeRO-3's gradients device memory to be reduced into, before the runtime learns of them.

    Parameters
    ----------
    optimizer : DeepSpeed's ZeRO optimizer
        One that is not offloaded, or of another stage, is left as it is.
    """
    if not getattr(optimizer, "offload_optimizer", False):
        return
    on_host = optimizer.grad_partitions_flat_buffer
    device = importlib.import_module("deepspeed.accelerator").get_accelerator()
    flat = torch.zeros_like(on_host, device=device.current_device_name(), pin_memory=False)
    partitions = getattr(optimizer, GRADIENT_PARTITIONS)
    for number, partition in partitions.items():
        first = partition.storage_offset() - on_host.storage_offset()
        partitions[number] = flat[first : first + partition.numel()]
    optimizer.grad_partitions_flat_buffer = flat
    optimizer.inf_or_nan_tracker = optimizer.inf_or_nan_tracker.to(flat.device)  # read from it
    device.unpin_memory(on_host)


@torch.no_grad()
def deliver(optimizer: Any) -> None:
    """Copy the gradients of an accumulation's end to where an optimizer on the host reads them.

    And their norms, whose reading makes the host wait for the copies: they run on the current
    stream.

    Parameters
    ----------
    optimizer : DeepSpeed's ZeRO optimizer
        One that is not offloaded is left as it is.
    """
    if getattr(optimizer, "offload_optimizer", False):
        for group in optimizer.fp16_groups:  # one at a time: it takes memory for a copy in fp32
            optimizer._offload_boundary_param_ids = {parameter.ds_id for parameter in group}
            optimizer._finalize_offload_gradient_accumulation()
    elif getattr(optimizer, "cpu_offload", False):
        for group, gradients in optimizer.averaged_gradients.items():
            if gradients is not None:  # else they were delivered before
                _deliver_group(optimizer, group)


def _deliver_group(optimizer: Any, group: int) -> None:
    """Deliver what this rank owns of a group of ZeRO-1 or 2; of ZeRO-1, free it on the device."""
    target = optimizer.single_partition_of_fp32_groups[group].grad
    numbers = [optimizer.get_param_id(one) for one in optimizer.params_in_partition[group]]
    places = [(number, optimizer.grad_position[number][2:]) for number in numbers]
    filled = [(number, first, count) for number, (first, count) in places if count > 0]
    gradients = [one for one in optimizer.averaged_gradients[group] if one.numel() > 0]
    # Behind the parameters' gradients there may be padding.
    for (number, first, count), gradient in zip(filled, gradients, strict=False):
        target[first : first + count].copy_(gradient.view(-1), non_blocking=True)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        optimizer.norm_for_param_grads[number] = norm
        if optimizer.check_grad_overflow:
            optimizer.update_offload_overflow_tracker(gradient)
    optimizer._release_preflattened_grad_buffers(group)
    optimizer.averaged_gradients[group] = None
    optimizer.all_grad_tensors[group] = None
