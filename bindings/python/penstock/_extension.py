"""What travels in place of a parameter: a pair of hooks before and behind its gather.

They are FSDP2's: a parameter that is a tensor of a class of its own, as torchao makes them, says by
``fsdp_pre_all_gather`` what its rows are sent as, and by ``fsdp_post_all_gather`` what the modules
have of all ranks' bytes. What optimizers have stays as it is. `Scaled` is such a pair, too.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock import _C
from penstock._errors import PenstockError

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"

_inner: dict[type, str] = {}  # by class with hooks: the attribute that has the plain tensor


# ---- tensors that have hooks ---------------------------------------------------------------------


def part_of(tensor: torch.Tensor) -> Any:
    """Return what may have hooks: of a DTensor this rank's part, of any other one itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks of a gather, or one of the two."""
    return hasattr(part_of(tensor), _PRE) or hasattr(part_of(tensor), _POST)


def why_no_hooks(tensor: torch.Tensor) -> str:
    """Say why the hooks of a tensor cannot be called; nothing where they can.

    What it consists of is known from then on to `plain_of`.
    """
    tensor = part_of(tensor)
    if not (hasattr(tensor, _PRE) and hasattr(tensor, _POST)):
        return f"has one of {_PRE} and {_POST}, and both are wanted"
    if not hasattr(tensor, "__tensor_flatten__"):
        return "has hooks of a gather and no __tensor_flatten__, which says what it consists of"
    names = tensor.__tensor_flatten__()[0]
    whole = [name for name in names if getattr(tensor, name).shape == tensor.shape]
    if len(whole) != 1 or getattr(tensor, whole[0]).dtype != tensor.dtype:
        return (
            f"has hooks of a gather and consists of {names}: one tensor of its own shape and "
            "dtype is wanted, which is sharded and trained"
        )
    _inner[type(tensor)] = whole[0]
    return ""


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that one with hooks is made of; any other one as it is."""
    name = _inner.get(type(tensor))
    return tensor if name is None else getattr(tensor, name)


# ---- one parameter -------------------------------------------------------------------------------


@contextmanager
def outside_passes() -> Iterator[None]:
    """Make tensors that later passes may use, whatever this one is."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Extension:
    """The hooks of one parameter: what of it travels, and what its modules have.

    Parameters
    ----------
    name : str
        The parameter's, for errors.
    shape : torch.Size
        Of the whole parameter; an attribute, too.
    module : nn.Module
        One that has it: hooks may ask for it.
    policy : object
        What they may ask for, too: FSDP2's ``MixedPrecisionPolicy``.
    used_dtype : torch.dtype
        What the modules see of what they have, and the dtype of its gradients.

    Attributes
    ----------
    wire_dtype : torch.dtype
        In which it travels: one of one byte.
    is_captured : bool
        Whether a CUDA graph repeats what the hooks do: others may keep tensors of a call in Python.
    rows : list of torch.Size
        The shape of a row of each tensor that travels, in bytes.
    more : list of int
        The numbers in the engine of all tensors but the first, which has the parameter's.
    gathered : list of torch.Tensor
        The bytes of all ranks, by tensor: memory while the group is gathered.
    released : str
        What touching these raises at other times.
    """

    wire_dtype = torch.uint8
    is_captured = False

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        module: nn.Module,
        policy: Any,
        used_dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.rows = [shape[1:]]
        self.more: list[int] = []
        self.gathered: list[torch.Tensor] = []
        self.shape = shape
        self._module = weakref.ref(module)
        self._policy = policy
        self._used_dtype = used_dtype
        self._whole = shape, torch.empty(shape, device="meta").stride()
        self._hooks: Any = None  # what has them
        self._takes_mesh_alone = True  # the first one, as it did at first
        self._mesh: Any = None
        self._places: list[slice] = []  # by tensor: where its rows lie in what the group sends
        self._own: list[torch.Size] = []  # and their shape
        self._dtypes: list[torch.dtype] = []
        self._metadata: Any = None
        self._full: torch.Tensor
        self._made: list[torch.Tensor] = []  # by the hook, beside `gathered`
        self._memory: list[torch.Tensor] = []  # of these, while there is some
        self.released = ""

    def wrap(self, rows: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's rows as a tensor that has the hooks, in the same memory.

        `like` is one of which it has all else; left out: the one of before.
        """
        parts = self._hooks if like is None else part_of(like)
        _, context = parts.__tensor_flatten__()
        inner = {_inner[type(parts)]: rows}
        return type(parts).__tensor_unflatten__(inner, context, rows.shape, rows.stride())

    def take_hooks(self, local: torch.Tensor, mesh: Any = None) -> None:
        """Take the hooks of this rank's rows, as optimizers have them.

        `mesh` has the ranks; left out: those of before.
        """
        self._hooks = local
        parameters = inspect.signature(self._hooks.fsdp_pre_all_gather).parameters
        self._takes_mesh_alone = len(parameters) == 1  # the older signature
        self._mesh = self._mesh if mesh is None else mesh
        count, ranks = self.shape[0], self._mesh.size()
        if -(-count // ranks) * (ranks - 1) >= count:
            raise PenstockError(
                "EUNSUPPORTED",
                f"parameter {self.name!r} has hooks of a gather, which want rows on each rank, and "
                f"{count} rows for {ranks} ranks: convert it on fewer ranks only",
            )

    def place(self, firsts: Sequence[int], count: int) -> None:
        """Note at which bytes of what its group sends its own `count` rows begin, by tensor."""
        self._own = [torch.Size((count, *row)) for row in self.rows]
        self._places = [
            slice(first, first + shape.numel())
            for first, shape in zip(firsts, self._own, strict=True)
        ]

    def make_full(self, device: torch.device, trainable: bool, released: str) -> nn.Parameter:
        """Make what modules have while it is gathered; it has no memory yet.

        `released` is what touching it raises then. All ranks call this alike, as hooks may ask all.
        """
        self.released = released
        with outside_passes():
            self._before()
            for row in self.rows:
                shape = [self.shape[0], *row]
                bytes_of_all = _C.make_released_tensor(shape, torch.uint8, device, released)
                self._memory.append(torch.zeros(shape, dtype=torch.uint8, device=device))
                _C.bind(bytes_of_all, self._memory[-1])
                self.gathered.append(bytes_of_all)
            full, inner = self._hooks.fsdp_post_all_gather(
                self._outputs(), self._metadata, self._used_dtype
            )
            part = nn.Parameter(full, requires_grad=trainable)
        self._full = part
        storages = {tensor.untyped_storage()._cdata for tensor in self.gathered}
        self._made = [t for t in inner if t.untyped_storage()._cdata not in storages]
        for tensor in self.gathered:
            _C.release(tensor, released)
        self.hide()
        return part

    def show_in(self, full: torch.Tensor) -> None:
        """Have another tensor on the same memory shown in place of what `make_full` has made."""
        self._full = full

    @property
    def whole(self) -> list[torch.Tensor]:
        """All that has memory while it is gathered."""
        return [*self.gathered, *self._made]

    # ---- before a gather ------------------------------------------------------------------------

    def send(self, copy: torch.Tensor) -> None:
        """Write what travels of this rank's rows to what their group sends, all of it in bytes."""
        with outside_passes():
            for place, tensor in zip(self._places, self._before(), strict=True):
                copy[place].copy_(tensor.contiguous().view(torch.uint8).flatten())

    def _before(self) -> Sequence[torch.Tensor]:
        hook = self._hooks.fsdp_pre_all_gather
        given = () if self._takes_mesh_alone else (*self._whole, self._module(), self._policy)
        tensors, self._metadata = hook(self._mesh, *given)
        if [t.shape for t in tensors] != self._own or any(t.dtype.itemsize != 1 for t in tensors):
            what = ", ".join(f"{t.dtype} of {tuple(t.shape)}" for t in tensors) or "nothing"
            raise PenstockError(
                "EUNSUPPORTED",
                f"{_PRE} of parameter {self.name!r} gives {what} to gather: it may give one tensor "
                f"of the shape of its rows, {tuple(self._own[0])}, and of a dtype of one byte",
            )
        self._dtypes = [tensor.dtype for tensor in tensors]
        return tensors

    # ---- behind it ------------------------------------------------------------------------------

    def show(self) -> None:
        """Make what modules have of what was gathered, which has its memory now.

        Within `outside_passes`.
        """
        with torch.autograd._unsafe_preserve_version_counter(self._full):
            for tensor in self._made:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                _C.bind(tensor, memory)
                self._memory.append(memory)
            self._hooks.fsdp_post_all_gather(
                self._outputs(), self._metadata, self._used_dtype, out=self._full
            )

    def hide(self) -> None:
        """Give back what the hook has made beside what was gathered."""
        for tensor in self._made:
            _C.release(tensor, self.released)
        self._memory.clear()

    def _outputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(t.view(d) for t, d in zip(self.gathered, self._dtypes, strict=True))
