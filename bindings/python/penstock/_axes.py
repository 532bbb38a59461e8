"""Parameters that are DTensors already, over other axes of a mesh: tensor parallelism, experts.

Each rank shards the part that it has of such a parameter. What optimizers and checkpoints have is a
DTensor on all of the axes, and what modules have around their use is the DTensor of before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from penstock import _C
from penstock._arguments import Options, refuse

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that a model's DTensors were divided over before they are sharded.

    Attributes
    ----------
    mesh : DeviceMesh
        Of these axes and of the ranks that the model is sharded over.
    names : tuple of str
        Those of the axes.
    """

    mesh: DeviceMesh
    names: tuple[str, ...]

    def place(
        self, on_ranks: Mapping[str, Placement], divided: DTensorSpec | None
    ) -> tuple[Placement, ...]:
        """Return how a parameter lies on the mesh.

        Parameters
        ----------
        on_ranks : dict of str and Placement
            On the dimensions of the ranks, by name.
        divided : DTensorSpec, optional
            What it was before; None: a plain tensor, which is the same along the axes.
        """
        on_axes = dict(zip(self.names, _on_axes(self.names, divided), strict=True))
        placed: list[Placement] = []
        parts = 1
        for name, size in zip(self._dims[::-1], self.mesh.shape[::-1], strict=True):
            placement = {**on_axes, **on_ranks}[name]
            if placement == Shard(0) and name in on_axes:
                parts *= size
            elif placement == Shard(0) and parts > 1:
                # DTensors are divided along one dimension after the other; it was the other way.
                placement = _StridedShard(0, split_factor=parts)
            placed.append(placement)
        return tuple(placed[::-1])

    @property
    def _dims(self) -> tuple[str, ...]:
        return self.mesh.mesh_dim_names or ()

    def replicas_of(self, parameter: torch.Tensor) -> list[Any]:
        """Return the groups along which a parameter, or another tensor, is the same."""
        divided = parameter._spec if isinstance(parameter, DTensor) else None
        on_axes = zip(self.names, _on_axes(self.names, divided), strict=True)
        return [self.mesh.get_group(name) for name, p in on_axes if p.is_replicate()]

    def is_same(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is the same along all of the axes."""
        return len(self.replicas_of(parameter)) == len(self.names)

    @property
    def own(self) -> tuple[int, int]:
        """The place of this rank along the axes, from one to the next, and how many there are."""
        place, count = 0, 1
        for name in self.names:
            group = self.mesh.get_group(name)
            place = place * dist.get_world_size(group) + dist.get_rank(group)
            count *= dist.get_world_size(group)
        return place, count

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Bring together what the ranks along the axes have, at their places in a new dimension.

        All of them call this alike, with tensors of one shape and dtype.
        """
        found = mine.unsqueeze(0).to(self.mesh.device_type)
        for name in reversed(self.names):
            group = self.mesh.get_group(name)
            everyones = found.new_empty(dist.get_world_size(group) * len(found), *mine.shape)
            dist.all_gather_into_tensor(everyones, found, group=group)
            found = everyones
        return found.to(mine.device)


def _on_axes(names: tuple[str, ...], divided: DTensorSpec | None) -> tuple[Placement, ...]:
    if divided is None:
        return (Replicate(),) * len(names)
    own = dict(zip(divided.mesh.mesh_dim_names or (), divided.placements, strict=True))
    return tuple(own.get(name, Replicate()) for name in names)


# ---- which there are -----------------------------------------------------------------------------


def dims_divided(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the names of dimensions of meshes that parameters are DTensors over.

    Each comes with the name of the first such parameter.
    """
    found: dict[str, str] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            for dim in parameter.device_mesh.mesh_dim_names or ():
                found.setdefault(dim, name)
    return found


def find_axes(parameters: Mapping[str, nn.Parameter], ranks: Any, options: Options) -> Axes | None:
    """Find the axes that some of a model's parameters are divided over, if there are any.

    Parameters
    ----------
    parameters : dict of str and nn.Parameter
        By name; DTensors or plain ones.
    ranks : ProcessGroup or DeviceMesh, optional
        Over which the model is to be sharded, as `shard` was given them.
    options : Options
        As `shard` was called.

    Returns
    -------
    Axes, optional

    Raises
    ------
    PenstockError
        EINVAL: the ranks are no other dimension of one mesh, or an option cannot be had with it.
    """
    divided = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    if not divided:
        return None
    axes: dict[str, DeviceMesh] = {}
    for name, parameter in divided.items():
        _collect(axes, name, parameter.device_mesh)
        _refuse_empty(name, parameter)
    name = next(iter(divided))
    if options.budget is not None:
        options.refuse_budget(
            f"parameter {name!r} is a DTensor over {tuple(axes)}, along which ranks do not agree "
            "on what was measured: leave memory= out, and name the blocks by checkpoint=",
        )
    if options.offloads_shards:
        refuse("offload", options.offload, f"parameter {name!r} is a DTensor: leave it out")
    joined = _joined(ranks, axes, name)
    order = joined.mesh_dim_names or ()
    for name, parameter in divided.items():
        mesh = parameter.device_mesh
        if tuple(axis for axis in order if axis in _dims_of(mesh)) != mesh.mesh_dim_names:
            _refuse_parameter(name, mesh, f"its dimensions stand in another order than in {order}")
    return Axes(joined, tuple(axis for axis in order if axis in axes))


def _collect(axes: dict[str, DeviceMesh], name: str, mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names
    if not names:
        _refuse_parameter(name, mesh, "its dimensions have no names: give it mesh_dim_names=")
    for axis, one in _dims_of(mesh).items():
        if axes.setdefault(axis, one) != one:
            _refuse_parameter(name, mesh, f"another parameter's mesh has other ranks as {axis!r}")


def _dims_of(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    names = mesh.mesh_dim_names or ()
    return {name: mesh[name] if mesh.ndim > 1 else mesh for name in names}


def _refuse_empty(name: str, parameter: DTensor) -> None:
    """Raise if a rank has no part of it: there is no gradient of none."""
    mesh, left = parameter.device_mesh, list(parameter.shape)
    for count, placement in zip(mesh.shape, parameter.placements, strict=True):
        if isinstance(placement, Shard):
            whole = left[placement.dim]
            left[placement.dim] = whole - -(-whole // count) * (count - 1)  # the last rank's
    if min(left) <= 0:
        _refuse_parameter(
            name, mesh, f"some rank has no part of its shape {tuple(parameter.shape)}"
        )


def _refuse_parameter(name: str, mesh: DeviceMesh, why: str) -> NoReturn:
    refuse("model", mesh, f"parameter {name!r} is a DTensor on this mesh, and {why}")


def _joined(ranks: Any, axes: dict[str, DeviceMesh], name: str) -> DeviceMesh:
    """Return the mesh of the ranks and the axes."""
    try:
        return _join(ranks, axes)
    except (KeyError, RuntimeError) as error:
        refuse(
            "mesh",
            ranks,
            f"parameter {name!r} is a DTensor over {tuple(axes)}, and is sharded over another "
            "dimension of one mesh with that, as shard_dim='dp' of mesh=mesh where its own is 'tp' "
            f"({error.args[0]})",
        )


def _join(ranks: Any, axes: dict[str, DeviceMesh]) -> DeviceMesh:
    own = _dims_of(ranks) if isinstance(ranks, DeviceMesh) else {}
    if not own:
        raise KeyError("these ranks are no mesh with names")
    shared = axes.keys() & own.keys()
    if shared:
        raise KeyError(f"the two have {min(shared)!r} in common")
    # Of equal meshes torch may give a DTensor any, also that of another whole. Dimensions that
    # `_unflatten` has made are none of the whole's.
    whole = ranks._get_root_mesh()
    order = list(whole.mesh_dim_names or ())  # torch takes them in no other
    for axis, mesh in axes.items():
        own[axis] = whole[axis] if axis in order else mesh
        if own[axis] != mesh:
            raise KeyError(f"that mesh has other ranks as {axis!r}")
    known = [own[name] for name in order if name in own]
    others = [mesh for name, mesh in own.items() if name not in order]
    return DeviceMesh._concatenate([*others, *known])


# ---- parameters ----------------------------------------------------------------------------------


def block_of(shape: torch.Size, divided: DTensorSpec | None) -> tuple[slice, ...]:
    """Return which part of a whole tensor this rank has, by dimension; all of it if undivided."""
    sizes, offsets = tuple(shape), (0,) * len(shape)
    if divided is not None:
        sizes, offsets = compute_local_shape_and_global_offset(
            shape, divided.mesh, divided.placements
        )
    return tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))


def make_divided(part: nn.Parameter, divided: DTensorSpec) -> nn.Parameter:
    """Make the parameter that modules have of this rank's part of it, in the part's memory."""
    shape = divided.shape
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, stride, part.dtype)
    memory = part.detach()
    spec = DTensorSpec(divided.mesh, divided.placements, tensor_meta=meta)
    made = nn.Parameter(DTensor(memory, spec, requires_grad=False), part.requires_grad)
    made._local_tensor = memory  # type: ignore[attr-defined]
    return made


def watch_divided(arrived: _C.Arrived, parameter: nn.Parameter, part: nn.Parameter) -> None:
    """Give each gradient of the parameter to this rank's part of it, and note it.

    Where ranks along an axis have summands of it they add them up here, in the backward.
    """
    number = arrived.add()

    @torch.no_grad()
    def take(parameter: Any) -> None:
        gradient, parameter.grad = parameter.grad, None
        own = gradient.redistribute(placements=parameter.placements).to_local()
        own = own.wait() if isinstance(own, AsyncCollectiveTensor) else own
        own = own.to(part.grad_dtype)
        part.grad = own if part.grad is None else part.grad + own
        arrived.note(number)

    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch registers hooks of no other ones
    parameter.register_post_accumulate_grad_hook(take)
    parameter.requires_grad_(is_trained)
