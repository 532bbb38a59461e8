"""Shards and gradients that are written, or put elsewhere, between DeepCompile's steps."""

import time

import pytest
import torch
from deepcompile_job import GRAPH, SHAPES, Job


def use_all(job):
    for _ in range(2):
        for i in range(len(SHAPES)):
            job.use(i)


def write_behind_torchs_back():
    """As a checkpoint is loaded: between forwards, also of frozen and of persistent parameters."""
    job = Job(SHAPES, frozen=(2, 3), persistent=(1, 3))
    for version in range(3):
        use_all(job)
        assert job.version == version
        job.update()
        job.dc.shards_written()
    use_all(job)
    job.close()


def test_shards_that_were_written_are_gathered_anew(worlds):
    worlds(2).run(write_behind_torchs_back)


def write_where_elements_are():
    """As GatheredParameters partitions: torch counts no write to a shard that is padding."""
    job = Job(SHAPES, frozen=(2, 3), persistent=(1, 3))
    for _ in range(3):
        use_all(job)
        job.version += 1
        for i, shard in enumerate(job.shards):
            if job.rank * job.chunk(i) < job.numel(i):
                shard.copy_(job.sharded(i, job.value(i)))
        job.dc.shards_written()
    use_all(job)
    job.close()


def test_a_rank_that_had_nothing_to_write_gathers_anew_with_the_others(worlds):
    worlds(2).run(write_where_elements_are)


def move_on_one_rank():
    job = Job(SHAPES, persistent=(1,))
    for mover in (0, 1):
        use_all(job)
        if job.rank == mover:
            for shard in job.shards:
                shard.data = shard.clone()
        job.update()
        job.dc.shards_written()
    use_all(job)
    job.close()


def test_shards_may_get_new_memory_on_one_rank_and_the_same_on_another(worlds):
    worlds(2).run(move_on_one_rank)


def ask_beside_gathers():
    """Each rank asks another thing first: the lane's thread, or the one that writes."""
    job = Job(SHAPES)
    use_all(job)
    for i in range(100):
        gathered = torch.ops.dc.allgather_param.default(job.shards[2], GRAPH, 2, dtype=None)
        if i % 2 == job.rank:
            time.sleep(0.001)
        job.dc.shards_written()
        torch.ops.dc.wait_allgather.default(gathered, GRAPH, 2)
        job.release(2)
    use_all(job)
    job.close()


def test_ranks_agree_on_writes_while_gathers_are_in_flight(worlds):
    worlds(2).run(ask_beside_gathers)


def move_gradients():
    job = Job(SHAPES, frozen=(2,))
    for factor in (1, 2):
        job.backward(factor, update=True)
        before = list(job.buffers)
        for i in (0, 1, 3, 4):
            job.check_buffer(i, job.mean(i, factor))
            job.buffers[i] = torch.full_like(before[i], torch.nan)
            before[i].fill_(7)
            job.dc.update_param_grad_buffer(i, job.buffers[i], 0)
        job.backward(5, update=True)
        for i in (0, 1, 3, 4):
            job.check_buffer(i, job.mean(i, 5))
            assert before[i].eq(7).all()
    with pytest.raises(RuntimeError, match="parameter 0: its grad_buffer has 1 elements"):
        job.dc.update_param_grad_buffer(0, torch.zeros(1), 0)
    job.close()


def test_gradients_go_to_the_memory_that_was_told_last(worlds):
    worlds(2).run(move_gradients)
