"""Jobs of several processes on CPUs."""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
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
    job = finish([sys.executable, *arguments], environment(), stderr=subprocess.STDOUT)
    assert job.returncode == 0, job.stdout
    return job.stdout


def finish(
    command: list[str],
    environment: dict[str, str],
    *,
    stderr: int = subprocess.PIPE,
    seconds: float = 480,
) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, and no longer: then all its processes say where they are, and end."""
    mark = str(uuid.uuid4())
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**environment, "PENSTOCK_TEST_JOB": mark, "PYTHONFAULTHANDLER": "1"},
    ) as job:
        try:
            told = job.communicate(timeout=seconds)
        except BaseException:
            _signal_all(mark, signal.SIGABRT)
            time.sleep(2)
            _signal_all(mark, signal.SIGKILL)
            print(*job.communicate(), sep="\n")
            raise
    return subprocess.CompletedProcess(command, job.returncode, *told)


def _signal_all(mark: str, number: signal.Signals) -> None:
    """Send a signal to all processes that began with this mark, whoever started them."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                os.kill(int(path.parent.name), number)


def environment() -> dict[str, str]:
    """Return the variables of a job that sees no GPU."""
    paths = [str(EXAMPLES), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
