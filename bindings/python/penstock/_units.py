"""Parameters, groups and units: what is gathered together, and the modules that hold it."""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from penstock import _C
from penstock._axes import block_of, make_divided, watch_divided
from penstock._errors import PenstockError
from penstock._extension import Extension, outside_passes, part_of
from penstock._sharded import make_sharded_parameter
from penstock._world import Layout, World, local_of

# Original parameters that shards have replaced and that are referenced elsewhere.
_sharded_in: Any = WeakTensorKeyDictionary()


def is_shared(original: nn.Parameter) -> bool:
    """Whether a parameter was replaced by its shard in another model that is not closed."""
    world = _sharded_in.get(original, lambda: None)()
    return world is not None and not world.closed


class Parameter:
    """One parameter of the model.

    Attributes
    ----------
    name : str
        Its full name in the model.
    places : list of (nn.Module, str)
        Modules and attributes that hold it; several for a tied parameter.
    original : nn.Parameter
        As found in the model; given up when the shard is made.
    sharded : nn.Parameter
        This rank's rows, which optimizers have, and the modules while the group is not gathered.
    full : nn.Parameter
        The whole tensor, which the modules have while the group is gathered; one object for ever.
    divided : DTensorSpec, optional
        How `original` and `full` are divided over other axes of the mesh; None: they are plain.
    shape : torch.Size
        Of what is sharded: the whole tensor, or where that is divided this rank's part of it.
    part : nn.Parameter
        What gets the gradients: `full`, or where that is divided this rank's part of it.
    extension : Extension, optional
        The hooks of its gather, if it has some: `full` is what they have made then.
    memory : torch.Tensor
        What the group is gathered into: `part`, or where there are hooks the bytes that they get.
    group : Group
        What it is gathered with.
    index : int
        Its number in the engine.
    layout : Layout
        What `sharded` and gradients of it are wrapped as; None without ranks.
    own : slice
        This rank's rows among all.
    rows : tuple
        Shape and strides of this rank's rows, and the elements before them in the group's flat
        gradient.
    local : torch.Tensor
        This rank's rows as a plain tensor: what `sharded` wraps, or it itself without ranks.
    address : int
        Where they lie.
    """

    def __init__(self, name: str, original: nn.Parameter) -> None:
        self.name = name
        self.places: list[tuple[nn.Module, str]] = []
        self.original = original
        self.divided = original._spec if isinstance(original, DTensor) else None
        self.shape = local_of(original).shape
        self.dtype = original.dtype
        self.trainable = original.requires_grad
        self.row_elements = self.shape[1:].numel()
        self.extension: Extension | None = None
        self.group: Group
        self.index = -1
        self.layout: Layout
        self.own = slice(0, 0)
        self.rows: tuple[torch.Size, tuple[int, ...], int]
        self.local: torch.Tensor
        self.address = 0
        self.sharded: nn.Parameter
        self.full: nn.Parameter
        self.part: nn.Parameter
        self.memory: torch.Tensor

    def make_sharded(self, rows: torch.Tensor, world: World) -> None:
        """Make `sharded` of this rank's rows, which may have no values yet."""
        whole = self.original.shape
        self.layout = world.layout_of(whole, rows.dtype, self.divided)
        shown = rows if self.extension is None else self.extension.wrap(rows, self.original)
        self.sharded = make_sharded_parameter(shown, self.layout, self.trainable)
        of_class = vars(shown).keys()
        marks = {name: mark for name, mark in vars(self.original).items() if name not in of_class}
        self.sharded.__dict__.update(marks)  # users'
        if self.extension is not None:
            shown = self.sharded._local_tensor  # type: ignore[attr-defined]
            self.extension.take_hooks(shown, world.mesh_of_parts)
        self.local = local_of(self.sharded)
        self.address = self.local.data_ptr()

    def drop_original(self, world: World) -> None:
        """Drop the reference to the original parameter; others may hold theirs."""
        _sharded_in[self.original] = weakref.ref(world)
        del self.original

    def count_users(self) -> int:
        """Return a number that is larger while somebody else holds this rank's rows."""
        storage = self.local.untyped_storage()
        return sys.getrefcount(self.local) + torch._C._storage_Use_Count(storage._cdata)

    def move(self, rows: torch.Tensor, why: str) -> None:
        """Move this rank's rows to other memory; any use of the old memory raises from now on."""
        before = self.local.detach()
        if self.extension is not None:
            rows = self.extension.wrap(rows)
            self.extension.take_hooks(rows)
        if isinstance(self.sharded, DTensor):
            self.sharded._local_tensor = rows
        else:
            self.sharded.data = rows
        self.local = local_of(self.sharded)
        self.address = self.local.data_ptr()
        _C.release(
            before,
            f"the rows of parameter {self.name!r} were moved when {why}: take .data, to_local() or "
            "state_dict() anew",
        )

    def refuse_changed(self) -> None:
        """Raise if it was moved after `shard`, or has a hook that nothing would call."""
        local = local_of(self.sharded)
        if local is not self.local or local.data_ptr() != self.address:
            raise PenstockError(
                "ESTATE",
                f"parameter {self.name!r} was moved or converted after shard: do that (to, half, "
                "...) before penstock.shard(model)",
            )
        if self.sharded._backward_hooks:
            raise PenstockError(
                "EUNSUPPORTED",
                f"parameter {self.name!r} has a hook of register_hook, and there is no gradient of "
                "one backward to call it with: use register_post_accumulate_grad_hook, which is "
                "called when .grad is there",
            )

    @property
    def released(self) -> str:
        """What using `full` raises while it is not gathered."""
        return (
            f"parameter {self.name!r} is sharded and not gathered now: it is whole only while its "
            "block's forward or backward runs"
        )

    def make_full(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make `full`, which has no memory yet, unless hooks make it."""
        if self.extension is not None:
            return
        memory = _C.make_released_tensor(list(self.shape), dtype, device, self.released)
        self.memory = self.part = self.full = nn.Parameter(memory, requires_grad=self.trainable)
        if self.divided is not None:
            self.full = make_divided(self.part, self.divided)

    def make_by_hooks(self, device: torch.device) -> None:
        """Have hooks make `full`, if there are some; all ranks call this alike."""
        if self.extension is not None:
            self.part = self.full = self.extension.make_full(device, self.trainable, self.released)
            self.memory = self.extension.gathered[0]
            if self.divided is not None:
                self.full = make_divided(self.part, self.divided)
                self.extension.show_in(part_of(self.full))

    @property
    def whole(self) -> list[torch.Tensor]:
        """All that has memory while it is gathered."""
        return [self.memory] if self.extension is None else self.extension.whole

    def watch(self, arrived: _C.Arrived) -> None:
        """Have its gradients, whenever they are computed, noted there and given to `part`."""
        if self.divided is None:
            arrived.watch(self.full)
        else:
            watch_divided(arrived, self.full, self.part)

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole tensor of the parameter's shape."""
        return whole[self.block]

    @property
    def block(self) -> tuple[slice, ...]:
        """Which rows of the whole tensor this rank has, and which part of them."""
        rows, *others = block_of(self.sharded.shape, self.divided)
        return (slice(rows.start + self.own.start, rows.start + self.own.stop), *others)

    def show(self, tensor: nn.Parameter) -> None:
        """Set this tensor in every module that has the parameter."""
        for module, attribute in self.places:
            module._parameters[attribute] = tensor


class Dtypes(NamedTuple):
    """Those of parameters that go together.

    Attributes
    ----------
    shard : torch.dtype
        What optimizers have.
    gather, reduce : torch.dtype
        In which parameters travel, and gradients.
    used : torch.dtype
        Of what modules have, and of gradients as they are computed: `gather`, but where hooks make
        it of what has travelled.
    """

    shard: torch.dtype
    gather: torch.dtype
    reduce: torch.dtype
    used: torch.dtype


class Group:
    """Parameters of one unit and of the same dtypes, which the engine gathers and reduces as one.

    Attributes
    ----------
    trainable : list of Parameter
        Those that get gradients.
    index : int
        Its number in the engine.
    dtypes : Dtypes
        Of its parameters.
    dtype, gather_dtype, reduce_dtype, used_dtype : torch.dtype
        These.
    shard : torch.Tensor
        This rank's rows of all parameters, flat.
    gradient_elements : int
        Size of the flat gradient.
    gradient : StorageWeakRef or None
        The storage of the flat gradient that ``parameter.grad`` shows.
    arrived : Arrived
        Which of its gradients have been computed and not been reported, in this backward, and how
        many there will be.
    complete : bool
        Whether all gradients of this use in the backward were reported.
    old : dict of Parameter and torch.Tensor
        While a backward runs: what ``parameter.grad`` was, which the engine adds to.
    keeps : bool
        Whether gradients of backwards that did not reduce may be here.
    """

    def __init__(self, name: str, unit: Unit, dtypes: Dtypes) -> None:
        self.name = name
        self.unit = unit
        self.parameters: list[Parameter] = []
        self.trainable: list[Parameter] = []  # once the unit is sealed
        self.dtypes = dtypes
        self.dtype, self.gather_dtype, self.reduce_dtype, self.used_dtype = dtypes
        self.index = -1
        self.shard: torch.Tensor
        self.gradient_elements = 0
        self.gradient: Any = None
        self.arrived: _C.Arrived  # once there are hooks
        self.complete = False
        self.old: dict[Parameter, torch.Tensor] = {}
        self.keeps = False

    @property
    def extensions(self) -> list[Extension]:
        """Those of its parameters; all of them have one, or none."""
        return [p.extension for p in self.parameters if p.extension is not None]

    def keep_gradients(self) -> None:
        """Let gradients stay here, and add up in the more precise of their dtypes."""
        if self.keeps:
            return
        self.keeps = True
        dtype = torch.promote_types(self.used_dtype, self.reduce_dtype)
        if dtype != self.used_dtype:
            self._set_gradient_dtype(dtype)

    def drop_gradients(self) -> None:
        """Forget the gradients that are here: they were taken, or their backward failed."""
        for parameter in self.trainable:
            parameter.part.grad = None
        if self.keeps:
            self.keeps = False
            self._set_gradient_dtype(self.used_dtype)

    def _set_gradient_dtype(self, dtype: torch.dtype) -> None:
        for parameter in self.trainable:
            parameter.part.grad_dtype = dtype


class Use:
    """One forward of a unit, from its call to the end of its backward.

    Attributes
    ----------
    unit : weakref to Unit
        What is used: nodes of graphs hold uses.
    recomputed : bool
        Whether the forward runs inside a backward.
    has_inputs : bool
        Whether some input gets a gradient, so that the end of the backward can be seen there.
    marked : (weakref to torch.Tensor, int), optional
        While the forward runs: the only such input, whose node holds the use, and its version.
    begin : int
        The number of the oldest node of its graph, where inputs get gradients; else -1.
    """

    __slots__ = ("__weakref__", "begin", "has_inputs", "marked", "recomputed", "unit")

    def __init__(self, unit: Unit, recomputed: bool) -> None:
        self.unit = unit.reference
        self.recomputed = recomputed
        self.has_inputs = False
        self.marked: tuple[weakref.ref[torch.Tensor], int] | None = None
        self.begin = -1


class Unit:
    """A block, a large module beside the blocks, or the root with everything else.

    Attributes
    ----------
    beside_blocks : bool
        Whether it is a module beside the blocks.
    forward_only : bool
        Whether its backward needs no parameters: those of embeddings are looked up, no more.
    is_table : bool
        Whether it is one embedding, of whose weight forwards name the rows that they read.
    read_by_root : bool
        Whether the root's forward has used its parameters itself: its backward then needs them.
    index : int
        Its number in the engine.
    whole : bool
        Whether its modules have the whole parameters now.
    in_backward : bool
        Whether a backward holds it.
    backward_task : int
        The graph, by torch's number, in which the backward has got to it.
    active : set of Use
        Uses whose backward has begun and has not yet reached their inputs.
    pending : WeakSet of Use
        Uses of forwards whose backward has not reached their inputs, and still can.
    calls : list of Use
        Forwards that run, the innermost last.
    """

    def __init__(self, name: str, module: nn.Module, *, beside_blocks: bool = False) -> None:
        self.name = name
        self.module = module
        self.native: _C.Engine
        self.beside_blocks = beside_blocks
        self.forward_only = beside_blocks and all(_is_looked_up(m) for m in module.modules())
        self.is_table = False
        self.read_by_root = False
        self.groups: list[Group] = []
        self.index = -1
        self.whole = False
        self.in_backward = False
        self.backward_task = -1
        self.active: set[Use] = set()
        self.pending: weakref.WeakSet[Use] = weakref.WeakSet()
        self.calls: list[Use] = []
        self.reference = weakref.ref(self)
        self._shown: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._extensions: list[Extension] = []

    @property
    def has_frozen(self) -> bool:
        """Whether some of its parameters get no gradients now."""
        return any(not full.requires_grad for _, _, full, _ in self._shown)

    def seal(self, native: _C.Engine) -> None:
        """Note where its parameters show, and who gathers them: its groups have their shards."""
        self.native = native
        for group in self.groups:
            group.trainable = [p for p in group.parameters if p.trainable]
        self._extensions = [extension for group in self.groups for extension in group.extensions]
        self._shown = [
            (module, attribute, parameter.full, parameter.sharded)
            for group in self.groups
            for parameter in group.parameters
            for module, attribute in parameter.places
        ]

    def hold(self, rows: torch.Tensor | None = None) -> None:
        """Begin a use, of these rows of a table or of all; the first one shows the parameters."""
        if self.native.use(self.index, rows):
            self.whole = True
            if self._extensions:
                with outside_passes():
                    for extension in self._extensions:
                        extension.show()
            for module, attribute, full, _ in self._shown:
                module._parameters[attribute] = full

    def drop(self) -> None:
        """End a use; the last one shows the shards again, and so does one that fails."""
        is_last = True
        try:
            is_last = self.native.done(self.index)
        finally:
            if is_last:
                self._show_sharded()

    def refuse_replaced(self) -> None:
        """Raise if a module has another tensor than the shard, while nothing is gathered."""
        for module, attribute, _, sharded in self._shown:
            if module._parameters.get(attribute) is not sharded:
                raise PenstockError(
                    "ESTATE",
                    f"{attribute!r} of a {type(module).__name__} in {self.name or 'the root'!r} "
                    "was replaced after shard: write new values to the parameter that is there; "
                    "functional_call, export and parametrizations want the model before shard",
                )

    def reset(self) -> None:
        """Forget the uses of a pass that was broken off, as the engine does itself."""
        if self.whole:
            self._show_sharded()
        self.in_backward = False
        self.active.clear()
        self.calls.clear()

    def _show_sharded(self) -> None:
        self.whole = False
        for extension in self._extensions:
            extension.hide()
        for module, attribute, _, sharded in self._shown:
            module._parameters[attribute] = sharded


def _is_looked_up(module: nn.Module) -> bool:
    """Whether the module's backward needs its indices alone."""
    if next(module.parameters(recurse=False), None) is None:
        return type(module).forward is nn.Module.forward  # a mere container
    return type(module) is nn.Embedding and module.max_norm is None
