"""Meshes: which of a model's ranks have which shards, and which replica they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from penstock._arguments import refuse

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh

_DEFAULTS = {"shard_dim": "shard", "replicate_dim": "replicate"}


@dataclass(frozen=True)
class Mesh:
    """What `shard` is to use of a device mesh.

    Attributes
    ----------
    mesh : DeviceMesh, optional
        Of one dimension or several.
    shard_dim, replicate_dim : str
        The names of those of several that are used.
    """

    mesh: Any
    shard_dim: str
    replicate_dim: str

    def choose(self, process_group: Any, device: torch.device, divided: Mapping[str, str]) -> Any:
        """Return the ranks that share the model, of those that `shard` was given.

        Parameters
        ----------
        process_group : ProcessGroup or DeviceMesh, optional
            What there is beside it.
        device : torch.device
            Where the model is.
        divided : dict of str and str
            Dimensions that parameters are DTensors over, each with the name of such a parameter.

        Returns
        -------
        ProcessGroup or DeviceMesh, optional
            A mesh has one dimension, or two if there are replicas. None: all there are.

        Raises
        ------
        PenstockError
            EINVAL: it is no mesh of the model's devices with these names.
        """
        if self.mesh is None:
            self._check_no_names("there is no mesh=")
            _check_group_mesh(process_group, device)
            return process_group
        if process_group is not None:
            refuse("mesh", self.mesh, "there is a process_group= too: give one of the two")
        if not dist.is_available() or not isinstance(self.mesh, DeviceMesh):
            refuse("mesh", self.mesh, "give what torch.distributed.init_device_mesh returns")
        _check_device("mesh", self.mesh, device)
        if self.mesh.ndim > 1:
            return self._own(divided)
        self._check_no_names("the mesh has one dimension, and all its ranks share the model")
        return self.mesh

    def _own(self, divided: Mapping[str, str]) -> Any:
        """Return the dimensions of several that are named: others are those of DTensors."""
        names = self.mesh.mesh_dim_names
        if not names:
            refuse("mesh", self.mesh, "its dimensions have no names: give it mesh_dim_names=")
        if self.shard_dim == self.replicate_dim:
            refuse("replicate_dim", self.replicate_dim, "that is shard_dim too: name the other one")
        for argument, default in _DEFAULTS.items():
            name = getattr(self, argument)
            if name in divided:
                is_one = f"parameter {divided[name]!r} is a DTensor over that already"
                refuse(argument, name, f"{is_one}: name another dimension of {names}")
            if name not in names and (argument == "shard_dim" or name != default):
                alone = f"or give the one of the ranks alone, as mesh[{names[0]!r}]"
                refuse(argument, name, f"its dimensions are {names}: name one of them, {alone}")
        own = tuple(name for name in names if name in (self.shard_dim, self.replicate_dim))
        for name, size in zip(names, self.mesh.shape, strict=True):
            if name not in own and name not in divided and size > 1:
                without = f"or leave it out, as mesh[{', '.join(map(repr, own))}]"
                refuse(
                    "mesh",
                    self.mesh,
                    f"no parameter is a DTensor over its dimension {name!r}: name it by "
                    f"replicate_dim= where it counts replicas, {without}",
                )
        return self.mesh[own]

    def _check_no_names(self, why: str) -> None:
        own = self.mesh.mesh_dim_names if self.mesh is not None else None
        for argument, default in _DEFAULTS.items():
            name = getattr(self, argument)
            if name != default and (argument, own) != ("shard_dim", (name,)):
                refuse(argument, name, f"{why}: leave it out")


def _check_group_mesh(group: Any, device: torch.device) -> None:
    if not dist.is_available() or not isinstance(group, DeviceMesh):
        return
    if group.ndim != 1:
        refuse("process_group", group, "give one of its dimensions, as mesh['dp'], or mesh=")
    _check_device("process_group", group, device)


def _check_device(name: str, mesh: DeviceMesh, device: torch.device) -> None:
    if mesh.device_type != device.type:
        refuse(name, mesh, f"the model is on {device}: give a mesh of its devices")
    if mesh.get_coordinate() is None:
        refuse(name, mesh, "this process is not a rank of it")


@dataclass(frozen=True)
class Ranks:
    """The ranks of one model: `replicas` times as many as it has parts.

    They count from part to part of a replica, then from replica to replica.

    Attributes
    ----------
    part, parts : int
        Which rows this rank has, and into how many parts they are divided.
    replica, replicas : int
        Which replica it belongs to, and how many there are.
    placements : tuple of Placement
        Of parameters, on the mesh.
    dims : tuple of int
        The dimensions of the mesh: that of the parts, then that of the replicas if there is one.
    """

    part: int = 0
    parts: int = 1
    replica: int = 0
    replicas: int = 1
    placements: tuple[Placement, ...] = (Shard(0),)
    dims: tuple[int, ...] = (0,)

    @property
    def rank(self) -> int:
        """Its number among all."""
        return self.replica * self.parts + self.part

    @property
    def size(self) -> int:
        """How many there are."""
        return self.replicas * self.parts

    @property
    def own_replica(self) -> slice:
        """Those of this rank's replica among all."""
        return slice(self.replica * self.parts, (self.replica + 1) * self.parts)


def ranks_of(mesh: DeviceMesh, shard_dim: str) -> Ranks:
    """Find this process among the ranks of a mesh.

    Parameters
    ----------
    mesh : DeviceMesh
        Of one dimension, over which the model is sharded, or of two.
    shard_dim : str
        Which of two that is; the other one has the replicas.

    Returns
    -------
    Ranks
    """
    if mesh.ndim == 1:
        return Ranks(mesh.get_local_rank(), mesh.size())
    dim = (mesh.mesh_dim_names or ()).index(shard_dim)
    other = 1 - dim
    placements: list[Placement] = [Replicate(), Replicate()]
    placements[dim] = Shard(0)
    return Ranks(
        mesh.get_local_rank(dim),
        mesh.size(dim),
        mesh.get_local_rank(other),
        mesh.size(other),
        tuple(placements),
        (dim, other),
    )


def name_of(mesh: DeviceMesh, ranks: Ranks) -> str:
    """Return a name that all ranks of the mesh have for it, and no other ranks."""
    if mesh.ndim == 1:
        return str(mesh.get_group().group_name)
    by_replica = mesh.mesh.permute(ranks.dims[::-1]).tolist()
    return f"mesh/{hashlib.sha256(repr(by_replica).encode()).hexdigest()[:16]}"
