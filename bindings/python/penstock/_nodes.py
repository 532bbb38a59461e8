"""Ranks that stand together: which nodes there are, found from hosts or given."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from penstock._errors import PenstockError


@dataclass
class Nodes:
    """Nodes of equally many ranks, which count from node to node."""

    ranks_per_node: int
    count: int


def nodes_of(hosts: list[str], ranks_per_node: int | None) -> Nodes:
    """Make nodes of the ranks' hosts, or of so many ranks each, where these are given.

    Raises
    ------
    PenstockError
        EINVAL where ranks cannot be divided so.
    """
    size = len(hosts)
    if ranks_per_node is not None:
        if ranks_per_node < 1 or size % ranks_per_node != 0:
            raise PenstockError(
                "EINVAL", f"ranks_per_node={ranks_per_node!r} does not divide {size} ranks"
            )
        return Nodes(ranks_per_node, size // ranks_per_node)
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(set(runs)) > 1 or len(runs) != len(set(hosts)):
        raise PenstockError(
            "EINVAL",
            f"ranks stand in runs of {runs} on {len(set(hosts))} hosts: a hierarchy wants equally "
            "many on each, which count from host to host",
        )
    return Nodes(runs[0], len(runs))


def this_host() -> str:
    """Return what tells this machine from others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text() if boot.exists() else ""
    return hashlib.sha256(f"{socket.gethostname()} {text}".encode()).hexdigest()
