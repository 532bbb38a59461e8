"""Worlds of rank processes: what is said of a rank that does not answer."""

import os
import time

import pytest
from ranks import RankError


def stay():
    time.sleep(60)


def test_a_rank_that_does_not_answer_says_where_it_is(fresh_world):
    world = fresh_world(1)
    assert world.run(os.getpid) == [world.processes[0].pid]
    with pytest.raises(RankError, match="(?s)rank 0: no answer in time; it is in.*in stay"):
        world.run(stay, answer_within=5)
