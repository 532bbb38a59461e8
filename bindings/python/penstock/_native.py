"""The C engine of a sharded model: opened with the groups that its units have."""

from __future__ import annotations

from penstock import _C
from penstock._agree import fail_together
from penstock._memory import segment_maker
from penstock._options import Options
from penstock._units import Group, Unit
from penstock._world import World


def open_native(
    name: str, options: Options, world: World, runtime: _C.Runtime, units: list[Unit]
) -> _C.Engine:
    """Open an engine, register all groups with it, and let the ranks agree on them.

    Parameters
    ----------
    name : str
        Of the model, for traces and errors.
    options : Options
        As `shard` was called.
    world : World
        The ranks; all of them call this alike.
    runtime : _C.Runtime
        Of this engine alone.
    units : list of Unit
        Whose groups get their numbers.

    Returns
    -------
    _C.Engine
        Sealed, without shards.
    """
    native = _C.Engine(
        runtime=runtime,
        name=name,
        communicator=options.communicator,
        stage=options.stage,
        gather=world.gather,
        reduce=world.reduce,
        nodes=world.nodes,
        prefetch_ahead=options.prefetch_ahead,
        prefetch_bytes=options.prefetch_bytes or 0,
        bucket_bytes=options.bucket_bytes,
        part_bytes=options.part_bytes or 0,
        verify=options.verify,
        time_waits=options.time_waits,
        segments=segment_maker(world.device),
    )
    try:
        for unit in units:
            for group in unit.groups:
                _register(native, group)
        native.seal()
    except BaseException:
        native.destroy()
        raise
    return native


def _register(native: _C.Engine, group: Group) -> None:
    for parameter in group.parameters:
        parameter.index = native.add_parameter(
            parameter.name, parameter.shape[0], parameter.row_elements, parameter.trainable
        )
    group.index = native.add_group(
        group.name,
        [parameter.index for parameter in group.parameters],
        group.dtype,
        group.gather_dtype,
        group.reduce_dtype,
        group.unit.forward_only,
    )


def make_shards(native: _C.Engine, world: World, groups: list[Group]) -> None:
    """Get the memory of all shards, of which nothing is written yet; all ranks call this alike.

    Raises on all ranks where one has none left.
    """
    failure = None
    try:
        for group in groups:
            group.shard = native.make_shard(group.index)
    except Exception as error:
        failure = error
    fail_together(world, failure)
