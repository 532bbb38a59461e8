"""The operators of DeepCompile's ZeRO-3, issued by hand on CPU ranks: what a correct run yields."""

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepcompile_job import GRAPH, SHAPES, Config, Job
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode


def steps(accumulate):
    job = Job(SHAPES)
    for _ in range(4):
        total = 0
        for micro in range(accumulate):
            for i in range(len(SHAPES)):
                job.use(i)
            job.backward(micro + 1, update=micro == accumulate - 1)
            total += micro + 1
        for i in range(len(SHAPES)):
            job.check_buffer(i, job.mean(i, total))
        job.update()
    stats = job.dc.stats()
    job.close()
    return stats


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parameters_and_gradients_are_right_in_every_step(worlds, ranks, accumulate):
    worlds(ranks).run(steps, accumulate)


def test_what_was_seen_once_is_gathered_ahead_and_together(worlds):
    for stats in worlds(2).run(steps, 1):
        uses = 4 * 2 * len(SHAPES)
        assert stats["gathers"] < uses / 2
        assert stats["ahead"] > 0
        assert stats["unused"] == 0


# ---- rules that a correct run follows, whatever the order ----------------------------------------


def prefetched_without_a_dtype():
    job = Job(SHAPES)
    ids = list(range(len(SHAPES)))
    for _ in range(3):
        before = job.dc.stats()["gather_bytes"]
        torch.ops.dc.prefetch_params_fused.default(GRAPH, [torch.zeros(1)] * len(ids), ids)
        for i in ids:
            job.use(i, torch.bfloat16)
        moved = job.dc.stats()["gather_bytes"] - before
        job.dc.start_backward(True)
        job.end_backward([job.reduce(i, 1) for i in ids])
        job.update()
    job.close()
    return moved, sum(job.chunk(i) * job.world * 2 for i in ids)


def test_a_cast_sees_what_was_gathered_and_not_what_was_there_before(worlds):
    # C1: a prefetch names no dtype, the graph asks for bf16: and nothing is gathered in fp32 once
    # that is known.
    for moved, as_bf16 in worlds(2).run(prefetched_without_a_dtype):
        assert moved == as_bf16


def persistent_in_another_dtype():
    job = Job(SHAPES)
    for i in range(len(SHAPES)):
        job.dc.set_persistent(i)
    for _ in range(3):
        for i in range(len(SHAPES)):
            job.use(i, torch.bfloat16)
            job.use(i)
            job.use(i, torch.bfloat16)
        job.backward(1, update=True)
        job.update()
    job.close()


def test_a_persistent_parameter_has_the_dtype_that_each_graph_asks_for(worlds):
    worlds(2).run(persistent_in_another_dtype)  # C2


def in_two_graphs():
    job = Job(SHAPES)
    ids = list(range(len(SHAPES)))
    job.dc.register_graph_z3(8, ids)
    for _ in range(2):
        for update in (False, True):
            job.dc.start_backward(update)
            job.end_backward([job.reduce(i, 1, graph=8) for i in ids], graph=8, release=False)
            if not update:  # a recompile between micro-batches
                job.dc.reset()
                job.dc.register_graph_z3(GRAPH, ids)
                job.dc.register_graph_z3(8, ids)
            job.end_backward([job.reduce(i, 2) for i in ids])
        for i in ids:
            job.check_buffer(i, job.mean(i, 6))
        job.update()
    job.close()


def test_gradients_of_one_parameter_in_several_graphs_add_up(worlds):
    worlds(2).run(in_two_graphs)  # C3


def padded():
    job = Job([(3,), (5,), (7,)], bucket=1000)
    for step in range(3):
        job.dc.start_backward(True)
        job.end_backward([job.reduce(i, 1e6) for i in range(3)])
        for i in range(3):
            job.check_buffer(i, job.mean(i, 1e6), tolerance=1)
            pad = job.chunk(i) * job.world - job.numel(i)
            if job.rank == job.world - 1 and pad > 0:
                assert job.buffers[i][-pad:].tolist() == [0.0] * pad, f"step {step}, parameter {i}"
        job.update()
    job.close()


def test_padding_of_gradients_is_zero(worlds):
    worlds(2).run(padded)  # C4


def prefetched_with_casts():
    job = Job(SHAPES)
    ids = list(range(len(SHAPES)))
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    for _ in range(3):
        torch.ops.dc.prefetch_params_fused.default(GRAPH, [torch.zeros(1)] * 5, ids, dtypes)
        for i in ids:
            job.use(i, dtypes[i])
        job.backward(1, update=True)
        job.update()
    job.close()


def test_casts_in_one_prefetch_do_not_share_memory(worlds):
    worlds(2).run(prefetched_with_casts)  # C5


def persistent_from_the_begin():
    job = Job(SHAPES, persistent=range(len(SHAPES)))
    where = {}
    for _ in range(3):
        for i in range(len(SHAPES)):
            for _ in range(2):
                gathered = job.use(i)
                assert gathered.untyped_storage().nbytes() > 0
                assert where.setdefault(i, gathered.data_ptr()) == gathered.data_ptr()
        job.backward(1, update=True)
        job.update()
    job.close()


def test_a_parameter_that_is_persistent_from_the_begin_is_gathered_and_stays(worlds):
    worlds(2).run(persistent_from_the_begin)  # C7


def wrong_calls():
    job = Job(SHAPES)
    ops = torch.ops.dc
    wrong = [
        ("parameter 99", lambda: ops.allgather_param.default(torch.zeros(1), GRAPH, 99)),
        ("parameter 1", lambda: ops.wait_allgather.default(torch.zeros(1), GRAPH, 1)),
        ("parameter 2", lambda: ops.reduce_grad.default(torch.zeros(4), GRAPH, 2)),
        ("graph 55", lambda: ops.reduce_grad.default(torch.zeros(7), 55, 1)),
        ("parameter 0", lambda: job.dc.register_z3_param(0, (2,), torch.zeros(9), None, False)),
    ]
    for name, call in wrong:
        with pytest.raises((RuntimeError, TypeError), match=name if name[-1] != "0" else ""):
            call()
    for _ in range(2):
        for i in range(len(SHAPES)):
            job.use(i)
        job.backward(1, update=True)
        for i in range(len(SHAPES)):
            job.check_buffer(i, job.mean(i, 1))
        job.update()
    job.close()


def test_wrong_calls_name_what_is_wrong_and_break_nothing(worlds):
    worlds(2).run(wrong_calls)  # C9


def side_by_side():
    first, second = Job(SHAPES), Job([(4, 4), (9,)])
    for job, graph in ((first, 11), (second, 12)):
        job.dc.select(job.number)
        job.dc.register_graph_z3(graph, list(range(len(job.shapes))))
    for _ in range(3):
        for job, graph in ((first, 11), (second, 12)):
            for i in range(len(job.shapes)):
                job.use(i, graph=graph)
        for job, graph in ((second, 12), (first, 11)):
            job.dc.select(job.number)
            job.dc.start_backward(True)
            ids = range(len(job.shapes))
            job.end_backward([job.reduce(i, 3, graph=graph) for i in ids], graph=graph)
            for i in ids:
                job.check_buffer(i, job.mean(i, 3))
            job.update()
    first.close()
    for i in range(2):
        second.use(i, graph=12)
    second.close()
    assert second.dc.current() == 0
    third = Job(SHAPES)
    third.use(0)
    third.close()


def test_several_runtimes_live_in_a_process(worlds):
    worlds(2).run(side_by_side)  # C10


# ---- tensors ------------------------------------------------------------------------------------


def released():
    job = Job(SHAPES)
    gathered = job.gather(2)
    alias = gathered.t()[1:]
    job.release(2, users=2)
    assert gathered.untyped_storage().nbytes() > 0
    job.release(2, users=2)
    assert gathered.untyped_storage().nbytes() == alias.untyped_storage().nbytes() == 0
    assert alias.shape == (32, 64)
    job.gather(2)
    assert torch.equal(alias, job.value(2).t()[1:])
    job.release(2)
    job.close()


def test_release_takes_the_memory_and_leaves_the_aliases(worlds):
    worlds(2).run(released)


def gradient_dtypes():
    job = Job(SHAPES, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    job.dc.start_backward(True)
    job.end_backward([job.reduce(i, 1) for i in range(len(SHAPES))])
    for i in range(len(SHAPES)):
        job.check_buffer(i, job.mean(i, 1), tolerance=2e-2)
    job.close()


def ended_in_a_trace():
    job = Job(SHAPES)
    for step in range(1, 11):
        job.dc.start_backward(True)
        done = [job.reduce(i, step) for i in range(len(SHAPES))]
        with FakeTensorMode(allow_non_fake_inputs=True):
            job.end_backward()  # this thread may be the one that starts the reductions
        assert len(done) == len(SHAPES)
        for i in range(len(SHAPES)):
            job.check_buffer(i, job.mean(i, step), tolerance=1e-5)
    job.close()


def test_reductions_may_be_started_by_a_thread_that_traces(worlds):
    worlds(2).run(ended_in_a_trace)


def used_while_a_graph_is_compiled():
    job = Job(SHAPES)
    with enable_python_dispatcher():  # it calls operators with the interpreter locked
        job.dc.enable_profiling(True)
        for i in list(range(len(SHAPES))) * 5:
            job.use(i)
            job.dc.invalidate_gathered_param(i)
        job.dc.enable_profiling(False)
        for i in range(len(SHAPES)):
            job.use(i)
        job.backward(1, update=True)
    for i in range(len(SHAPES)):
        job.check_buffer(i, job.mean(i, 1))
    job.close()


def test_operators_may_run_while_a_graph_is_compiled(worlds):
    worlds(2).run(used_while_a_graph_is_compiled)


def other_threads_go_on():
    job = Job(SHAPES)
    peer, ball = 1 - job.rank, torch.zeros(1)

    def play():
        for _ in range(200):
            dist.send(ball, peer) if job.rank == 0 else dist.recv(ball, peer)
            dist.recv(ball, peer) if job.rank == 0 else dist.send(ball, peer)

    game = threading.Thread(target=play)
    game.start()
    if job.rank == 1:
        game.join()  # so that the other rank waits in its operator for all that
    with enable_python_dispatcher():
        job.use(0)
    game.join()
    job.close()


def test_a_waiting_operator_leaves_the_interpreter_to_others(worlds):
    worlds(2).run(other_threads_go_on)


def test_gradients_travel_in_the_dtype_that_was_registered(worlds):
    worlds(2).run(gradient_dtypes)


class SingleBuffer(Config):
    double_buffer = False
    sync_before_reduce = sync_after_reduce = True
    sync_before_allgather = sync_after_allgather = True


def small_buckets(config):
    job = Job(SHAPES, bucket=70, config=config)
    for _ in range(2):
        for i in range(len(SHAPES)):
            job.use(i)
        job.backward(1, update=True)
        for i in range(len(SHAPES)):
            job.check_buffer(i, job.mean(i, 1))
        job.update()
    stats = job.dc.stats()
    job.close()
    return stats


@pytest.mark.parametrize("config", [Config, SingleBuffer])
def test_gradients_larger_than_a_bucket_travel_in_parts(worlds, config):
    for stats in worlds(2).run(small_buckets, config):
        assert stats["reduces"] > 2 * len(SHAPES)
        assert stats["bucket_bytes"] == 0  # released by the last graph of the backward


def frozen():
    job = Job(SHAPES, frozen=(2,), persistent=(2,))
    for step in range(3):
        before = job.dc.stats()["gathered"]
        gathered = job.gather(2)
        assert torch.equal(gathered, torch.arange(64 * 33).view(64, 33) % 128 + 2.0)
        job.release(2)
        assert job.dc.stats()["gathered"] - before == (step == 0)
        job.dc.start_backward(True)
        job.reduce(2, 1)
        job.end_backward([job.reduce(i, 1) for i in (0, 1)])
    job.close()


def test_frozen_parameters_are_not_gathered_anew(worlds):
    worlds(2).run(frozen)  # P15


def called_from_threads():
    job = Job(SHAPES)
    failures = []

    def backward(update):
        try:
            job.backward(1, update=update)
        except BaseException as failure:
            failures.append(failure)

    for _ in range(3):
        for i in range(len(SHAPES)):
            job.use(i)
        thread = threading.Thread(target=backward, args=(True,))
        thread.start()
        thread.join()
        assert not failures, failures
        for i in range(len(SHAPES)):
            job.check_buffer(i, job.mean(i, 1))
        job.update()
    job.close()


def test_operators_may_come_from_several_threads_in_turn(worlds):
    worlds(2).run(called_from_threads)


# ---- profiling ----------------------------------------------------------------------------------


def profiled(dry):
    job = Job(SHAPES)
    for i in range(len(SHAPES)):
        job.use(i)
    job.dc.start_backward(True)
    job.reduce(0, 1)
    held = job.gather(1)
    job.dc.enable_profiling(True, dry)
    assert job.dc.is_profiling()
    for i in range(len(SHAPES)):
        for _ in range(3):
            gathered = job.gather(i)
            assert gathered.shape == torch.Size(SHAPES[i])
            if not dry:
                assert torch.equal(gathered, job.value(i))
        job.dc.invalidate_gathered_param(i)
        job.release(i)
        kept = job.gather(i)
        job.release(i)
        assert kept.untyped_storage().nbytes() == 0
        job.reduce(i, 100)
    job.end_backward()
    job.dc.clear_all_gathered_params()
    job.dc.enable_profiling(False)
    assert torch.equal(held, job.value(1))
    job.release(1)
    job.end_backward([job.reduce(i, 1) for i in range(1, len(SHAPES))])
    for i in range(len(SHAPES)):
        job.check_buffer(i, job.mean(i, 1))
    job.close()


@pytest.mark.parametrize("dry", [False, True])
def test_profiling_in_the_middle_of_a_backward_changes_nothing(worlds, dry):
    worlds(2).run(profiled, dry)


def traced():
    job = Job(SHAPES)
    job.dc.start_backward(False)
    job.end_backward([job.reduce(i, 1) for i in range(len(SHAPES))])
    job.dc.start_backward(True)
    for _ in range(2):
        torch.ops.dc.end_backward.default([None], GRAPH, True)
    job.end_backward([job.reduce(i, 2) for i in range(len(SHAPES))])
    for i in range(len(SHAPES)):
        job.check_buffer(i, job.mean(i, 3))
    job.close()


def test_an_end_of_a_backward_that_reduced_nothing_changes_nothing(worlds):
    worlds(2).run(traced)


def gathers_on_record(path):
    from penstock import dc

    job = Job([(5, 3), (4,)])
    with dc.trace(path) as own:
        for i in range(2):
            job.gather(i)
            job.release(i)
    job.close()
    return own.path


def test_a_trace_has_the_gathers_of_all_ranks(worlds, tmp_path):
    paths = worlds(2).run(gathers_on_record, str(tmp_path / "rank{rank}.json"))
    assert paths == [str(tmp_path / f"rank{rank}.json") for rank in range(2)]
    for path in paths:
        events = json.loads(Path(path).read_text())["traceEvents"]
        names = {event["name"] for event in events if event["ph"] == "X"}
        assert {"parameter 0", "parameter 1"} <= names


def go_on_with_another_graph():
    """A graph is broken off while it holds a parameter, and never runs again."""
    job = Job(SHAPES, persistent=(1,))
    other = GRAPH + 1
    job.dc.register_graph_z3(other, list(range(len(SHAPES))))
    for i in (0, 1):
        job.gather(i)
    for _ in range(3):
        for i in range(len(SHAPES)):
            job.use(i, graph=other)
        job.backward(1, update=True, graph=other)
        job.update()
        job.dc.step_ends()
    job.close()


def test_a_graph_that_was_broken_off_holds_no_parameter_back(worlds):
    worlds(2).run(go_on_with_another_graph)


class Reducing(torch.autograd.Function):
    """A graph whose backward reduces parameter 0 with a factor."""

    @staticmethod
    def forward(ctx, x, job, factor):
        ctx.given = job, factor
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        job, factor = ctx.given
        job.end_backward([job.reduce(0, factor)], release=False)
        return grad, None, None


def go_back_over_two_forwards(lasts):
    """DeepSpeed says for each forward's output that the backward begins."""
    job = Job([(5, 3)])
    for last in lasts:
        x = torch.ones(1, requires_grad=True)
        outputs = [Reducing.apply(x, job, factor) for factor in (1, 10)]
        for output in outputs:
            output.register_hook(lambda grad, last=last: job.dc.start_backward(last))
        sum(outputs).sum().backward()
    job.check_buffer(0, job.mean(0, 11 * len(lasts)))
    job.close()


@pytest.mark.parametrize("lasts", [(True,), (False, True)])
def test_a_backward_over_two_forwards_begins_once(worlds, lasts):
    worlds(2).run(go_back_over_two_forwards, lasts)
