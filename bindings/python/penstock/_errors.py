"""The one exception of the package, and the refusal of copies."""

from __future__ import annotations

from typing import NoReturn


class PenstockError(RuntimeError):
    """Something that Penstock was asked to do cannot be done, or failed.

    Parameters
    ----------
    status : str
        Name of the status code: ``"EINVAL"``, ``"ESTATE"``, ``"EMISMATCH"``, ``"EPEER"``,
        ``"ETIMEDOUT"``, ...
    text : str
        What happened, to which object, and what to do.

    Attributes
    ----------
    status : str
        As given.
    """

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


def refuse_copy(name: str) -> NoReturn:
    """Raise what a copy of a sharded model raises."""
    raise PenstockError(
        "EUNSUPPORTED",
        f"{name} is sharded: neither it nor a module of it can be copied (deepcopy, AveragedModel) "
        "or pickled (torch.save). Copy the model before penstock.shard, and shard the copy as "
        "well; save the state_dict()",
    )
