"""Which blocks keep, offload or recompute their activations: figures in, choice out."""

import logging
import os
import random
import time
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from equality import world
from models import DEVICE
from penstock import _activations, _keeping, _offload, _ways, stats
from penstock._budget import Offer
from penstock._engine import engine_of
from penstock._figures import Figures
from penstock._keeping import _INTERVAL
from penstock._ways import _LEAST_SAVED, _SHARE, Block, Choice, Link, Ways, measure_link, waits
from test_checkpoint import (
    OF_A_BLOCK,
    Clock,
    Messages,
    Trainer,
    activations_alone,
    assert_same,
    on_cpus,
    on_gpus,
    train,
)

TIME = 1_000_000  # nanoseconds of a block's forward
SIZE = 1 << 20
AMPLE = 1 << 40
CHOSEN = {"checkpoint": "auto", "offload": "activations"}
EQUAL = [Offer(SIZE, TIME)] * 8


def link_of(copies, host_bytes=AMPLE):
    """A link whose copies of a block take so many forwards of one."""
    rate = int(SIZE / (_SHARE * copies * TIME * 1e-9))
    return Link(rate, rate, host_bytes)


def blocks_of(offers):
    return [Block(offer) for offer in offers]


def chosen(offers, room, link=None):
    choice = Ways(blocks_of(offers), link).choose(room)
    return list(choice.kept), list(choice.offloaded)


# ---- what compute waits --------------------------------------------------------------------------


def waited(offloaded, copies, offers=EQUAL):
    return round(waits(offers, offloaded, link_of(copies)) / TIME, 3)


def test_copies_that_are_as_fast_as_a_forward_hide():
    assert waited(range(8), 1.0) == waited(range(8), 0.1) == waited([], 9.0) == 0


def test_a_forward_waits_for_the_copies_of_the_call_before():
    assert waited([0, 1], 1.5) == 0.5
    assert waited(range(8), 1.5) == 7 * 0.5
    assert waited([0, 2, 4, 6], 1.5) == waited([0, 2, 4, 6], 2.0) == 0


def test_a_backward_waits_for_what_begins_one_call_before():
    assert waited([0, 1], 3.0) == 2.0 + 1.0  # of which the backward of a block hides two
    assert waited([0, 7], 7.0) == 0
    assert waited([5], 100.0) == 0  # the last one's stay


# ---- what is chosen ------------------------------------------------------------------------------


def test_without_a_link_nothing_is_offloaded():
    assert chosen(EQUAL, 3 * SIZE) == ([5, 6, 7], [])
    assert chosen(EQUAL, 0) == ([], [])


def test_all_is_kept_where_there_is_room():
    assert chosen(EQUAL, 8 * SIZE, link_of(0.1)) == (list(range(8)), [])


def test_a_fast_link_takes_what_does_not_fit():
    assert chosen(EQUAL, SIZE, link_of(0.5)) == ([], list(range(8)))
    assert chosen(EQUAL, 4 * SIZE, link_of(0.5)) == ([5, 6, 7], list(range(5)))


def test_while_one_leaves_the_next_one_is_made():
    assert chosen(EQUAL, SIZE - 1, link_of(0.5)) == ([], [])
    choice = Ways(blocks_of(EQUAL), link_of(0.5)).choose(SIZE)
    assert choice == Choice(offloaded=tuple(range(8)), size=SIZE, nanoseconds=8 * TIME)


def test_a_slow_link_takes_blocks_that_lie_apart():
    assert chosen(EQUAL, SIZE, link_of(2.0)) == ([], [0, 2, 4, 6])
    assert chosen(EQUAL, 5 * SIZE, link_of(2.0)) == ([1, 3, 5, 7], [0, 2, 4, 6])
    assert chosen(EQUAL, SIZE, link_of(3.0)) == ([], [0, 3, 6])


def test_waits_count_against_what_an_offload_saves():
    just_over = Ways(blocks_of(EQUAL), link_of(1.1)).choose(SIZE)
    assert just_over.offloaded == tuple(range(8))
    assert just_over.nanoseconds == pytest.approx(8 * TIME - 7 * 0.1 * TIME, rel=1e-3)


def test_keeping_is_better_than_waiting():
    # One block fits beside the window, or two without: two that are kept save more.
    two = [Offer(SIZE, TIME)] * 2
    assert chosen(two, 2 * SIZE, link_of(0.5)) == ([0, 1], [])


def test_the_hosts_memory_limits_what_is_offloaded():
    assert chosen(EQUAL, SIZE, link_of(0.5, 3 * SIZE)) == ([], [0, 1, 2])
    assert chosen(EQUAL, SIZE, link_of(0.5, SIZE - 1)) == ([7], [])


def test_what_saves_most_a_byte_goes_first():
    offers = [Offer(SIZE, TIME), Offer(SIZE, 9 * TIME), Offer(3 * SIZE, 3 * TIME), Offer(SIZE, 0)]
    assert chosen(offers, SIZE, link_of(0.1, SIZE)) == ([1], [])  # alone it would stay anyway
    assert chosen(offers, SIZE, link_of(0.1, 2 * SIZE)) == ([], [0, 1])
    assert chosen(offers, 10 * SIZE, link_of(0.1)) == ([0, 1, 2], [])


SOME = Block(Offer(14 * SIZE, 13 * TIME), Offer(9 * SIZE, 12 * TIME))  # all, and selectively
COMPILED = replace(SOME, leaves=True)


def test_what_is_dear_to_recompute_is_kept_first():
    choice = Ways([SOME] * 4).choose(27 * SIZE)
    assert choice == Choice(selective=(1, 2, 3), size=27 * SIZE, nanoseconds=36 * TIME)
    choice = Ways([SOME] * 4).choose(42 * SIZE)  # one of them goes on to keep all
    assert choice == Choice((3,), (0, 1, 2), size=41 * SIZE, nanoseconds=49 * TIME)
    assert Ways([SOME] * 4).choose(56 * SIZE).kept == (0, 1, 2, 3)


def test_what_saves_less_a_byte_than_keeping_all_is_passed_over():
    dear = Block(Offer(14 * SIZE, 14 * TIME), Offer(9 * SIZE, 8 * TIME))
    assert Ways([dear] * 4).choose(27 * SIZE) == Choice((3,), size=14 * SIZE, nanoseconds=14 * TIME)


def test_a_slow_link_takes_what_is_dear_to_recompute():
    link = Link(*[int(1.5 * SIZE / (_SHARE * TIME * 1e-9))] * 2, AMPLE)
    plain, compiled = (Ways([block] * 8, link).choose(14 * SIZE) for block in (SOME, COMPILED))
    assert (plain.offloaded, plain.offloaded_selectively) == (tuple(range(8)), ())
    assert compiled == plain
    slow = replace(link, down=link.down // 2, up=link.up // 2)
    plain, compiled = (Ways([block] * 8, slow).choose(14 * SIZE) for block in (SOME, COMPILED))
    assert (plain.offloaded, plain.offloaded_selectively) == ((0, 2, 4, 6, 7), ())
    assert compiled.offloaded == compiled.offloaded_selectively == tuple(range(8))
    assert compiled.nanoseconds > plain.nanoseconds and compiled.size == 9 * SIZE


def test_what_is_chosen_fits_and_saves_what_it_says():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(200):
        blocks = [draw_block(draw) for _ in range(draw.randrange(1, 12))]
        link = link_of(draw.choice([0.2, 0.9, 1.4, 3.0]), draw.randrange(0, 20) * SIZE)
        room = draw.randrange(0, 20) * SIZE
        choice = Ways(blocks, link).choose(room)
        without = Ways(blocks).choose(room)
        here = [blocks[i].keep for i in choice.kept] + [blocks[i].select for i in choice.selective]
        leave = {
            i: blocks[i].select if i in choice.offloaded_selectively else blocks[i].keep
            for i in choice.offloaded
        }
        window = max((offer.size for offer in leave.values()), default=0)
        assert sum(offer.size for offer in here) + window == choice.size <= room
        assert sum(offer.size for offer in leave.values()) <= link.host_bytes
        places = (*choice.kept, *choice.selective, *choice.offloaded)
        assert len(places) == len(set(places))
        assert set(choice.offloaded_selectively) <= set(choice.offloaded)
        saved = sum(offer.nanoseconds for offer in (*here, *leave.values()))
        keeps = [block.keep for block in blocks]
        copies = [Offer(leave.get(i, o).size, o.nanoseconds) for i, o in enumerate(keeps)]
        waited = waits(copies, leave, link)
        assert choice.nanoseconds == saved - waited
        assert choice.nanoseconds >= without.nanoseconds
        if choice.offloaded:
            assert waited <= _LEAST_SAVED * saved


def test_the_peak_rises_by_what_is_kept_when_it_is_reached(monkeypatch):
    monkeypatch.setattr(_ways, "_GRAIN", SIZE)
    seed = int(os.environ.get("PST_SEED", time.time_ns() % 2**32))
    print(f"PST_SEED={seed}")
    draw = random.Random(seed)
    for _ in range(100):
        # What is used without anything kept: by the loss, then in the backward of each block.
        count = draw.randrange(1, 12)
        used = [draw.randrange(40) * SIZE for _ in range(count + 1)]
        highest = list(accumulate(used, max))  # by then; the last block's backward comes first
        levels = [highest[count - 1 - i] - highest[-1] for i in range(count)]
        blocks = [replace(draw_block(draw), level=level) for level in levels]
        room = draw.randrange(0, 60) * SIZE
        choice = Ways(blocks).choose(room)
        sizes = [0] * count
        for i in choice.kept:
            sizes[i] = blocks[i].keep.size
        for i in choice.selective:
            sizes[i] = blocks[i].select.size
        # The loss finds all of it, a block's backward what those before it keep.
        kept = [sum(sizes), *(sum(sizes[: count - 1 - k]) for k in range(count))]
        peak = max(use + more for use, more in zip(used, kept, strict=True))
        assert choice.size == peak - highest[-1] <= room
        least = Ways([replace(block, level=0) for block in blocks]).choose(room)
        assert choice.nanoseconds >= least.nanoseconds


def draw_block(draw):
    keep = Offer(draw.randrange(0, 5) * SIZE, draw.randrange(0, 5) * TIME)
    if draw.random() < 0.5:
        return Block(keep)
    part = Offer(int(draw.random() * keep.size), int(draw.random() * keep.nanoseconds))
    return Block(keep, part, leaves=draw.random() < 0.5)


# ---- by what is measured -------------------------------------------------------------------------


def use_of(inputs, kept, peak, *, is_counted=True):
    use = _activations.Use()
    use.inputs, use.kept, use.peak, use.is_counted = inputs, kept, peak, is_counted
    return use


def test_a_larger_use_that_was_not_counted_leaves_what_is_known():
    figures = Figures()
    figures.take(use_of(8, 100, 40), peak=50)
    figures.take(use_of(8, 0, 45, is_counted=False), peak=50)
    assert (figures.inputs, figures.kept, figures.level) == (8, 100, -5)
    figures.take(use_of(9, 0, 30, is_counted=False), peak=50)
    assert (figures.inputs, figures.kept, figures.level) == (8, 100, -5)
    figures.take(use_of(9, 110, 30), peak=50)
    assert (figures.inputs, figures.kept, figures.level) == (9, 110, -20)


def watched(nanoseconds):
    watch = _activations.Stopwatch(torch.device("cpu"))
    watch._begin, watch._end = 0, nanoseconds
    return watch


@pytest.mark.parametrize(
    ("forwards", "recomputations", "found"),
    [([7], [9], 7), ([9], [7], 7), ([4, 4], [5, 5], 8), ([7], [9, 9], 18), ([7], [], 0)],
)
def test_a_recomputation_takes_no_longer_than_a_forward(forwards, recomputations, found):
    use = use_of(8, 100, 40)
    use.forwards = [watched(time) for time in forwards]
    use.recomputations = [watched(time) for time in recomputations]
    figures = Figures()
    figures.take(use, peak=50)
    assert figures.nanoseconds == found


def count_by_steps():
    """Return the steps in which saved tensors were counted, and those that were recorded."""
    counted, recorded, count = set(), set(), _activations.Call.count
    with pytest.MonkeyPatch.context() as patch, activations_alone():
        trainer = Trainer(checkpoint="auto", memory=2 * OF_A_BLOCK)
        engine = engine_of(trainer.model)

        def note(call, tensors):
            counted.add(engine.keeping._steps)
            if engine.keeping._is_measured_step:
                recorded.add(engine.keeping._steps)
            count(call, tensors)

        patch.setattr(_activations.Call, "count", note)
        trainer.train()
        # Bytes are those of CPUs.
        assert DEVICE == "cuda" or 0 < stats(trainer.model).kept_blocks < 3
        trainer.finish()
    return counted, recorded


def test_bytes_are_counted_before_the_step_that_is_measured(worlds):
    for counted, recorded in worlds(2).run(count_by_steps):
        assert 1 in counted and not recorded


class Patched:
    """On CPUs: clocks that say how long each block takes, and a link by rank."""

    def __init__(self, monkeypatch, clock, link):
        monkeypatch.setattr(_activations, "now", Clock(clock))
        monkeypatch.setattr(_keeping, "measure_link", lambda device, host_bytes: link)
        monkeypatch.setattr(_offload, "_LEAST", 1)


def choose_by(clocks, links, memories, shard):
    """Train where each rank has figures of its own; return what is chosen, and all that is seen."""
    rank, _ = world()
    with pytest.MonkeyPatch.context() as patch, activations_alone():
        Patched(patch, clocks[rank], links[rank])
        trainer = Trainer(memory=memories[rank], **CHOSEN, **shard)
        torch.manual_seed(5)
        trainer.train()
        choice = engine_of(trainer.model).keeping._choice
        figures = stats(trainer.model)
        return choice.kept, choice.offloaded, figures, trainer.finish()


def alike(links, memories):
    clocks = ([20 * TIME] * 3, [30 * TIME, 10 * TIME, 10 * TIME])
    for stage in (1, 3):
        kept, offloaded, figures, seen = choose_by(clocks, links, memories, {"stage": stage})
        assert (figures.kept_blocks, figures.offloaded_blocks) == (len(kept), len(offloaded))
        assert figures.recomputed_blocks == 3 - len(kept) - len(offloaded)
        assert (figures.offload_bytes > 0) == bool(offloaded)
        assert_same(seen, train(stage=stage))
        yield kept, offloaded


def choices_alike(links, memories):
    return list(alike(links, memories))


FAST, NONE = Link(10**12, 10**12, AMPLE), Link(0, 0, 0)


@on_cpus
def test_the_ranks_decide_alike_and_train_the_same_bit_for_bit(worlds):
    some = 2 * OF_A_BLOCK
    for links, memories, want in (
        ((FAST, FAST), (some, AMPLE), ((1,), (0, 2))),
        ((FAST, Link(10**12, 10**12, OF_A_BLOCK)), (some, some), None),
        ((FAST, None), (some, some), ((1, 2), ())),
        ((FAST, FAST), (1, AMPLE), ((), ())),
    ):
        answers = worlds(2).run(choices_alike, links, memories)
        assert answers[0] == answers[1]
        assert want is None or answers[0] == [want] * 2, answers[0]


@on_cpus
def test_what_is_offloaded_is_logged(monkeypatch):
    messages = Messages()
    logger = logging.getLogger("penstock")
    before, _ = logger.level, logger.setLevel(logging.INFO)
    choose_by([[TIME]], [Link(25 * 10**9, 24 * 10**9, 1 << 30)], [2 * OF_A_BLOCK], {})
    logger.setLevel(before)
    told = [line for line in messages.lines if "activations of" in line]
    assert "1 of 3 blocks are kept: 1.0 KiB of 2.0 KiB" in told[0], told
    assert "beside 2 that are offloaded" in told[0] and "(blocks.2)" in told[0]
    assert "2 of 3 blocks are offloaded: 2.0 KiB of 1024.0 MiB of the host's" in told[1], told
    assert "25.0 GB/s to the host and 24.0 GB/s back (blocks.0, blocks.1)" in told[1]


@on_cpus
def test_a_step_that_grows_is_recomputed(monkeypatch):
    with activations_alone():
        Patched(monkeypatch, [TIME], FAST)
        trainer = Trainer(memory=2 * OF_A_BLOCK, **CHOSEN)
        assert trainer.train(5) == [[2, 2, 2]] * 3 + [[1, 1, 1]] * 2
        left = stats(trainer.model).offload_bytes
        assert trainer.step(size=30) == [2, 2, 2]
        assert stats(trainer.model).offload_bytes == left
        runs = [trainer.step(step, size=30) for step in range(3 * _INTERVAL)]
        assert runs[-1] == [2, 2, 2]  # the window of one does not fit any more
        trainer.finish()


@on_cpus
def test_nothing_is_offloaded_where_nobody_asks_for_it(monkeypatch):
    with activations_alone():
        Patched(monkeypatch, [TIME], FAST)
        trainer = Trainer(checkpoint="auto", memory=2 * OF_A_BLOCK)
        trainer.train(5)
        figures = stats(trainer.model)
        assert (figures.kept_blocks, figures.offloaded_blocks) == (2, 0)
        trainer.finish()


def test_there_is_no_link_on_cpus():
    assert measure_link(torch.device("cpu"), AMPLE) is None


@on_gpus
def test_a_link_of_a_gpu_is_measured():
    link = measure_link(torch.device(DEVICE), AMPLE)
    print(f"{link.down / 1e9:.1f} GB/s down, {link.up / 1e9:.1f} GB/s up")
    assert link.host_bytes == AMPLE and link.down > 0 and link.up > 0
