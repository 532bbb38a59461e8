"""The C engine of a sharded model: opened with the groups that its units have, and their shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial

import torch

from penstock import _C
from penstock._agree import find_failure
from penstock._arguments import Options
from penstock._errors import PenstockError
from penstock._extension import Extension
from penstock._lookup import is_table
from penstock._memory import segment_maker
from penstock._meta import unset
from penstock._units import Group, Parameter, Unit
from penstock._world import World, local_of, stream_of


def open_native(
    name: str, options: Options, world: World, units: list[Unit]
) -> tuple[_C.Runtime, _C.Engine]:
    """Open an engine, register all groups with it, and let the ranks agree on them.

    Parameters
    ----------
    name : str
        Of the model, for traces and errors.
    options : Options
        As `shard` was called.
    world : World
        The ranks; all of them call this alike.
    units : list of Unit
        Whose groups get their numbers.

    Returns
    -------
    _C.Runtime, _C.Engine
        The engine is sealed, and has no shards.
    """
    runtime = _C.Runtime(
        f"{name}-{world.roll.run}",
        world.rank,
        world.size,
        options.seconds,
        world.device,
        stream_of(world.device),
        world.roll,
    )
    world.roll.compares = options.verify
    if world.device.type == "cuda":
        world.roll.watch(runtime)
    native = _C.Engine(
        runtime=runtime,
        name=name,
        communicator=options.communicator,
        stage=options.stage,
        gather=world.gather,
        reduce=world.reduce,
        nodes=world.nodes,
        replicas=world.between,
        prefetch_ahead=options.prefetch_ahead,
        prefetch_bytes=options.prefetch_bytes or 0,
        bucket_bytes=options.bucket_bytes,
        part_bytes=options.part_bytes or 0,
        verify=options.verify,
        time_waits=options.time_waits,
        shards_on_host=options.offloads_shards,
        transient_copies=options.makes_copies,
        in_callers_order=world.is_beside_others,
        segments=segment_maker(world.device),
    )
    try:
        for unit in units:
            for group in unit.groups:
                _register(native, group)
            unit.index = native.add_unit(unit.name, [group.index for group in unit.groups])
        native.seal()
        filled = [group for unit in units for group in unit.groups if group.extensions]
        native.set_filler(partial(_send, {group.index: weakref.ref(group) for group in filled}))
    except BaseException:
        native.destroy()
        runtime.destroy()
        raise
    return runtime, native


def _register(native: _C.Engine, group: Group) -> None:
    group.unit.is_table = is_table(group)
    for parameter in group.parameters:
        parameter.index = native.add_parameter(
            parameter.name, parameter.shape[0], parameter.row_elements, parameter.trainable
        )
    members = [parameter.index for parameter in group.parameters]
    for extension in group.extensions:
        extension.more = _register_more(native, extension)
        members += extension.more
    group.index = native.add_group(
        group.name,
        members,
        group.dtype,
        group.gather_dtype,
        group.reduce_dtype,
        group.unit.forward_only,
        group.unit.is_table,
        group.used_dtype if group.extensions else None,
    )


def _register_more(native: _C.Engine, extension: Extension) -> list[int]:
    """Register what travels beside the rows of a parameter."""
    return [
        native.add_parameter(f"{extension.name}, {i}", extension.shape[0], row.numel(), False)
        for i, row in enumerate(extension.rows[1:], 1)
    ]


def _send(groups: dict[int, weakref.ref[Group]], index: int, copy: torch.Tensor) -> None:
    """Write what is gathered of a group whose parameters have hooks."""
    group = groups[index]()
    for extension in group.extensions if group is not None else ():
        extension.send(copy.view(torch.uint8))


# ---- shards -------------------------------------------------------------------------------------


def make_shards(native: _C.Engine, world: World, groups: list[Group]) -> None:
    """Make all that replaces the original parameters, without values; all ranks call this alike.

    Raises on all ranks where one has no memory left.
    """
    error = None
    try:
        for group in groups:
            group.shard = native.make_shard(group.index)
            for parameter, rows in _lay_out(native, group):
                parameter.make_sharded(rows, world)
                parameter.make_full(group.gather_dtype, world.device)
    except Exception as caught:
        error = caught
    failure = find_failure(world, error)
    if failure is not None and isinstance(error, PenstockError):
        raise error
    if failure is not None:
        raise PenstockError(
            "ENOMEM",
            f"rank {failure.rank} has no memory for its shards; the models of all ranks are as "
            f"they were: {failure.text}",
        ) from error
    for group in groups:
        for parameter in group.parameters:
            parameter.make_by_hooks(world.device)
        _bind(native, group)


@torch.no_grad()
def fill_shard(world: World, group: Group) -> None:
    """Replace the original parameters of a group by this rank's rows of them, if they have any."""
    group.shard.zero_()
    for parameter in group.parameters:
        original = local_of(parameter.original)
        if original.is_meta:
            unset(parameter.local)
        else:
            parameter.local.copy_(original[parameter.own])
        parameter.show(parameter.sharded)
        parameter.drop_original(world)


@torch.no_grad()
def move_shard(native: _C.Engine, group: Group, why: str) -> None:
    """Give a group's rows to another engine, which has another place for them."""
    group.shard = native.make_shard(group.index).zero_()
    group.gradient = None
    for parameter, rows in _lay_out(native, group):
        rows.copy_(parameter.local)
        parameter.move(rows, why)
    _bind(native, group)


def _lay_out(native: _C.Engine, group: Group) -> Iterator[tuple[Parameter, torch.Tensor]]:
    """Note where the engine wants what; yield the parameters and where their rows are to be."""
    size = group.dtype.itemsize
    group.gradient_elements = native.group_layout(group.index).gradient_bytes // size
    for parameter in group.parameters:
        at = native.parameter_layout(group.index, parameter.index)
        parameter.own = slice(at.first_row, at.first_row + at.shard_rows)
        if parameter.extension is not None:
            members = [parameter.index, *parameter.extension.more]
            offsets = [native.parameter_layout(group.index, m).shard_offset for m in members]
            parameter.extension.place([offset // size for offset in offsets], at.shard_rows)
        shape = [at.shard_rows, *parameter.shape[1:]]
        rows = _C.make_view(group.shard, at.shard_offset // size, shape)
        parameter.rows = (rows.shape, rows.stride(), at.gradient_offset // size)
        yield parameter, rows


def _bind(native: _C.Engine, group: Group) -> None:
    shown: list[tuple[torch.Tensor, torch.Tensor, str]]
    shown = [(p.memory, p.part, p.released) for p in group.parameters]
    for extension in group.extensions:
        shown += [(more, more, extension.released) for more in extension.gathered[1:]]
    memory, leaves, messages = zip(*shown, strict=True)
    wrappers = [p.full for p in group.parameters if p.full is not p.memory]
    native.attach(group.index, memory, leaves, messages, wrappers)
    native.bind_shard(group.index, group.shard)
