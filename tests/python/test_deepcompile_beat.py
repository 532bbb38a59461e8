"""Where ranks of a DeepCompile job say they are, and what others say of one that is late."""

import os
import re
import time
from datetime import timedelta

import torch.distributed as dist
from deepcompile_job import GRAPH, SHAPES, Job
from penstock import _C
from penstock._page import find_pages, read_page
from test_processes import listen

OTHER_GRAPH = GRAPH + 1
ALL = range(len(SHAPES))


def places():
    """Note where the rank's page says that it is in two steps, the second of two graphs."""
    job = Job(SHAPES)
    job.dc.register_graph_z3(OTHER_GRAPH, list(ALL))
    ((rank, page),) = (
        (head.rank, page)
        for pid, page in find_pages()
        if pid == os.getpid() and (head := read_page(page)).job.startswith(b"deepcompile")
    )
    assert rank == dist.get_rank()
    seen = []

    def note():
        seen.append(_C.describe_page(page))

    note()
    for graphs in [GRAPH], [GRAPH, OTHER_GRAPH]:
        job.dc.start_forward()
        note()
        for graph in graphs:
            for i in ALL:
                job.use(i, graph=graph)
        job.dc.end_forward()
        note()
        job.dc.start_backward(True)
        for graph in graphs:
            done = [job.reduce(i, 1, graph=graph) for i in ALL]
            note()
            job.end_backward(done, graph=graph)
        note()
        job.update()
        job.dc.step_ends()
        note()
    ended = read_page(page).place.steps
    job.close()
    return seen, ended


def test_a_page_has_the_steps_and_phases_of_deepcompile(worlds):
    first, second = (
        [
            f"in the forward (step {step})",
            f"behind the forward (step {step})",
            *[f"in the backward (step {step})"] * graphs,
            f"behind the backward (step {step})",
            f"behind the optimizer (step {step})",
        ]
        for step, graphs in enumerate((1, 2))
    )
    for seen, ended in worlds(2).run(places):
        assert seen == ["before the first forward", *first, *second]
        assert ended == 1


def come_late():
    """Have the last rank stay behind a forward; return what this rank says."""
    rank, size = dist.get_rank(), dist.get_world_size()
    job = Job(SHAPES, group=dist.new_group(timeout=timedelta(seconds=8)))
    lines, stop = listen()
    for step in range(2):
        job.dc.start_forward()
        for i in ALL:
            job.use(i)
        job.dc.end_forward()
        if step == 1 and rank == size - 1:
            time.sleep(5.5)
        job.backward(1, update=True)
        job.update()
        job.dc.step_ends()
    stop()
    job.close()
    return [text for _, text in lines]


def test_who_waits_says_where_the_late_rank_is(fresh_world):
    late = r"; rank 2 did not come: behind the forward \(step 1\) since \d s"
    others = r"; ranks 0, 1 wait in the backward \(step 1\)"
    for rank, lines in enumerate(fresh_world(3).run(come_late)[:2]):
        text = next(line for line in lines if f"rank {rank} has waited" in line)
        assert re.search(late, text), text
        assert re.search(others, text), text
