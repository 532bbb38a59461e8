"""Frameworks that Penstock is put under: functions of theirs are replaced."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from penstock._errors import PenstockError

Place = tuple[Any, str]  # a class or module, and a name in it


class Framework:
    """A framework, and what of it is replaced.

    Parameters
    ----------
    title : str
        Its name; that of its package in lower case.
    version : str
        What this was proved with, as far as it matters.

    Attributes
    ----------
    proved : str
        Both.
    """

    def __init__(self, title: str, version: str) -> None:
        self.proved = f"{title} {version}"
        self._title = title
        self._package = title.lower()
        self._version = version
        self._originals: dict[Place, Any] = {}

    def load(self) -> Any:
        """Import it; an ImportError says what to do."""
        try:
            return importlib.import_module(self._package)
        except ImportError as error:
            raise ImportError(
                f"penstock.{self._package} needs {self.proved}, which cannot be "
                f"imported ({error}): pip install {self._package}=={self._version}.*; "
                "penstock.shard works without it"
            ) from error

    def warn_of_other_version(self, version: str) -> None:
        """Warn the caller of `install`, which calls this, where it is of another version."""
        release = version.partition("+")[0]
        if not f"{release}.".startswith(f"{self._version}."):
            warnings.warn(
                f"penstock.{self._package} was proved with {self.proved}, and this "
                f"is {version}: that it has what is replaced is checked now, what it does is not",
                stacklevel=3,
            )

    @property
    def is_replaced(self) -> bool:
        """Whether functions of it are replaced now."""
        return bool(self._originals)

    def replace(self, wrappers: Mapping[Place, Callable[[Any], Any]]) -> None:
        """Replace functions, each by what its wrapper makes of it.

        EMISMATCH where one of them is not there; nothing is replaced then.
        """
        for place, name in wrappers:
            if not hasattr(place, name):
                raise PenstockError(
                    "EMISMATCH",
                    f"{place.__name__} has no {name!r} in this {self._title}: install "
                    f"{self._version}",
                )
        self._originals = {place: getattr(*place) for place in wrappers}
        for place, wrapper in wrappers.items():
            setattr(*place, wrapper(self._originals[place]))

    def restore(self) -> None:
        """Give it its functions back."""
        for place, original in self._originals.items():
            setattr(*place, original)
        self._originals = {}
