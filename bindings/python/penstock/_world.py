"""Ranks: the private process groups of an engine, and DTensors on the caller's group."""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from penstock._arguments import refuse
from penstock._axes import Axes
from penstock._errors import PenstockError
from penstock._extension import plain_of
from penstock._fork import groups_of_engines, groups_of_parent
from penstock._memory import segment_maker
from penstock._mesh import Ranks, name_of, ranks_of
from penstock._roll import Roll

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh

Layout = DTensorSpec | None  # of a sharded tensor; None: this process is alone


class World:
    """The ranks that a model is sharded over.

    Parameters
    ----------
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks; left out, all of ``torch.distributed``, or this process alone where that is not
        initialised. A mesh may have two dimensions: one over which a model is sharded, one of its
        replicas.
    device : torch.device
        Where the shards lie.
    timeout : float
        Seconds after which an operation among the ranks counts as failed.
    communicator : str
        What moves the data: "hierarchy", and "auto" on GPUs, want to know the nodes.
    ranks_per_node : int, optional
        How many ranks are a node; left out: those of a host.
    shard_dim : str
        The dimension of a mesh of two over which the model is sharded.
    axes : Axes, optional
        Those that parameters were divided over before.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are, of all replicas.
    ranks : Ranks
        What they have.
    gather, reduce : ProcessGroup, optional
        Private ones of this replica's ranks.
    between : ProcessGroup, optional
        A private one of the ranks of all replicas that have the same part, where there are several.
    is_beside_others : bool
        This process is in groups of GPUs besides the default one and its own, in which a model may
        have collectives.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        timeout: float,
        *,
        communicator: str = "auto",
        ranks_per_node: int | None = None,
        shard_dim: str = "shard",
        axes: Axes | None = None,
    ) -> None:
        self.device = device
        self.axes = axes
        self.closed = False
        self.nodes: tuple[Any, Any] | None = None  # the ranks of this node, and of this place
        self.why_no_nodes = ""
        self.gather: Any = None
        self.reduce: Any = None
        self.between: Any = None
        self._everyone: Any = None  # a private group of all ranks, for questions of this thread
        self.mesh: DeviceMesh | None = None
        self.ranks = Ranks()
        self.is_beside_others = False
        if is_alone(process_group):
            if communicator == "hierarchy":
                raise PenstockError("EINVAL", "communicator='hierarchy': this process is alone")
            self.roll = Roll(None, 0, 1, timeout)
            return
        group: Any = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(group, DeviceMesh):
            _check_group(group)
            group = DeviceMesh.from_group(group, device.type)
        self.mesh, self.ranks = group, ranks_of(group, shard_dim)
        own = [group.get_group(dim) for dim in self.ranks.dims]
        _refuse_forked(own)
        self.is_beside_others = _are_others(own)
        name, self.roll = meet(name_of(group, self.ranks), self.rank, self.size, timeout)
        self._make_groups(name)
        if communicator == "hierarchy" or (communicator == "auto" and device.type == "cuda"):
            self.nodes = self._find_nodes(name, timeout, communicator, ranks_per_node)

    @property
    def rank(self) -> int:
        """Its number among those of all replicas."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are, of all replicas."""
        return self.ranks.size

    @property
    def mesh_of_parts(self) -> Any:
        """The ranks that this replica is sharded over, as a mesh of one dimension."""
        if self.mesh is None or self.mesh.ndim == 1:
            return self.mesh
        return self.mesh[(self.mesh.mesh_dim_names or ())[self.ranks.dims[0]]]

    @property
    def among_all(self) -> tuple[int, int]:
        """Its number, and how many there are, with those along other axes."""
        place, places = (0, 1) if self.axes is None else self.axes.own
        return place * self.size + self.rank, places * self.size

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Bring together what the ranks have, a row a rank; on the CPU, beside the engine's work.

        All ranks call this alike, with a vector of the same length and dtype.
        """
        if self._everyone is None:
            return mine.unsqueeze(0)
        everyones = mine.new_empty(self.size * len(mine))
        self.roll.together(
            "comparison of the models",
            lambda: self._everyone._allgather_base(everyones, mine).wait(),
        )
        return everyones.view(self.size, -1)

    def close(self) -> None:
        """Give up the private process groups."""
        self.closed = True
        self.roll.stop()
        self.gather = self.reduce = self.between = self._everyone = self.nodes = None

    def _make_groups(self, name: str) -> None:
        """Make what the engine works on, and what is asked on.

        Operations run on threads of the engine, and so do comparisons of what NCCL was given: they
        need queues that nobody else uses, and so do the questions of this thread.
        """
        ranks, timeout = self.ranks, self.roll.timeout
        within, across = f"{name}/replica/{ranks.replica}", f"{name}/part/{ranks.part}"
        self.gather, self.reduce, self.between, self._everyone = self.roll.together(
            "process groups of the engine",
            lambda: (
                _gloo_group(f"{within}/gather", ranks.part, ranks.parts, timeout),
                _gloo_group(f"{within}/reduce", ranks.part, ranks.parts, timeout),
                _gloo_group(across, ranks.replica, ranks.replicas, timeout)
                if ranks.replicas > 1
                else None,
                _gloo_group(f"{name}/everyone", ranks.rank, ranks.size, timeout),
            ),
        )

    def _find_nodes(
        self, name: str, timeout: float, communicator: str, ranks_per_node: int | None
    ) -> tuple[Any, Any] | None:
        """Make groups of this rank's node and of its place in all nodes, if there are several."""
        try:
            found = nodes_of(self.roll.hosts[self.ranks.own_replica], ranks_per_node)
        except PenstockError as error:
            if communicator == "hierarchy":
                raise
            self.why_no_nodes = str(error)
            return None
        if found.count > 1 and found.ranks_per_node > 1:
            return self._groups_of(found, name, timeout)
        if communicator == "hierarchy":
            raise PenstockError(
                "EINVAL",
                f"communicator='hierarchy': {found.count} nodes of {found.ranks_per_node} ranks "
                "are no hierarchy; take another communicator, or say ranks_per_node",
            )
        return None

    def _groups_of(self, nodes: Nodes, name: str, timeout: float) -> tuple[Any, Any]:
        name = f"{name}/replica/{self.ranks.replica}"
        node, place = divmod(self.ranks.part, nodes.ranks_per_node)
        return self.roll.together(
            "process groups of the nodes",
            lambda: (
                _gloo_group(f"{name}/node/{node}", place, nodes.ranks_per_node, timeout),
                _gloo_group(f"{name}/place/{place}", node, nodes.count, timeout),
            ),
        )

    def layout_of(
        self, shape: torch.Size, dtype: torch.dtype, divided: DTensorSpec | None
    ) -> Layout:
        """Say how a tensor of that whole shape is sharded over the ranks, if there are any.

        It may be divided over other axes before.
        """
        if self.mesh is None:
            return None
        mesh, placements = self.mesh, self.ranks.placements
        if self.axes is not None:
            on_ranks = dict(zip(mesh.mesh_dim_names or (), placements, strict=True))
            mesh, placements = self.axes.mesh, self.axes.place(on_ranks, divided)
        stride = torch.empty(shape, device="meta").stride()
        return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


@dataclass
class Nodes:
    """Nodes of equally many ranks, which count from node to node."""

    ranks_per_node: int
    count: int


def nodes_of(hosts: list[str], ranks_per_node: int | None) -> Nodes:
    """Make nodes of the ranks' hosts, or of so many ranks each, where these are given.

    Raises
    ------
    PenstockError
        EINVAL where ranks cannot be divided so.
    """
    size = len(hosts)
    if ranks_per_node is not None:
        if ranks_per_node < 1 or size % ranks_per_node != 0:
            raise PenstockError(
                "EINVAL", f"ranks_per_node={ranks_per_node!r} does not divide {size} ranks"
            )
        return Nodes(ranks_per_node, size // ranks_per_node)
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(set(runs)) > 1 or len(runs) != len(set(hosts)):
        raise PenstockError(
            "EINVAL",
            f"ranks stand in runs of {runs} on {len(set(hosts))} hosts: a hierarchy wants equally "
            "many on each, which count from host to host",
        )
    return Nodes(runs[0], len(runs))


def is_alone(process_group: Any) -> bool:
    """Whether these ranks, which may be left out, are this process alone, without a group."""
    return process_group is None and not _joins_default()


def _joins_default() -> bool:
    """Whether there is a default group; where this process was started as one of several, make it.

    torchrun sets the variables, as FSDP2 too has it.
    """
    if not dist.is_available() or dist.is_initialized():
        return dist.is_available()
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return False
    try:
        dist.init_process_group()
    except (ValueError, RuntimeError) as error:
        raise PenstockError(
            "EINVAL",
            f"WORLD_SIZE={size} says that this process is one of several, and torch.distributed "
            f"cannot join them: {error}. Call init_process_group before shard, or unset WORLD_SIZE "
            "to train alone",
        ) from error
    return True


def _check_group(group: Any) -> None:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise PenstockError("EINVAL", "this process is not a rank of the process group given")
    if not isinstance(group, dist.ProcessGroup):
        refuse(
            "process_group",
            group,
            "give what torch.distributed.new_group returns, or a DeviceMesh of one dimension",
        )


def as_sharded(
    local: torch.Tensor, layout: Layout, like: torch.Tensor | None = None
) -> torch.Tensor:
    """Wrap the rows of this rank as the whole tensor, where there are ranks.

    `like` has the same shape and lies at the begin of its storage; it has to be given where `local`
    does not: a wrapper has no storage, and where it claims to begin elsewhere in it torch can
    neither save nor copy it.
    """
    if layout is None:
        return local
    wrapper = DTensor(local if like is None else like, layout, requires_grad=False)
    wrapper._local_tensor = local
    return wrapper


_PLAIN = (torch.Tensor, torch.nn.Parameter)  # most of them


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a sharded tensor that lie on this rank, as a plain tensor."""
    if type(tensor) in _PLAIN:
        return tensor
    return plain_of(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def stream_of(device: torch.device) -> int:
    """Return the native handle of the stream that is current on a GPU; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


_made: defaultdict[str, int] = defaultdict(int)


def _are_others(own: list[Any]) -> bool:
    """Whether there are groups of GPUs in this process, but for the default one and its own."""
    known = [dist.group.WORLD, *own]
    return any(
        group not in known and group.size() > 1 and _launches_on_gpus(group)
        for group in dist.distributed_c10d._world.pg_map
    )


def _launches_on_gpus(group: Any) -> bool:
    kinds = dict(kind.partition(":")[::2] for kind in dist.get_backend_config(group).split(","))
    return kinds.get("cuda", "gloo") != "gloo"  # which works on the host


def _refuse_forked(groups: list[Any]) -> None:
    for group in groups:
        if group in groups_of_parent:
            raise PenstockError(
                "ESTATE",
                f"process {os.getpid()} was forked from one that had joined the process group "
                f"{group.group_name!r}, without its threads: call this in that one, or start this "
                "process by spawn and join a group in it",
            )


def meet(ranks: str, rank: int, size: int, timeout: float) -> tuple[str, Roll]:
    """Name an engine of ranks that have this name, once all are here (a collective)."""
    name = f"penstock/{ranks}/{_made[ranks]}"
    roll = Roll(_connection_of(f"{name}/roll"), rank, size, timeout)
    roll.meet()
    _made[ranks] += 1
    return name, roll


def private_groups(name: str, roll: Roll, uses: Sequence[str]) -> list[Any]:
    """Make gloo groups of the engine of this name, a group a use, beside torch.distributed's.

    They end with their last user, also when the caller's groups were destroyed before.
    """
    return roll.together(
        "process groups of the engine",
        lambda: [_gloo_group(f"{name}/{use}", roll.rank, roll.size, roll.timeout) for use in uses],
    )


_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _connection_of(name: str) -> Any:
    """Return a part of the default store, by a connection on which nobody else waits."""
    store: Any = dist.distributed_c10d._get_default_store()
    if store not in _connections:
        _connections[store] = store.clone()
    return dist.PrefixStore(name, _connections[store])


def _gloo_group(name: str, rank: int, size: int, timeout: float) -> Any:
    """Make a gloo group of those who give this name."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    backend = dist.ProcessGroupGloo(store, rank, size, _gloo_options(timeout))
    private = dist.ProcessGroup(store, rank, size)
    private._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    private._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    private._set_group_name(dist.GroupName(name))
    groups_of_engines.add(private)
    return private


def _gloo_options(timeout: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [
        gloo.create_device(interface=name) for name in interfaces.split(",") if name
    ]
    options._devices = options._devices or [gloo.create_default_device()]
    # An engine has one collective at a time under way in a group. And where the second thread of a
    # group cannot be started, the first one ends the process.
    options._threads = 1
    return options


# ---- DeepCompile ---------------------------------------------------------------------------------


@dataclass
class DeepCompileWorld:
    """Ranks of a DeepCompile runtime: device, private process groups, memory that peers can map."""

    rank: int
    size: int
    device: torch.device
    stream: int
    timeout: float
    gather: Any
    reduce: Any
    questions: Any
    segments: Callable[[int], torch.Tensor] | None
    roll: Roll


_TIMEOUT = 600.0  # seconds, where no group of the caller's has one


def world_of(group: Any) -> DeepCompileWorld:
    """Make private process groups of the ranks of `group` (None: all, or this process alone).

    Their operations fail after the time that those of `group` do.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        device = _device(("cpu",))
        segments = segment_maker(device)
        roll = Roll(None, 0, 1, _TIMEOUT)
        return DeepCompileWorld(
            0, 1, device, stream_of(device), _TIMEOUT, None, None, None, segments, roll
        )
    group = group if group is not None else dist.group.WORLD
    rank, size = group.rank(), group.size()
    if rank < 0:
        raise PenstockError("EINVAL", "this process is not a rank of the process group given")
    device = _device(tuple(kind.type for kind in group._device_types))
    _refuse_forked([group])
    timeout = _timeout_of(group, device)
    name, roll = meet(group.group_name, rank, size, timeout)
    gather, reduce, questions = private_groups(name, roll, ("gather", "reduce", "questions"))
    segments = segment_maker(device)
    return DeepCompileWorld(
        rank, size, device, stream_of(device), timeout, gather, reduce, questions, segments, roll
    )


def _timeout_of(group: Any, device: torch.device) -> float:
    options = getattr(group._get_backend(device), "options", None)
    return _TIMEOUT if options is None else options._timeout.total_seconds()


def _device(kinds: tuple[str, ...]) -> torch.device:
    """Return this rank's GPU where the group serves GPUs, else the CPU."""
    if "cuda" in kinds and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
