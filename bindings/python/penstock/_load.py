"""`load`: the values of files go to a sharded model, whose ranks read their own rows alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock._agree import find_failure
from penstock._arguments import check_flag, refuse
from penstock._axes import block_of
from penstock._engine import Engine, engine_of
from penstock._errors import PenstockError
from penstock._weights import Stored, Wanted, open_weights

_MOST_NAMES = 10  # of a kind, in an error


class Differences(NamedTuple):
    """What of a model and of files does not fit, by name.

    Attributes
    ----------
    missing : list of str
        Parameters and persistent buffers of the model that are not in the files.
    unexpected : list of str
        Tensors in the files that the model has not.
    unlike : list of str
        Those that are in both in another shape, or as whole numbers in place of floating-point
        ones.
    """

    missing: list[str]
    unexpected: list[str]
    unlike: list[str]


@torch.no_grad()
def load(
    model: nn.Module, path: str | os.PathLike[str], *, prefix: str = "", strict: bool = True
) -> Differences:
    """Load the values of a sharded model from files; each rank reads its own rows.

    All ranks call this alike, with files that they all reach. Parameters go to the shards in their
    dtype, a few MB at a time, tied ones once; buffers are read whole, and allocated where the model
    is on the meta device. Buffers that are not persistent are in no file: initialise them.

    Parameters
    ----------
    model : nn.Module
        Sharded, with values or, from the meta device, without.
    path : str or path
        A file of safetensors, an index of several (``*.index.json``), a folder with
        ``model.safetensors`` or ``model.safetensors.index.json``, or a folder that
        ``torch.distributed.checkpoint`` has written. Of the latter a rank reads the chunks, as the
        ranks have written them, that its rows are in.
    prefix : str
        Names in the files begin with it, as ``"model."`` where ``{"model": model.state_dict()}``
        was saved. Others are none of the model's.
    strict : bool
        Whether it is an error that something does not fit. Else what fits is loaded.

    Returns
    -------
    Differences
        Names of what does not fit: none if `strict`.

    Raises
    ------
    PenstockError
        EMISMATCH: something does not fit. EINVAL: a file is not what it should be. EPEER: another
        rank cannot load. Nothing is loaded then, on any rank, unless the text says that it is in
        part.
    """
    engine = engine_of(model)
    if engine.closed:
        raise PenstockError("ESTATE", f"the sharded model {engine.name} was closed")
    if not isinstance(path, (str, os.PathLike)):
        refuse("path", path, "give a file or a folder")
    if not isinstance(prefix, str):
        refuse("prefix", prefix, "give a str with which names begin")
    check_flag("strict", strict)
    with _together(engine, f"cannot load {str(path)!r}: nothing is loaded"):
        weights = open_weights(path)
        chosen, differences = _match(_slots(engine), weights.stored, prefix)
        if strict and any(differences):
            raise PenstockError("EMISMATCH", _explain(engine.name, path, differences))
    with _together(engine, f"failed to load {str(path)!r}, which is loaded in part"):
        wanted = {name: slot.wanted for name, slot in chosen.items()}
        total = sum(want.rows.nbytes for want in wanted.values())
        weights.read(wanted, _Progress(total if engine.world.rank == 0 else 0))
    for slot in chosen.values():
        slot.show()
    return differences


@contextmanager
def _together(engine: Engine, what: str) -> Iterator[None]:
    """Raise behind it on all ranks where it fails on one of them."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    if engine.world.size > 1:
        engine.native.drain()  # no collective of the engine's is on its way
    failure = find_failure(engine.world, error)
    if error is not None:
        raise error
    if failure is not None:
        raise PenstockError("EPEER", f"rank {failure.rank} {what}: {failure.text}")


# ---- names ---------------------------------------------------------------------------------------


@dataclass
class _Slot:
    """A parameter or buffer of the model.

    Attributes
    ----------
    names : list of str
        Of a tied one several.
    wanted : Wanted
        Where its values go.
    places : list of (dict, str)
        Those of a buffer, or of a parameter that is not sharded.
    """

    names: list[str]
    wanted: Wanted
    places: list[tuple[dict[str, Any], str]]

    def show(self) -> None:
        """Set it in its modules, as it may have been allocated for this."""
        for held, attribute in self.places:
            held[attribute] = self.wanted.whole


def _slots(engine: Engine) -> list[_Slot]:
    """Find all that a file may have of a model."""
    prefixes: dict[nn.Module, list[str]] = {}
    for name, module in engine.root.module.named_modules(remove_duplicate=False):
        prefixes.setdefault(module, []).append(f"{name}." if name else "")
    slots = []
    for parameter in engine.parameters():
        names = [prefix + a for module, a in parameter.places for prefix in prefixes[module]]
        whole = parameter.sharded.detach()
        slots.append(_Slot(names, Wanted(whole, parameter.local, parameter.block), []))
    found: dict[int, _Slot] = {}
    for module, its_prefixes in prefixes.items():
        for held, attribute, whole in _whole_ones(engine, module):
            if id(whole) not in found:
                tensor = _with_memory(whole, engine.world.device)
                block = block_of(tensor.shape, None)
                found[id(whole)] = _Slot([], Wanted(tensor, tensor, block), [])
            found[id(whole)].names += [prefix + attribute for prefix in its_prefixes]
            found[id(whole)].places.append((held, attribute))
    return [*slots, *found.values()]


def _whole_ones(
    engine: Engine, module: nn.Module
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Find what a module has of its own, and all ranks have whole: where, its name, itself."""
    for attribute, buffer in module._buffers.items():
        if buffer is not None and attribute not in module._non_persistent_buffers_set:
            yield module._buffers, attribute, buffer
    for attribute, parameter in module._parameters.items():
        if parameter is not None and not engine.owns(parameter):
            yield module._parameters, attribute, parameter


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor
    made = torch.empty_like(tensor, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _match(
    slots: list[_Slot], stored: dict[str, Stored], prefix: str
) -> tuple[dict[str, _Slot], Differences]:
    """Return what is to be read, by name in the files, and what does not fit."""
    chosen: dict[str, _Slot] = {}
    differences = Differences([], [], [])
    expected = {prefix + name for slot in slots for name in slot.names}
    for slot in slots:
        name = next((prefix + n for n in slot.names if prefix + n in stored), None)
        if name is None:
            differences.missing.append(slot.names[0])
        elif _fits(stored[name], slot.wanted.whole):
            chosen[name] = slot
        else:
            differences.unlike.append(slot.names[0])
    others = (name for name in stored if name.startswith(prefix) and name not in expected)
    differences.unexpected.extend(others)
    return chosen, differences


def _fits(stored: Stored, whole: torch.Tensor) -> bool:
    return stored.shape == whole.shape and _kind(stored.dtype) == _kind(whole.dtype)


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _explain(model: str, path: str | os.PathLike[str], differences: Differences) -> str:
    listed = []
    for kind, names in zip(
        ("not in the files", "not in the model", "of another shape or kind"),
        differences,
        strict=True,
    ):
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            listed.append(f"{kind}: {', '.join(names[:_MOST_NAMES])}{more}")
    return (
        f"{str(path)!r} does not fit {model}: {'; '.join(listed)}. Nothing is loaded; strict=False "
        "loads what fits and returns these names"
    )


# ---- progress ------------------------------------------------------------------------------------


class _Progress:
    """Says on a terminal how much is in its place.

    Parameters
    ----------
    total : int
        Bytes that there will be; 0: nothing is said.
    """

    def __init__(self, total: int) -> None:
        self._total = total if sys.stderr.isatty() else 0
        self._done = 0
        self._begin = self._said = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        is_last = self._done == self._total
        if not self._total or (now - self._said < 0.1 and not is_last):
            return
        self._said = now
        speed = self._done / max(now - self._begin, 1e-9)
        text = f"\rpenstock.load: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
        end = "\n" if is_last else ""
        print(f"{text}, {speed / 1e9:.1f} GB/s", end=end, file=sys.stderr, flush=True)
