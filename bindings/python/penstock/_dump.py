"""Writing flight records: `penstock.trace.dump`, and where an exception ends the process."""

from __future__ import annotations

import os
import sys


def is_wanted() -> bool:
    """Whether what fails is to be written: ``PENSTOCK_DUMP`` names a folder."""
    return bool(os.environ.get("PENSTOCK_DUMP"))


def dump_all(folder: str | None, reason: str, *, is_failure: bool) -> list[str]:
    """Write the records of all engines of this process, those of ``penstock.dc`` too.

    Parameters
    ----------
    folder : str, optional
        Where to; None: where ``PENSTOCK_DUMP`` says.
    reason : str
        Stands in the files.
    is_failure : bool
        Whether this rank has failed: engines that had failed before keep what was written then.

    Returns
    -------
    list of str
        The files.

    Raises
    ------
    PenstockError
        EINVAL without a folder, EIO where a file cannot be written.
    """
    modules = (sys.modules.get(f"penstock.{name}") for name in ("_C", "_dc"))
    loaded = [module for module in modules if module is not None]
    return [file for module in loaded for file in module.dump(folder, reason, is_failure)]
