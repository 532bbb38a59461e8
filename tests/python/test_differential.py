"""Random programs, a few with each number of ranks; `differential.py` runs as many as one likes."""

import pytest
from differential import run_seeds

SEEDS = {2: range(16), 3: range(100, 105)}


@pytest.mark.parametrize("ranks", SEEDS)
def test_random_programs_equal_unsharded_ones(worlds, ranks):
    events = worlds(ranks).run(run_seeds, SEEDS[ranks], answer_within=300)
    assert min(events) > 5 * len(SEEDS[ranks]), "hardly any seed makes a program"
