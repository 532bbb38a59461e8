"""examples/elastic.py: a job that loses a machine goes on from its last checkpoint."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import EXAMPLES, environment

sys.path.insert(0, str(EXAMPLES))

import elastic  # noqa: E402

JOB = Path(__file__).with_name("elastic_job.py")
# Soon enough; the defaults are what machines far from each other need.
SOON = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"


def start_machine(folder, port, *, is_host, **variables):
    """Start a torchrun with one rank, as on one of two machines."""
    options = {
        "nnodes": "1:2",
        "nproc-per-node": 1,
        "max-restarts": 1,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"localhost:{port}",
        "rdzv-id": "job",
        "rdzv-conf": f"is_host={is_host},{SOON}",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *given, JOB, "--output", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), **variables},
    )


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def trained_by_one(steps):
    model = elastic.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        elastic.loss_of(model, elastic.draw(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_job_that_loses_a_machine_names_its_rank_and_goes_on(tmp_path):
    port = free_port()
    machines = [
        start_machine(tmp_path, port, is_host=1),
        start_machine(tmp_path, port, is_host=0, DOOMED="yes"),
    ]
    try:
        output = machines[0].communicate(timeout=600)[0]
    finally:
        for machine in machines:
            machine.terminate()  # it ends its rank
            machine.wait(60)
    assert machines[0].returncode == 0, output
    lost = (tmp_path / "lost").read_text()
    assert re.search(rf"PenstockError: .*rank {lost} \(\d+\) has ended", output), output
    assert "2 ranks go on behind step 0" in output + machines[1].stdout.read()
    assert "1 ranks go on behind step 2" in output
    state = {"model": elastic.build().state_dict()}
    dcp.load(state, checkpoint_id=elastic.newest(tmp_path))
    for name, value in trained_by_one(6).state_dict().items():
        assert torch.allclose(state["model"][name], value, atol=1e-5), name


def test_a_checkpoint_that_is_half_written_is_none(tmp_path, monkeypatch):
    assert elastic.newest(tmp_path) is None
    model = elastic.build()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (8, 10):
        elastic.save(tmp_path / str(step), model, optimizer)
    assert elastic.newest(tmp_path).name == "10"

    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", end)
    with pytest.raises((KeyboardInterrupt, dcp.api.CheckpointException)):
        elastic.save(tmp_path / "12", model, optimizer)
    assert list((tmp_path / "12").glob("*.distcp"))
    assert elastic.newest(tmp_path).name == "10"
