import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Machine code for CPUs is compiled in a third of the time where no vectors are tried out.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import pytest
import torch
from models import DEVICE
from ranks import World

gc.freeze()  # what was imported is no garbage: no search for some has to look through it


def pytest_runtest_logreport(report):
    """On GPUs, where a limit of time may end the run, say at once why a test failed."""
    if DEVICE == "cuda" and report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)


def skip_without_gpus(size: int) -> None:
    """Skip a test whose ranks want more GPUs than there are."""
    if DEVICE == "cuda" and size > torch.cuda.device_count():
        pytest.skip(f"{size} ranks want a GPU each, {torch.cuda.device_count()} are here")


class Worlds:
    """Worlds by size, started at first use and again after a failure."""

    def __init__(self) -> None:
        self.worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        skip_without_gpus(size)
        if size not in self.worlds or not self.worlds[size].alive:
            self.worlds[size] = World(size)
        return self.worlds[size]

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()


@pytest.fixture(scope="session")
def worlds():
    found = Worlds()
    yield found
    found.close()


@pytest.fixture
def fresh_world():
    """Makes a world that the test may break."""
    made: list[World] = []

    def make(size: int) -> World:
        skip_without_gpus(size)
        made.append(World(size))
        return made[-1]

    yield make
    for world in made:
        world.close()
