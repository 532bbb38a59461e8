"""The table of faults, bench/faults.py."""

import sys
from pathlib import Path

import pytest
from launch import environment, finish

FAULTS = Path(__file__).resolve().parents[2] / "bench" / "faults.py"


def test_a_rank_that_is_killed_is_named_in_the_table():
    chosen = ["--ranks", "2", "--only", "kill-backward", "captured-kill"]
    job = finish([sys.executable, str(FAULTS), *chosen], environment())
    assert job.returncode == 0, job.stdout + job.stderr
    title, rank, hang, captured, sum_ = job.stdout.splitlines()
    assert title.split()[:3] == ["fault", "ranks", "who"]
    for line, who in ((rank, "2  rank 0"), (hang, "2  hang")):
        assert line.startswith("SIGKILL in backward") and who in line and " yes " in line
    assert "(step 10, backward)" in rank
    assert captured.endswith("needs GPUs")
    assert sum_ == "1 of 1 faults name their culprit"


TEXTS = [
    ("rank 0 has waited 4 s for 'b'; rank 2 did not come: in 'c'; ranks 0, 1 wait in 'b'", {"2"}),
    ("rank 0: all_gather 'b': closed; the process of rank 2 (13) has ended, last", {"2"}),
    ("rank 0: 'b': closed; rank 1 failed: PenstockError: x; rank 2 failed: boom", {"1", "2"}),
    ("ranks started different collectives: rank 0: a 'b'; rank 2: a 'c'. All ranks", {"0", "2"}),
    ("is not the same collective on all ranks: rank 0: a 'b', rank 1: a 'c'; all", {"0", "1"}),
    ("1: is not the same collective on all ranks: rank 1: a 'b', rank 2: a 'c", {"1", "2"}),
    ("rank 0: lane gather: task 'b' (ticket 5) failed: a peer or the connection to it", set()),
]


@pytest.mark.parametrize(("text", "accused"), TEXTS)
def test_whom_a_text_accuses_is_told_from_whom_it_mentions(monkeypatch, text, accused):
    monkeypatch.syspath_prepend(FAULTS.parent)
    from faults import accusation

    assert accusation(text)[1] == accused


def test_a_line_says_whether_the_culprit_is_among_the_accused(monkeypatch):
    monkeypatch.syspath_prepend(FAULTS.parent)
    from faults import named

    accused = [{"2"}, {"0", "2"}, {"1"}, set()]
    assert [named(ranks, "2") for ranks in accused] == ["yes", "and 0", "NO, but 1", "NO"]
