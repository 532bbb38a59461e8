"""Jobs of several processes on CPUs."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    """Run a script over so many ranks; return what it has printed."""
    options = ["--standalone", "--nproc-per-node", str(ranks)]
    return _run("-m", "torch.distributed.run", *options, str(script), *arguments)


def forked(module: str, *phases: tuple[int, str], folder: Path) -> str:
    """Run functions of a module, each over so many ranks; return what they have printed."""
    named = [f"{ranks}:{function}" for ranks, function in phases]
    return _run(str(HERE / "forked_ranks.py"), module, *named, str(folder))


def _run(*arguments: str) -> str:
    job = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        env=environment(),
        check=False,
    )
    assert job.returncode == 0, job.stdout
    return job.stdout


def environment() -> dict[str, str]:
    """Return the variables of a job that sees no GPU."""
    paths = [str(EXAMPLES), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
