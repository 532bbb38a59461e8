"""The host's memory: what a rank may take of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock._world import World

_MARGIN = 0.10  # of the host's memory, for all else that comes to be there
_GROUPS = Path("/sys/fs/cgroup")
# Of control groups of version 1 and 2: a limit, what is used, and what of it can be taken back.
_NAMES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)


def host_share(world: World) -> int:
    """Return the bytes of its host's memory that this rank may take, if the others take as much.

    What is available now, but for a margin of 10 % of the memory, is divided among the ranks of
    the host. Where a control group limits this process, its memory is that.
    """
    total, available = host_memory()
    hosts = world.roll.hosts
    ranks = hosts.count(hosts[world.roll.rank]) if hosts else 1
    ranks *= world.among_all[1] // world.size  # those along other axes of a mesh: on this host, too
    return max(0, available - int(_MARGIN * total)) // ranks


def host_memory() -> tuple[int, int]:
    """Return the bytes that this process might have of the host's memory, and those available."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    total, available = fields["MemTotal"], fields["MemAvailable"]
    for limit, used in _limits():
        total, available = min(total, limit), min(available, limit - used)
    return total, max(0, available)


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limits of this process's control groups, and what is used of each."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_second = controllers == ""
        if not is_second and "memory" not in controllers.split(","):
            continue
        root = _GROUPS if is_second else _GROUPS / "memory"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if root in (folder, *folder.parents):  # in a container the path may be of outside
                yield from _limit_of(folder, *_NAMES[is_second])


def _limit_of(folder: Path, limit: str, used: str, spare: str) -> Iterator[tuple[int, int]]:
    try:
        most = int((folder / limit).read_text())
        now = int((folder / used).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit
        return
    yield most, max(0, now - int(counts.get(spare, 0)))
