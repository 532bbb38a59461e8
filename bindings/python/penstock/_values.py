"""Tensors in what forwards take and give: in the trees that torch knows, and in dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree


def tree_flatten(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """List the leaves of a value, and say how it is made of others.

    Parameters
    ----------
    value
        Anything; dataclasses that torch does not know are looked into as well.

    Returns
    -------
    list, callable
        The leaves; from as many others to a value like this one. A dataclass whose leaves stay is
        itself, and a copy otherwise, made by no constructor.
    """
    leaves, spec = _pytree.tree_flatten(value)
    if not any(map(_is_dataclass, leaves)):
        return leaves, lambda others: _pytree.tree_unflatten(others, spec)
    parts = [_flatten_leaf(leaf) for leaf in leaves]

    def make(others: list[Any]) -> Any:
        rest = iter(others)
        made = [remake([next(rest) for _ in inner]) for inner, remake in parts]
        return _pytree.tree_unflatten(made, spec)

    return [leaf for inner, _ in parts for leaf in inner], make


def tree_leaves(value: Any) -> list[Any]:
    """List the leaves of a value, as `tree_flatten` does."""
    return tree_flatten(value)[0]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """List the tensors among the leaves of a value."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_dataclass(leaf: Any) -> bool:
    is_one = hasattr(type(leaf), "__dataclass_fields__")
    return is_one and not isinstance(leaf, (torch.Tensor, nn.Module))


def _flatten_leaf(leaf: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    if not _is_dataclass(leaf):
        return [leaf], lambda others: others[0]
    names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    inner, make = tree_flatten([getattr(leaf, name) for name in names])

    def remake(others: list[Any]) -> Any:
        if all(new is old for new, old in zip(others, inner, strict=True)):
            return leaf
        made = copy.copy(leaf)
        for name, value in zip(names, make(others), strict=True):
            object.__setattr__(made, name, value)  # a frozen one, too
        return made

    return inner, remake
