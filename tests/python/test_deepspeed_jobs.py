"""What the runs under DeepSpeed share: their jobs, and the turn to profile."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ranks import World

sys.path.append(str(Path(__file__).parent.parent / "deepspeed"))

from jobs import Job
from profiling_turn import ProfilingTurn


def test_a_rank_knows_its_place_and_its_gpus(tmp_path):
    script = """
import os
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"]
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())  # in one piece
"""
    log = tmp_path / "log"
    job = Job(2, [sys.executable, "-c", script], log, {"CUDA_VISIBLE_DEVICES": "2,3"})
    while not job.is_over():
        time.sleep(0.01)
    job.end()
    lines = sorted(log.read_text().splitlines())
    assert lines == ["0 0 2 127.0.0.1 2,3", "1 1 2 127.0.0.1 2,3"]


def test_a_job_is_over_when_one_rank_has_failed(tmp_path):
    script = "import os, time; os.environ['RANK'] == '1' and exit(3); time.sleep(1000)"
    job = Job(2, [sys.executable, "-c", script], tmp_path / "log")
    pids = [process.pid for process in job.processes]
    while not job.is_over():
        time.sleep(0.01)
    assert not job.runs()
    job.end()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def profile_in_turn(lock, record, me, other):
    """Say when it begins and ends, several times, beside another job that does the same."""
    import torch.distributed as dist

    def work():
        if dist.get_rank() == 0:
            append(record, f"{me.name} begins")
        for _ in range(10):
            dist.barrier()
        if dist.get_rank() == 0:
            append(record, f"{me.name} ends")

    me.touch()
    while not other.exists():
        time.sleep(0.01)
    turn = ProfilingTurn(lock)
    for _ in range(20):
        turn.around(work)()
    return turn.turns


def append(record, line):
    with record.open("a") as file:
        file.write(line + "\n")


def test_jobs_that_name_the_same_lock_profile_one_at_a_time(tmp_path):
    lock, record, names = tmp_path / "lock", tmp_path / "record", [tmp_path / "a", tmp_path / "b"]
    jobs = [World(2), World(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(job.run, profile_in_turn, lock, record, me, other)
                for job, me, other in zip(jobs, names, names[::-1], strict=True)
            ]
            assert [one.result() for one in both] == [[20, 20], [20, 20]]
    finally:
        for job in jobs:
            job.close()
    lines = record.read_text().splitlines()
    assert len(lines) == 80
    for begins, ends in zip(lines[::2], lines[1::2], strict=True):
        assert (begins.split()[1], ends.split()[1]) == ("begins", "ends")
        assert begins.split()[0] == ends.split()[0]
