"""Parameters of a sharded model, as optimizers have them, and modules between forwards."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from penstock._errors import PenstockError
from penstock._world import DTensorSpec, as_sharded, local_of


class CountingDTensor(DTensor):
    """A DTensor that counts what is written to its ``.data``, and to what ``detach`` returns.

    For DTensors torch does not, and copies of the whole parameter are kept as long as nothing is
    written. What is computed from it, and its copies and pickles, are ordinary DTensors.
    """

    @property
    def data(self) -> torch.Tensor:
        """The rows without their history, to read and to write."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Copy other values to where the rows are, which peers and optimizers know."""
        is_like = isinstance(value, DTensor) and value.dtype == self.dtype
        if not is_like or value.shape != self.shape or value.device.type != self.device.type:
            raise PenstockError(
                "EINVAL",
                f"a sharded parameter of shape {tuple(self.shape)} stays a {self.dtype} DTensor on "
                f"{self.device}: to change its values write to them (copy_); to move or convert "
                "it, do that before penstock.shard(model)",
            )
        with torch.no_grad():
            self.copy_(value)

    def detach(self) -> torch.Tensor:
        """Return the same rows without history; writes to them count for this tensor too."""
        alias = cast(DTensor, super().detach())
        alias._local_tensor = local_of(self).detach()
        alias.__class__ = CountingDTensor
        return alias

    def storage(self) -> NoReturn:
        """Refuse what safetensors asks for when it saves: a wrapper of rows has no storage."""
        raise PenstockError(
            "EUNSUPPORTED",
            f"a sharded parameter of shape {tuple(self.shape)} has no storage of its own, as "
            "safetensors and save_pretrained want it: give them whole tensors, by state_dict="
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict, which all ranks call",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            ordinary = self._ordinary()
            ordinary.grad = self.grad
            memo[id(self)] = copy.deepcopy(ordinary, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)

    def _ordinary(self) -> torch.Tensor:
        ordinary = as_sharded(local_of(self), self._spec).requires_grad_(self.requires_grad)
        ordinary.__dict__.update(self.__dict__)
        return ordinary


class WatchedDTensor(DTensor):
    """A gradient that notes whether its rows are used, for which torch counts no versions."""

    is_used = False

    @property
    def _local_tensor(self) -> torch.Tensor:
        """The rows, as torch reads them in whatever it does with the tensor."""
        self.is_used = True
        return _local.__get__(self)

    @_local_tensor.setter
    def _local_tensor(self, rows: torch.Tensor) -> None:
        _local.__set__(self, rows)


_local: Any = DTensor._local_tensor  # a slot


def watch(tensor: torch.Tensor) -> None:
    """Begin to note whether a tensor is used."""
    if type(tensor) is DTensor:
        tensor.__class__ = WatchedDTensor


def rows_unwatched(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor, sharded or not, without a use of it."""
    return _local.__get__(tensor) if isinstance(tensor, DTensor) else tensor


def end_watch(tensor: torch.Tensor) -> bool:
    """Say whether a tensor was used since `watch`; it is what it was before."""
    if not isinstance(tensor, WatchedDTensor):
        return False
    is_used = tensor.is_used
    tensor.__dict__.pop("is_used", None)
    tensor.__class__ = DTensor  # type: ignore[assignment]
    return is_used


# Where torch looks at the class whether a list of parameters can be computed with as one.
for _types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types += [CountingDTensor, WatchedDTensor]


# Operations of theirs DTensors have not (torch 2.11): they would fail in the midst of a step.
_UNSUPPORTED = (torch.optim.Adafactor, torch.optim.Rprop)


def _refuse_unsupported(stepped: optimizer.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = (p for group in stepped.param_groups for p in group["params"])
    is_affected = (isinstance(p, CountingDTensor) for p in parameters)
    if isinstance(stepped, _UNSUPPORTED) and any(is_affected):
        raise PenstockError(
            "EUNSUPPORTED",
            f"{type(stepped).__name__} cannot step sharded parameters, as torch's DTensors have "
            "not all of its operations: take another optimizer, as penstock.AdamW",
        )


optimizer.register_optimizer_step_pre_hook(_refuse_unsupported)


def make_sharded_parameter(
    rows: torch.Tensor, layout: DTensorSpec | None, requires_grad: bool
) -> nn.Parameter:
    """Make a parameter of this rank's rows.

    Parameters
    ----------
    rows : torch.Tensor
        In memory of their own, at the begin of their storage: they are used where they lie.
    layout : DTensorSpec, optional
        Of the whole; None where this process is alone: the parameter is a plain one then.
    requires_grad : bool
        Whether it gets gradients.

    Returns
    -------
    nn.Parameter
    """
    parameter = nn.Parameter(as_sharded(rows, layout), requires_grad)
    if layout is not None:
        parameter.__class__ = CountingDTensor  # type: ignore[assignment]
    return parameter
