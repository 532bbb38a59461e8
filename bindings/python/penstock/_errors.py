"""The one exception of the package."""

from __future__ import annotations


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
