"""Which modules of a model are gathered as one: its blocks, and what is beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeGuard

from torch import nn

from penstock._arguments import refuse
from penstock._errors import PenstockError

Selector = str | type[nn.Module] | nn.Module
Blocks = Selector | Iterable[Selector] | Callable[[str, nn.Module], bool] | None
Named = tuple[str, nn.Module]

_MAY_BE = "give names, patterns, classes, modules, or a predicate over (name, module)"


def find_blocks(model: nn.Module, blocks: Blocks = None) -> list[Named]:
    """Find the blocks of a model, none inside another, in the order of ``named_modules``.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    blocks : str, class, module, iterable of these, or callable, optional
        Names or patterns (``"layers.*"``), classes, modules; or a predicate over (name, module).
        Left out: the elements of each outermost ``nn.ModuleList``; without such a list, the
        instances of the class that repeats, is in no other such class, and has most parameters.

    Returns
    -------
    list of (str, nn.Module)
    """
    if blocks is None:
        return _listed(model) or _repeated(model)
    if _is_predicate(blocks):
        predicate = blocks
        return _outermost(model, lambda name, module: bool(predicate(name, module)))
    selectors = _selectors("blocks", blocks)
    for selector in selectors:
        _check_selects("blocks", selector, model.named_modules(), f"submodule of {_kind(model)}")
    return _outermost(model, lambda name, module: any(_selects(s, name, module) for s in selectors))


def select_blocks(
    argument: str, model: nn.Module, blocks: list[Named], wanted: Blocks
) -> list[Named]:
    """Choose among the blocks of a model.

    Parameters
    ----------
    argument : str
        What an error names.
    model : nn.Module
        The whole model.
    blocks : list of (str, nn.Module)
        Its blocks.
    wanted : str, class, module, iterable of these, or callable
        As for `find_blocks`.

    Returns
    -------
    list of (str, nn.Module)
    """
    if _is_predicate(wanted):
        return [named for named in blocks if wanted(*named)]
    selectors = _selectors(argument, wanted)
    for selector in selectors:
        _check_selects(argument, selector, blocks, f"block of {_kind(model)}")
    return [named for named in blocks if any(_selects(s, *named) for s in selectors)]


def _is_predicate(blocks: Blocks) -> TypeGuard[Callable[[str, nn.Module], bool]]:
    """Whether it is a function: classes and modules can be called, too."""
    return callable(blocks) and not isinstance(blocks, (type, nn.Module))


def _selectors(argument: str, blocks: Blocks) -> list[Selector]:
    if isinstance(blocks, (str, type)):
        return [blocks]
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.ModuleList):
        return [blocks]
    if not isinstance(blocks, Iterable):
        refuse(argument, blocks, _MAY_BE)
    return list(blocks)


def find_beside(model: nn.Module, blocks: list[Named]) -> list[Named]:
    """Find the large modules beside the blocks: an embedding, a head.

    What is small is left out: a gather of its own would cost more than it is worth.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    blocks : list of (str, nn.Module)
        Its blocks.

    Returns
    -------
    list of (str, nn.Module)
        Outermost modules that hold no block and have at least a hundredth of the smallest block's
        parameters, in the order of ``named_modules``.
    """
    among = {id(block) for _, block in blocks}
    least = min((_size([named]) for named in blocks), default=0) / 100

    def wanted(name: str, module: nn.Module) -> bool:
        return _size([(name, module)]) >= least and not any(
            id(inner) in among for inner in module.modules()
        )

    return _outermost(model, wanted, among) if blocks else []


def _outermost(
    model: nn.Module, wanted: Callable[[str, nn.Module], bool], but: Iterable[int] = ()
) -> list[Named]:
    return list(_walk("", model, wanted, set(but)))


def _walk(
    prefix: str, parent: nn.Module, wanted: Callable[[str, nn.Module], bool], seen: set[int]
) -> Iterator[Named]:
    for child_name, child in parent.named_children():
        name = f"{prefix}{child_name}"
        if id(child) in seen:
            continue
        seen.add(id(child))
        if _is_callable(child) and _has_parameters(child) and wanted(name, child):
            yield name, child
        else:
            yield from _walk(f"{name}.", child, wanted, seen)


def _is_callable(module: nn.Module) -> bool:
    """Whether the module can be called: hooks of a mere container never run.

    What ``torch.compile`` has wrapped has a forward of its own, and its class has none.
    """
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _listed(model: nn.Module) -> list[Named]:
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return _outermost(model, lambda name, module: name.rpartition(".")[0] in lists)


def _repeated(model: nn.Module) -> list[Named]:
    """Instances of the repeated class with most parameters that is in no other repeated class."""
    kinds = dict.fromkeys(type(m) for m in model.modules() if type(m) is not nn.Sequential)
    found = {kind: _outermost(model, partial(_is_a, kind)) for kind in kinds}
    repeated = {kind: named for kind, named in found.items() if len(named) > 1}
    outer = {
        kind: named
        for kind, named in repeated.items()
        if not any(_contains(others, kind) for k, others in repeated.items() if k is not kind)
    }
    return max(outer.values(), key=_size, default=[])


def _is_a(kind: type[nn.Module], name: str, module: nn.Module) -> bool:
    return type(module) is kind


def _contains(blocks: list[Named], kind: type[nn.Module]) -> bool:
    return any(type(inner) is kind for _, block in blocks for inner in block.modules())


def _size(blocks: list[Named]) -> int:
    return sum(p.numel() for _, block in blocks for p in block.parameters())


def _selects(selector: Selector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    if isinstance(selector, type):
        return isinstance(module, selector)
    return module is selector


def _check_selects(argument: str, selector: Selector, named: Iterable[Named], what: str) -> None:
    if not isinstance(selector, (str, type, nn.Module)):
        raise PenstockError("EINVAL", f"{argument}= holds {selector!r}: {_MAY_BE}")
    if not any(name and _selects(selector, name, module) for name, module in named):
        raise PenstockError("EINVAL", f"{argument}= names {selector!r}, which matches no {what}")


def _kind(model: nn.Module) -> str:
    return type(model).__name__
