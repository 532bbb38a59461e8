"""Jobs of several processes on CPUs."""

import os
import signal
import subprocess
import sys
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
    seconds: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, and no longer than that: none of its processes is left behind."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        start_new_session=True,
    ) as job:
        try:
            told = job.communicate(timeout=seconds)
        except BaseException:
            os.killpg(
                job.pid, signal.SIGTERM
            )  # torchrun ends its ranks, which are not of the group
            try:
                told = job.communicate(timeout=40)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
            print(*told, sep="\n")
            raise
    return subprocess.CompletedProcess(command, job.returncode, *told)


def environment() -> dict[str, str]:
    """Return the variables of a job that sees no GPU."""
    paths = [str(EXAMPLES), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
