"""`shard`: an ordinary model becomes a sharded one, in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn

from penstock import _agree, _asked, _checkpoint, _checks, _hooks, _meta, _methods, _shown, _state
from penstock._arguments import Options, check_model, refuse
from penstock._axes import dims_divided, find_axes
from penstock._blocks import Blocks, Named, find_beside, find_blocks, select_blocks
from penstock._checkpoint import Checkpointed, Way
from penstock._engine import Engine, engine_of, is_sharded
from penstock._errors import PenstockError
from penstock._float8 import find_extension
from penstock._keeping import Keeping
from penstock._mesh import Mesh
from penstock._native import fill_shard, make_shards, open_native
from penstock._units import Dtypes, Group, Parameter, Unit
from penstock._world import World, is_alone

Model = TypeVar("Model", bound=nn.Module)

_BUCKET_BYTES = 8 << 20
_logger = logging.getLogger("penstock")


def shard(
    model: Model,
    *,
    stage: int = 3,
    blocks: Blocks = None,
    device: torch.device | str | int | None = None,
    process_group: Any = None,
    mesh: Any = None,
    shard_dim: str = "shard",
    replicate_dim: str = "replicate",
    communicator: str = "auto",
    ranks_per_node: int | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    prefetch_ahead: int = 2,
    prefetch_bytes: int | None = None,
    bucket_bytes: int = _BUCKET_BYTES,
    part_bytes: int | None = None,
    timeout: float | timedelta = 600.0,
    verify: bool = True,
    time_waits: bool = False,
    broadcast: bool = False,
    checkpoint: Blocks = None,
    forward_methods: str | Iterable[str] = (),
    memory: str | int | float | None = None,
    offload: str | Sequence[str] | None = None,
    keep_copies: bool = False,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Model:
    """Shard a model over its ranks, in place.

    Afterwards ``model.parameters()`` are DTensors, ``Shard(0)``, of the original shapes. Build
    optimizers from them. In the forward and backward of a block its modules hold the whole
    parameters; what a forward returns of them is a copy. All ranks call this alike, with equal
    parameter values: every rank keeps its rows. ``torch.distributed`` is initialised where torchrun
    has started this process as one of several; where it is not, this process is the only rank, and
    parameters are plain tensors.

    Some parameters may be DTensors already, over other dimensions of the mesh: of
    ``parallelize_module`` (``mesh=mesh, shard_dim="dp"`` where that was given ``mesh["tp"]``), or
    of experts. Each rank shards the part that it has of them. Modules have the DTensors of before
    around their use; outside, all parameters are DTensors on all of these dimensions, placed as
    FSDP2 places them. Plain parameters are the same along the other dimensions, as their
    gradients have to be. `memory`, and ``checkpoint="auto"``, are refused then, and `step` captures
    nothing.

    Parameters with hooks of a gather (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``) travel as
    FSDP2 has them travel: what the first makes of this rank's rows, once behind each update; and
    modules have what the second makes of that. So a model that torchao's
    ``convert_to_float8_training`` has converted for FSDP2 (``enable_fsdp_float8_all_gather=True``)
    trains as it is, with a byte an element on its way; behind each step call
    ``precompute_float8_dynamic_scale_for_fsdp``, else ranks agree on one scale after the other.
    The rows' shape and a byte an element are what a hook may send. Shards, and what ``state_dict``
    has, stay in their own dtype. ``offload=`` is refused, `step` captures nothing, and a process
    alone computes with plain parameters.

    A model larger than the memory is built on the meta device (``with torch.device("meta")``). Its
    shards are allocated here, and get values before the first forward: from files, by
    `penstock.load`, ``load_state_dict`` or ``torch.distributed.checkpoint``; or by
    ``model.to_empty(device=...)``, which allocates buffers and leaves shards as they are, and then
    by what initialises its modules. Each rank then draws its own rows: on GPUs torch makes them
    differ where ranks have one seed, on CPUs give each rank another seed (those along
    another dimension of a mesh the same one). Optimizers may be built before that. No values are
    there to compare, or to take from rank 0.

    A backward that fails leaves each ``.grad`` as it was before, or None where reductions had added
    to it by then: the log names those, and ``penstock.stats(model).broken_backwards`` counts such
    backwards. Gradients that `no_sync` kept are lost, too. Call ``zero_grad()`` and begin the
    accumulation anew, on all ranks.

    Parameters may be frozen and unfrozen between passes, on all ranks alike. The first forward
    after a parameter is unfrozen that was frozen until then takes as long as this call.

    Parameters
    ----------
    model : nn.Module
        On the CPU, a GPU or the meta device, not sharded yet. Blocks may not change inputs in
        place where several of them get gradients, and lists and dicts among their arguments may be
        copies to them. On a GPU the stream that is current now is the
        one to train on; one of priority -1 is best, as sums and copies of gradients then take what
        the compute leaves.
    stage : int
        1: optimizer states are sharded, and gradients when they are reduced; 2: gradients travel
        while the backward runs; 3: parameters are sharded too, and whole only around their use. In
        stages 1 and 2 over "ce" shards that are gathered in their own dtype lie within the whole
        parameters. Stage 3 with `memory` becomes stage 2 by itself where that takes no more.
    blocks : str, class, module, iterable of these, or callable, optional
        What is gathered as one: names or patterns of modules, classes, modules, or a predicate over
        (name, module). Left out: elements of ``nn.ModuleList``, or the layers that repeat. Large
        modules beside them (an embedding, a head) are gathered each by itself.
    device : torch.device or str, optional
        Where the shards of a model on the meta device lie; left out: on the current GPU, or on the
        CPU where torch finds none.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks, as a group or a mesh of one dimension; left out: all.
    mesh : DeviceMesh, optional
        In place of it: a mesh of one dimension, or of several, of which ``replicate_dim``, if it
        is there, counts replicas of the model, and ``shard_dim`` the ranks that each is sharded
        over; over the rest parameters are DTensors already. Gathers and
        reductions stay within a replica; the sums of each bucket of gradients are all-reduced
        between replicas behind that, in fp32, so that gradients are means over all ranks.
        Parameters are placed as ``Replicate()`` and ``Shard(0)``, as FSDP2 has them on such a mesh.
        In texts ranks count replica by replica.
    shard_dim, replicate_dim : str
        The names of these dimensions of a mesh of several.
    communicator : str
        What moves the data of GPUs: "ce", their copy engines, which takes nothing from the compute
        and wants all ranks on one machine; "nccl"; "crossover": "ce", and "nccl" for what is small,
        which takes memory of NCCL's; "hierarchy": "ce" within each of several nodes, "nccl"
        between them (on the CPU: groups of the ranks), its sums in another order; "auto": "ce"
        where all ranks are on one machine and it is possible, "hierarchy" where they are on several
        and it is possible within each, else "nccl". The log and `penstock.stats` say which one
        serves.
    ranks_per_node : int, optional
        How many ranks, which follow each other, are a node to "hierarchy" and "auto"; left out:
        those of one host.
    param_dtype : torch.dtype, optional
        Of gathered parameters and of the blocks' floating-point inputs; left out: as the shards.
        Those of batch norms that keep statistics stay as they are, as the statistics do.
        ``torch.float8_e4m3fn``: bfloat16, but matrices of blocks are gathered in float8, a byte an
        element and for each row a scale of 4 bytes, and become bfloat16 in front of each use. This
        loses what float8 cannot hold: each element keeps 4 bits, those far below the largest of
        their row fewer. Shards and gradients lose nothing. Matrices are parameters, stacks of
        matrices too, whose last dimension has 64 elements or more; embeddings, what lies beside
        the blocks, and a process alone have bfloat16.
    reduce_dtype : torch.dtype, optional
        In which gradients travel (they are summed in fp32); left out: as the gathered parameters.
    output_dtype : torch.dtype, optional
        Of the floating-point outputs of the model; left out: as they are computed.
    prefetch_ahead : int
        How many groups are gathered ahead of their use, from the second pass on.
    prefetch_bytes : int, optional
        At most so many bytes gathered or in flight; left out: no limit. Traces tell what waits for
        that.
    bucket_bytes : int
        Gradients of a rank's part that travel together.
    part_bytes : int, optional
        At most so many bytes of a rank's part of a block's gradients travel at once, so that memory
        for gradients on their way stays small; left out: what most blocks have, up to 32 MiB. Whole
        blocks are some percent faster where a step is short, as fewer operations carry them.
    timeout : float or timedelta
        Seconds after which an operation among the ranks fails with PenstockError.
    verify : bool
        Whether ranks compare each operation before they begin it; those of NCCL some milliseconds
        after. Without it, ranks that take different paths through the model may crash or mix up
        data.
    time_waits : bool
        On GPUs: whether `penstock.stats` has how long the compute stream waits for
        communication, which costs two events a wait. In a `penstock.trace` they are taken anyway.
    broadcast : bool
        Whether all ranks begin with the parameters and buffers of rank 0. Without it parameters
        that are not equal are an error, and buffers are each rank's own. On the meta device
        nothing is compared or broadcast.
    checkpoint : str, class, module, iterable of these, or callable, optional
        Which blocks recompute their activations in the backward instead of keeping them, by
        ``torch.utils.checkpoint`` around each: named as by ``blocks=``; left out: none.
        "selective": all blocks keep what matrix products, convolutions and attention without
        dropout put out, and recompute the rest, which takes little time. In one that is not
        compiled and writes to such an output in place all is recomputed. "auto": blocks keep their
        activations, all or selectively, as far as ``memory`` goes, and begin with recomputing them;
        with ``offload="activations"``, on a GPU, those whose copies hide beside compute offload
        them. Blocks that are called with more than was measured are recomputed, and after some such
        passes it is decided anew. Blocks are compiled by ``block.compile()``, before or after this
        call; they recompute what the compiler finds that gradients need, and on a GPU torch draws
        their random numbers from another generator than those of blocks that recompute nothing.
        What the model checkpoints itself goes on so, and a warning says that nothing is done for it
        here.
    forward_methods : str or iterable of str
        Names of methods of the model or of blocks in which parameters are whole, as in a forward
        of theirs: ``generate`` where it calls parts of the model, an encoder's part alone. What
        is called under ``torch.no_grad`` is no step of the training.
    memory : str, int or float, optional
        What may be taken to save time: by groups that are gathered further ahead (then
        ``prefetch_ahead`` is where it begins) or stay gathered from forward to backward, and with
        ``checkpoint="auto"`` by activations that are kept, or on their way. Bytes, or a fraction of
        the device's memory: what torch's allocator may hold at the peak of a step, of all that
        it is for, Penstock's memory too. "auto": what the device has free in the measured step, but
        for 10 % of its memory, as torch's allocator cannot use all that is free. Left out: "auto"
        with ``checkpoint="auto"``; else nothing is taken. The third step, as an optimizer of
        torch's or Penstock's ends them, is measured; where not all activations can be kept or
        offloaded, two more follow, in which one block of each kind recomputes selectively. Then the
        ranks decide alike, by the least memory and the slowest rank, for what saves most time; the
        log says what. Where stage 2 takes no more memory than what stays in stage 3, the model goes
        on in stage 2, from the next step on that begins without a trace, a graph whose backward is
        to come, or somebody who holds rows (of ``state_dict()``, ``to_local()``); where steps grow
        so that it does not fit any more, it goes back to stage 3 for good. On GPUs torch's peak
        (``torch.cuda.max_memory_allocated``) begins anew with what is measured. On the CPU nothing
        is measured of memory: give bytes there, which all of it may take, for
        ``checkpoint="auto"`` too.
    offload : str or list of them, optional
        "optimizer": shards, their gradients and the optimizer's states lie in the host's memory,
        pinned where the model is on a GPU, and the optimizer works there. The GPU has a copy of the
        shards in ``param_dtype``, which comes up a group at a time while the next forward goes on;
        gradients go down behind their reductions, and the end of a backward waits for them.
        "parameters": the same, and no copy stays: each gather brings up its part of the shards, a
        group ahead, so that the GPU has what is gathered, and memory of about three groups. Ranks
        need a process group for CPUs too, as ``"cpu:gloo,cuda:nccl"``, where norms are asked for.
        The optimizer has ``torch.get_num_threads()`` threads, which is one under torchrun unless
        ``OMP_NUM_THREADS`` says another number.
        On the CPU it trains as without. Neither ``memory``, ``checkpoint="auto"`` nor DTensors of
        before are for such models, nor is ``in_backward`` of `AdamW`, and `step` captures nothing.
        "activations": the blocks that ``checkpoint`` names, or all, or of ``checkpoint="auto"``
        those that it chooses by what the link moves, recompute nothing, or, of those that are
        compiled, with ``checkpoint="selective"`` or where "auto" says so, what is not dear: what
        they save for the backward, but for inputs, outputs and parameters, is copied to pinned
        memory of the host
        behind their forward, and comes back one block ahead of the backward. The device holds that
        of two blocks at a time: compute waits where copies take longer than the next of these
        blocks, and the last one's stay. A rank takes at most its share of what the host has
        available at the first copy, but for 10 % of its memory; what is more stays on the device,
        with a warning. `step` captures nothing.
    keep_copies : bool
        Where shards are gathered in another dtype (``param_dtype``): whether each rank keeps its
        rows in that, too, cast once behind an update: a step is some percent shorter. Without,
        each gather casts them, a group ahead, in memory of about three groups; FSDP2 does so. What
        is a byte an element, made by hooks or as float8, stays anyway.
    ignored_params : iterable of nn.Parameter, optional
        Parameters of the model that are left alone: neither sharded nor moved, compared or
        broadcast, and their gradients are each rank's own.

    Returns
    -------
    nn.Module
        The same model.

    Raises
    ------
    PenstockError
        EINVAL: an unknown stage, a parameter that cannot be sharded, blocks that match nothing.
        ESTATE: sharded already, or an optimizer was built before. EMISMATCH: the ranks' models
        differ, in their values too. ENOMEM: a rank has no memory. EUNSUPPORTED: the communicator
        that was asked for cannot serve. EPEER, ETIMEDOUT: a rank has gone, or does not come. The
        model is as it was before, unless the text says that it is lost.
    """
    check_model(model)
    on_mesh = Mesh(mesh, shard_dim, replicate_dim)
    options = Options(
        stage=stage,
        communicator=communicator,
        ranks_per_node=ranks_per_node,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=output_dtype,
        prefetch_ahead=prefetch_ahead,
        prefetch_bytes=prefetch_bytes,
        bucket_bytes=bucket_bytes,
        part_bytes=part_bytes,
        timeout=timeout,
        verify=verify,
        time_waits=time_waits,
        broadcast=broadcast,
        checkpoint=checkpoint,
        memory=memory,
        offload=offload,
        keep_copies=keep_copies,
    )
    _check(model)
    parameters = _checks.find_parameters(model, ignored_params)
    _checks.check_no_optimizer(parameters)
    lies_on = _checks.check_device(parameters)
    device = _meta.choose_device(device, lies_on)
    is_meta = lies_on.type == "meta"
    options.check(device)
    ranks = on_mesh.choose(process_group, device, dims_divided(parameters))
    axes = find_axes(parameters, ranks, options)
    found = find_blocks(model, blocks)
    units = _make_units(model, found, parameters, options, alone=is_alone(ranks))
    methods = _methods.find_methods(forward_methods, units)
    checkpointed, keeping = _find_checkpointed(model, found, units, options)
    groups = [group for unit in units for group in unit.groups]
    with ExitStack() as undo:
        world = World(
            ranks,
            device,
            options.seconds,
            communicator=communicator,
            ranks_per_node=ranks_per_node,
            shard_dim=shard_dim,
            axes=axes,
        )
        undo.callback(world.close)
        _agree.check_meta(world, is_meta)
        runtime, native = open_native(type(model).__name__, options, world, units)
        undo.callback(runtime.destroy)
        undo.callback(native.destroy)
        if options.broadcast and not is_meta:
            _agree.broadcast(world, model, parameters)
        elif not is_meta:
            _agree.check_equal(world, parameters)
        parameters.clear()  # each goes when its shard is filled
        make_shards(native, world, groups)
        _fill_shards(world, groups)
        undo.pop_all()
    for unit in units:
        unit.seal(native)
    engine = Engine(
        model,
        world=world,
        runtime=runtime,
        native=native,
        units=units,
        options=options,
        checkpointed=checkpointed,
        keeping=keeping,
    )
    _hooks.install(engine)
    _methods.install(engine, methods)
    _checkpoint.install(checkpointed, engine.offloading)
    _state.install(engine)
    _asked.install(engine)
    _shown.install(engine)
    if is_meta:
        engine.awaited = _meta.Awaited(world, model, engine.parameters())
    reason = native.why_not_ce() or world.why_no_nodes
    because = f", as copy engines cannot serve: {reason}" if reason else ""
    replicas = f" in {world.ranks.replicas} replicas" if world.ranks.replicas > 1 else ""
    how = f"{world.size} ranks{replicas}, by {native.communicator()}{because}"
    _logger.info("%s: %s", engine.name, how)
    return model


def invalidate(model: nn.Module | None = None) -> None:
    """Say that parameters of a sharded model were changed in a way that torch does not count.

    Optimizers, loading, and in-place operations, on ``.data`` too, are noticed. What goes round
    torch (NumPy, kernels of one's own) is not, nor is ``to_local().data``.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out while only one lives.
    """
    engine_of(model).updated()


@contextmanager
def no_sync(model: nn.Module | None = None) -> Iterator[None]:
    """Backwards in this context do not reduce: whole gradients stay on each rank.

    The first backward after it that reduces takes them along. Until then they are not in
    ``parameter.grad``, and ``zero_grad`` does not touch them. They add up in the more precise of
    the dtypes of gathering and of reducing. A backward that is broken off takes them with it: begin
    the accumulation anew.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out while only one lives.
    """
    engine = engine_of(model)
    before, engine.sync = engine.sync, False
    try:
        yield
    finally:
        engine.sync = before


def close(model: nn.Module | None = None) -> None:
    """Give back the threads, memory and process groups of a sharded model; it cannot run again.

    The shards stay: parameters and their state can still be read and saved. A model that is
    collected, and the end of the process, do this by themselves.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out while only one lives.
    """
    engine_of(model).close()


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_sharded(module):
            where = f"submodule {name!r} of it" if name else "it"
            raise PenstockError(
                "ESTATE", f"{type(model).__name__}: {where} is sharded already; shard once"
            )


def _find_checkpointed(
    model: nn.Module, blocks: list[Named], units: list[Unit], options: Options
) -> tuple[list[Checkpointed], Keeping | None]:
    """Return the blocks that may be recomputed, and what decides by memory, if anything."""
    chosen = _select_checkpointed(model, blocks, options)
    among = {id(module) for _, module in chosen}
    of_blocks = [unit for unit in units if id(unit.module) in among]
    offloads = options.offloads_activations
    way = Way.KEEP if offloads else Way.RECOMPUTE
    way = Way.SELECT if options.selects else way
    by_hand = (
        []
        if options.recomputes_by_plan
        else [Checkpointed(unit, way, offloads=offloads) for unit in of_blocks]
    )
    if options.budget is None:
        return by_hand, None
    keeping = Keeping(options.budget, of_blocks if options.recomputes_by_plan else [])
    return by_hand or keeping.blocks, keeping


def _select_checkpointed(model: nn.Module, blocks: list[Named], options: Options) -> list[Named]:
    wanted = options.checkpoint
    if wanted is None and not options.offloads_activations:
        return []
    if not blocks:
        name, value = ("offload", options.offload) if wanted is None else ("checkpoint", wanted)
        refuse(name, value, f"{type(model).__name__} has no blocks: name them by blocks=")
    if wanted is None or options.recomputes_by_plan or options.selects:
        return blocks
    return select_blocks("checkpoint", model, blocks, wanted)


# ---- units and groups ---------------------------------------------------------------------------


def _make_units(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    parameters: dict[str, nn.Parameter],
    options: Options,
    *,
    alone: bool,
) -> list[Unit]:
    root = Unit("root", model)
    units = [Unit(name, module) for name, module in blocks]
    beside = find_beside(model, blocks)
    units += [Unit(name, module, beside_blocks=True) for name, module in beside]
    order = {module: place for place, module in enumerate(model.modules())}
    units.sort(key=lambda unit: order[unit.module])
    owners: dict[int, list[Unit]] = {}
    for unit in units:
        for module in unit.module.modules():
            owners.setdefault(id(module), []).append(unit)
    for parameter in _parameters_of(model, {id(p) for p in parameters.values()}):
        owned_by = {
            id(unit): unit
            for module, _ in parameter.places
            for unit in owners.get(id(module), [root])
        }
        # What several units share, or a unit and the rest, belongs to the root.
        unit = next(iter(owned_by.values())) if len(owned_by) == 1 else root
        if not alone:  # else nothing travels
            parameter.extension = find_extension(parameter, unit, options)
        parameter.group = _group_of(unit, _dtypes_of(parameter, options))
        parameter.group.parameters.append(parameter)
    return [root, *units]


def _parameters_of(model: nn.Module, wanted: set[int]) -> list[Parameter]:
    found: dict[int, Parameter] = {}
    for prefix, module in model.named_modules():
        for attribute, original in module._parameters.items():
            if original is None or id(original) not in wanted:
                continue
            if id(original) not in found:
                name = f"{prefix}.{attribute}" if prefix else attribute
                found[id(original)] = Parameter(name, original)
            found[id(original)].places.append((module, attribute))
    return list(found.values())


def _dtypes_of(parameter: Parameter, options: Options) -> Dtypes:
    dtype = parameter.dtype
    if not dtype.is_floating_point or dtype.itemsize == 1:  # float8 is moved as it is
        return Dtypes(dtype, dtype, dtype, dtype)
    used = dtype if _has_statistics(parameter) else options.used_dtype or dtype
    gather = used if parameter.extension is None else parameter.extension.wire_dtype
    return Dtypes(dtype, gather, options.reduce_dtype or used, used)


def _has_statistics(parameter: Parameter) -> bool:
    """Whether a module computes with it and with buffers, which want the same dtype."""
    kind = nn.modules.batchnorm._NormBase
    modules = (module for module, _ in parameter.places)
    return any(isinstance(m, kind) and m.running_mean is not None for m in modules)


def _group_of(unit: Unit, dtypes: Dtypes) -> Group:
    for group in unit.groups:
        if group.dtypes == dtypes:
            return group
    names = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes[:2])
    name = unit.name if not unit.groups else f"{unit.name} {' as '.join(names)}"
    unit.groups.append(Group(name, unit, dtypes))
    return unit.groups[-1]


def _fill_shards(world: World, groups: list[Group]) -> None:
    try:
        for group in groups:
            fill_shard(world, group)
    except Exception as error:
        raise PenstockError(
            "ENOMEM",
            f"rank {world.rank} failed while parameters were replaced by their shards, and the "
            f"model is lost: build it anew, on all ranks ({error})",
        ) from error
