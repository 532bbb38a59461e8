"""The runner of the GPU tests: GPUs are shared out, and no part keeps the others from running."""

import importlib.util
import os
import sys
import time
from pathlib import Path

RUNNER = Path(__file__).parent.parent / "gpu" / "parts.py"
spec = importlib.util.spec_from_file_location("parts", RUNNER)
parts = importlib.util.module_from_spec(spec)
sys.modules["parts"] = parts
spec.loader.exec_module(parts)


def part(name, gpus, script, limit_s=60.0):
    return parts.Part(name, gpus, limit_s, [sys.executable, "-c", script])


def run(given, folder, gpus=4):
    return parts.run_all(given, [str(i) for i in range(gpus)], folder, dict(os.environ))


MEET = """
import os, pathlib, time
folder = pathlib.Path({folder!r})
(folder / {me!r}).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
while not (folder / {other!r}).exists():
    time.sleep(0.01)
"""


def test_parts_run_side_by_side_on_gpus_of_their_own(tmp_path):
    names = ["a", "b"]
    meet = [
        part(me, 2, MEET.format(folder=str(tmp_path), me=me, other=other))
        for me, other in (names, names[::-1])
    ]
    assert run(meet, tmp_path) == []
    used = [(tmp_path / name).read_text().split(",") for name in names]
    assert sorted(used[0] + used[1]) == ["0", "1", "2", "3"]


def test_a_part_that_wants_all_gpus_has_them(tmp_path):
    script = 'import os; assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"'
    assert run([part("one", 1, ""), part("all", parts.ALL, script)], tmp_path, gpus=3) == []


def test_a_failure_is_named_and_the_rest_runs(tmp_path, capsys):
    missing = parts.Part("missing", 4, 60.0, ["/no/such/program"])
    bad = part("bad", 4, "raise SystemExit('for a reason')")
    assert run([missing, bad, part("good", 4, "print('here')")], tmp_path) == ["missing", "bad"]
    shown = capsys.readouterr().out
    assert "/no/such/program" in shown
    assert "for a reason" in shown
    assert "ok      good" in shown


SLEEPER = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path({path!r}).write_text(str(child.pid))
time.sleep(1000)
"""


def is_gone(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"  # its new parent may not have looked yet


def test_a_part_out_of_its_time_is_ended_with_its_processes(tmp_path, capsys):
    pid = tmp_path / "pid"
    limit = 10.0
    given = [part("late", 1, SLEEPER.format(path=str(pid)), limit), part("good", 4, "print(1)")]
    assert run(given, tmp_path) == ["late"]
    assert "late    late" in capsys.readouterr().out
    while not is_gone(pid.read_text()):
        time.sleep(0.01)


def test_no_part_goes_on_beyond_the_time_of_all(tmp_path, capsys):
    given = [part("long", 4, SLEEPER.format(path=str(tmp_path / "pid"))), part("waits", 4, "")]
    gpus = [str(i) for i in range(4)]
    assert parts.run_all(given, gpus, tmp_path, dict(os.environ), 1.0) == ["waits", "long"]
    shown = capsys.readouterr().out
    assert "late    long" in shown
    assert "no time waits" in shown


def test_what_a_part_leaves_behind_is_ended(tmp_path):
    pid = tmp_path / "pid"
    script = SLEEPER.format(path=str(pid)).replace("time.sleep(1000)\n", "\n")
    assert run([part("careless", 1, script)], tmp_path) == []
    while not is_gone(pid.read_text()):
        time.sleep(0.01)


def test_every_c_test_on_gpus_is_a_part():
    # CMake names more: each communicator of test_collectives, cuda_kernels, memcheck.
    tests = {path.stem for path in RUNNER.parent.glob("test_*.c")} - {"test_collectives"}
    wanted = {f"^gpu/{name}$" for name in tests | {"collectives_.*", "cuda_kernels", "memcheck"}}
    assert wanted == {
        part.command[-1] for part in parts.parts_of(Path(), 4) if part.command[0] == "ctest"
    }
