"""Jobs of several processes, started by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    """Run a script over so many ranks on CPUs; return what it has printed."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    job = subprocess.run(
        [sys.executable, *command, str(script), *arguments],
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
    paths = [str(EXAMPLES), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
