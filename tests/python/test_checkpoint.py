"""Blocks that recompute their activations: by hand, and by what is measured and left."""

import gc
import logging
from contextlib import contextmanager

import models
import penstock
import pytest
import torch
from equality import train_both, whole, world
from models import WIDTH, Block, Net, batch, make
from penstock import PenstockError, _activations, _budget, _keeping
from penstock._budget import Offer, choose
from penstock._checkpoint import Way
from penstock._engine import engine_of
from torch import nn

on_gpus = pytest.mark.skipif(
    models.DEVICE != "cuda", reason="nobody counts memory on CPUs: PENSTOCK_TEST_DEVICE=cuda"
)
on_cpus = pytest.mark.skipif(models.DEVICE == "cuda", reason="bytes are those of CPUs")
STEPS = 6
OF_A_BLOCK = 1024  # bytes that a block of Net keeps of a batch of four: two tensors
AMPLE = 1 << 30


class DroppingBlock(Block):
    """Draws random numbers, and takes its input by name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock(11 + 2 * i) for i in range(3))

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x)
        return x


class Trainer:
    """A sharded model, and how often its blocks are run in each step."""

    def __init__(self, kind=Net, *, compiles="", frozen=(), **shard):
        self.model = make(kind)
        for block in frozen:
            self.model.blocks[block].requires_grad_(False)
        if compiles == "before":
            self._compile()
        penstock.shard(self.model, **shard)
        if compiles == "after":
            self._compile()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seen = []
        self.runs = dict.fromkeys(range(len(self.model.blocks)), 0)
        for place, block in enumerate(self.model.blocks):
            if not compiles:
                block.up.register_forward_hook(lambda *_, place=place: self._count(place))

    def _compile(self):
        for block in self.model.blocks:
            block.compile(backend="aot_eager")

    def _count(self, place):
        self.runs[place] += 1
        if isinstance(_activations.now, Clock):
            _activations.now.run(place, engine_of(self.model).checkpointed[place].way)

    def loss(self, step, size=4):
        rank, _ = world()
        return self.model(batch(step, rank, size), rank).square().mean()

    def step(self, step=0, size=4, pieces=1):
        """Train a step; return how often each block was run in it."""
        before = dict(self.runs)
        for piece in range(pieces):
            loss = self.loss(100 * step + piece, size)
            loss.backward()
            self.seen.append(loss.detach())
        self.seen += [whole(p.grad) for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [self.runs[place] - before[place] for place in self.runs]

    def train(self, steps=STEPS, **options):
        return [self.step(step, **options) for step in range(steps)]

    @property
    def kept(self):
        return [b.unit.name for b in engine_of(self.model).checkpointed if not b.recomputes]

    def finish(self):
        """Return all that training has shown: losses, gradients, parameters."""
        self.seen += [whole(parameter) for parameter in self.model.parameters()]
        penstock.close(self.model)
        return self.seen


def train(kind=Net, seed=5, **options):
    trainer = Trainer(kind, **options)
    torch.manual_seed(seed)
    trainer.train()
    return trainer.finish()


def assert_same(found, want):
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)


# ---- what is trained is the same -----------------------------------------------------------------

WAYS = {
    "all by hand": {"checkpoint": Block},
    "one by hand": {"checkpoint": "blocks.1"},
    "recomputed": {"checkpoint": "auto", "memory": 1},
    "kept": {"checkpoint": "auto", "memory": AMPLE},
    "some kept": {"checkpoint": "auto", "memory": 2 * OF_A_BLOCK},
}


def train_in_all_ways(stage, compiled=("before", "after")):
    torch._dynamo.reset()
    for compiles in ("", *compiled):
        # What is compiled and recomputed on a GPU draws from a generator that torch makes for it.
        kind = Net if compiles and models.DEVICE == "cuda" else Dropping
        want = train(kind, stage=stage, compiles=compiles)
        for name in ("some kept",) if compiles else WAYS:
            options = WAYS[name]
            found = train(kind, stage=stage, compiles=compiles, **options)
            try:
                assert_same(found, want)
            except AssertionError as error:
                raise AssertionError(f"{name}, compiled {compiles!r}") from error


# On GPUs each model makes communicators anew.
FEW = [(1, 3), (2, 3), (3, 3)]
MORE = [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize(("size", "stage"), FEW + MORE * (models.DEVICE == "cpu"))
def test_training_is_the_same_bit_for_bit(worlds, size, stage):
    compiled = ("before", "after") if size == 2 else ()
    worlds(size).run(train_in_all_ways, stage, compiled)


def test_training_without_process_group_is_the_same_bit_for_bit():
    train_in_all_ways(3)


KINDS = [
    models.Tied,
    models.Frozen,
    models.FrozenBetween,
    models.Twice,
    models.Unused,
    models.OnOneRank,
    models.Reparametrized,
    models.NestedValues,
    models.Mixed,
    models.Checkpointed,
    models.CheckpointedReentrant,
    models.CheckpointedInside,
    models.CheckpointedInsideReentrant,
    models.CheckpointedPairs,
    models.ReadInCheckpoint,
    models.LookedUp,
]


def train_kinds(options):
    for kind in KINDS:
        penstock.close(train_both(kind, steps=STEPS, **options))


BY_HAND = {"stage": 1, "checkpoint": "*"}
AS_MEASURED = {"stage": 3, "checkpoint": "auto", "memory": 2 * OF_A_BLOCK}


@on_cpus
@pytest.mark.parametrize("options", [BY_HAND, AS_MEASURED], ids=["by hand", "as measured"])
def test_all_kinds_of_models_equal_unsharded(worlds, options):
    worlds(2).run(train_kinds, options)


# ---- by hand -------------------------------------------------------------------------------------


def test_blocks_are_named_by_hand():
    some = {
        "name": ("blocks.1", [1, 2, 1]),
        "pattern": ("blocks.[02]", [2, 1, 2]),
        "class": (Block, [2, 2, 2]),
        "predicate": (lambda name, module: name.endswith("0"), [2, 1, 1]),
        "several": (["blocks.0", "blocks.2"], [2, 1, 2]),
        "nobody": ([], [1, 1, 1]),
    }
    for checkpoint, want in some.values():
        trainer = Trainer(checkpoint=checkpoint)
        assert trainer.train(3) == [want] * 3
        figures = penstock.stats(trainer.model)
        assert (figures.kept_blocks, figures.recomputed_blocks) == (0, want.count(2))
        trainer.finish()


def test_a_module_is_given_itself():
    model = make(Net)
    penstock.shard(model, checkpoint=[model.blocks[1]])
    assert [block.unit.name for block in engine_of(model).checkpointed] == ["blocks.1"]
    assert type(model.blocks[1]).__name__ == "Block" and isinstance(model.blocks[1], Block)
    penstock.close(model)


def refuses(text, **options):
    with pytest.raises(PenstockError, match=text) as caught:
        penstock.shard(make(Net), **options)
    assert caught.value.status == "EINVAL"


def test_a_wrong_checkpoint_is_named():
    refuses("^checkpoint=5: give names, patterns", checkpoint=5)
    refuses(r"^checkpoint= holds 5: give names", checkpoint=[5])
    refuses("^checkpoint= names 'norm', which matches no block of Net", checkpoint="norm")
    refuses("^checkpoint= names <class '.*LayerNorm'>, which matches no", checkpoint=nn.LayerNorm)
    with pytest.raises(PenstockError, match="^checkpoint='auto': Linear has no blocks"):
        penstock.shard(nn.Linear(3, 3).to(models.DEVICE), checkpoint="auto", memory=AMPLE)


def test_a_wrong_memory_is_named():
    for memory in (0, -1, 1.5, 0.0, True, "all", [], float("nan")):
        refuses("^memory=.*a number of bytes", memory=memory)
        refuses("^memory=.*a number of bytes", checkpoint="auto", memory=memory)


@on_cpus
def test_on_a_cpu_memory_is_bytes():
    refuses("^memory='auto'.*on cpu.*give the bytes", checkpoint="auto")
    for memory in ("auto", 0.5):
        refuses("^memory=.*on cpu.*give the bytes", memory=memory)


class Messages(logging.Handler):
    """What is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("penstock").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_what_the_model_checkpoints_itself_is_run_anew_once():
    for checkpoint in ({"checkpoint": Block}, {"checkpoint": "auto", "memory": AMPLE}):
        messages = Messages()
        trainer = Trainer(models.Checkpointed, **checkpoint)
        assert trainer.train(STEPS) == [[2, 2, 2]] * STEPS
        told = [line for line in messages.lines if "checkpointed by the model itself" in line]
        assert len(told) == 3 and "'blocks.0'" in told[0]
        trainer.finish()


def run_transformers(own):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=31,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(models.DEVICE)
    if own:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    penstock.shard(model, checkpoint=type(model.model.layers[0]))
    runs = []
    # A recomputation ends where the backward has all it needs: before the end of the forward.
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    tokens = torch.arange(12, device=models.DEVICE).view(2, 6)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    found = [whole(parameter.grad) for parameter in model.parameters()]
    penstock.close(model)
    assert len(runs) == 2
    return found


def test_layers_of_transformers_are_run_anew_once_whoever_checkpoints_them():
    assert_same(run_transformers(own=True), run_transformers(own=False))


# ---- by what is measured -------------------------------------------------------------------------


def test_offers_are_chosen_by_time_saved_a_byte():
    def chosen(offers, budget):
        found = choose([[offer] for offer in offers], budget)
        return [place for place, one in enumerate(found) if one is not None]

    offers = [Offer(10, 50), Offer(10, 100), Offer(40, 240), Offer(5, 0), Offer(10, 50)]
    assert chosen(offers, 0) == chosen(offers, 9) == []
    assert chosen(offers, 10) == [1]
    assert chosen(offers, 20) == [1, 4]  # of equal ones the later
    assert chosen(offers, 50) == [1, 2]
    assert chosen(offers, 1000) == [0, 1, 2, 4]
    assert chosen([Offer(0, 1)], 0) == [0]
    assert chosen([Offer(0, 1)], -1) == []


def test_of_each_the_offer_is_chosen_that_saves_most_a_byte_more():
    each = [Offer(14, 130), Offer(9, 120)]  # all, and selectively
    assert choose([each] * 3, 9) == [None, None, 1]
    assert choose([each] * 3, 27) == [1, 1, 1]
    assert choose([each] * 3, 32) == [1, 1, 0]  # and what is left takes the rest of one
    assert choose([each] * 3, 42) == [0, 0, 0]
    # Keeping all is worth more a byte at once: what lies between is passed over.
    assert choose([[Offer(10, 100), Offer(8, 60)]] * 2, 18) == [None, 0]
    assert choose([[Offer(10, 100), Offer(12, 90)]], 100) == [0]
    assert choose([[], [Offer(1, 1)]], 1) == [None, 0]


@on_cpus
def test_all_is_recomputed_until_the_third_step_has_ended():
    trainer = Trainer(checkpoint="auto", memory=AMPLE)
    assert trainer.train(5) == [[2, 2, 2]] * 3 + [[1, 1, 1]] * 2
    figures = penstock.stats(trainer.model)
    assert (figures.kept_blocks, figures.recomputed_blocks) == (3, 0)
    assert figures.kept_activations_bytes == 3 * OF_A_BLOCK and figures.saved_recomputing_ns > 0
    trainer.finish()


@on_cpus
def test_without_steps_of_an_optimizer_all_is_recomputed():
    trainer = Trainer(checkpoint="auto", memory=AMPLE)
    for step in range(8):
        trainer.loss(step).backward()
    assert set(trainer.runs.values()) == {16}
    trainer.finish()


class Clock:
    """A clock by which running blocks anew, from the last one to the first, takes so long.

    All of each, or what a selective checkpoint leaves.
    """

    def __init__(self, nanoseconds, selective=()):
        self._nanoseconds = nanoseconds
        self._selective = selective or nanoseconds
        self._time = 0

    def __call__(self):
        return self._time

    def run(self, place, way):
        """Have a block run, in a forward or anew."""
        if torch._C._current_graph_task_id() != -1:
            times = self._selective if way is Way.SELECT else self._nanoseconds
            self._time += times[(2 - place) % len(times)]


@contextmanager
def activations_alone(tries=False):
    """Have memory pay for nothing else: how long gathers take depends on the machine.

    Nor for what is saved selectively, unless that is tried.
    """
    before = _keeping.make_drafts, _keeping.find_trial
    _keeping.make_drafts = lambda *given: before[0](*given)[:1]
    _keeping.find_trial = before[1] if tries else lambda *_: {}
    try:
        yield
    finally:
        _keeping.make_drafts, _keeping.find_trial = before


def keep_by(clocks, memories, **options):
    """Return what is kept where each rank has a clock and a memory of its own."""
    rank, _ = world()
    before, _activations.now = _activations.now, Clock(clocks[rank])
    try:
        with activations_alone():
            trainer = Trainer(checkpoint="auto", memory=memories[rank], **options)
            trainer.train(5)
            kept = trainer.kept
            trainer.finish()
        return kept
    finally:
        _activations.now = before


@on_cpus
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_ranks_decide_alike_whatever_their_clocks_and_memory(worlds, stage):
    clocks = ([20, 30, 10], [20, 5, 90], [10, 10, 10])  # of blocks 2, 1, 0
    memories = (AMPLE, 2 * OF_A_BLOCK, 3 * OF_A_BLOCK)
    found = worlds(3).run(keep_by, clocks, memories, stage=stage)
    assert found == [["blocks.0", "blocks.1"]] * 3


@on_cpus
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_blocks_are_kept_by_worth_as_far_as_memory_goes(blocks):
    memory = max(1, blocks * OF_A_BLOCK + OF_A_BLOCK // 2)
    best = ["blocks.1", "blocks.0", "blocks.2"]
    assert keep_by([[1, 30, 20]], [memory]) == sorted(best[:blocks])


def kept_without_checkpoint(block, inputs):
    """Bytes of what a block saves for its backward, but for inputs and parameters."""
    there = {x.untyped_storage().data_ptr() for x in [inputs, *block.parameters()]}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            held[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = block(inputs)
    out.sum().backward()
    return sum(held.values())


@on_cpus
@pytest.mark.parametrize("compiles", ["", "before", "after"])
@pytest.mark.parametrize("kind", [Net, Dropping])
def test_what_is_measured_is_what_a_block_keeps(kind, compiles):
    torch._dynamo.reset()
    trainer = Trainer(kind, checkpoint="auto", memory=AMPLE, compiles=compiles)
    trainer.train(4, size=300)
    figures = engine_of(trainer.model).keeping._figures
    reference = make(kind)
    for block in reference.blocks:
        if compiles:
            block.compile(backend="aot_eager")
    inputs = torch.rand(300, WIDTH, requires_grad=True)
    want = [kept_without_checkpoint(block, inputs) for block in reference.blocks]
    assert [one.kept for one in figures.values()] == want
    trainer.finish()


@on_cpus
def test_micro_batches_are_measured_one_at_a_time():
    trainer = Trainer(checkpoint="auto", memory=3 * OF_A_BLOCK)
    assert trainer.train(5, pieces=2) == [[4, 4, 4]] * 3 + [[2, 2, 2]] * 2
    trainer.finish()


@on_cpus
@activations_alone()
def test_forwards_of_one_backward_are_measured_together():
    for memory, runs in ((3 * OF_A_BLOCK, 3), (6 * OF_A_BLOCK, 2)):
        trainer = Trainer(checkpoint="auto", memory=memory)
        for step in range(5):
            before = sum(trainer.runs.values())
            (trainer.loss(step) + trainer.loss(50 + step)).backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        assert sum(trainer.runs.values()) - before == {3: 10, 2: 6}[runs]
        trainer.finish()


@on_cpus
def test_evaluation_changes_nothing():
    trainer = Trainer(checkpoint="auto", memory=3 * OF_A_BLOCK)
    for step in range(30):
        assert trainer.step(step) == ([2, 2, 2] if step < 3 else [1, 1, 1]), step
        with torch.no_grad():
            trainer.loss(step, 64)
        trainer.loss(step)  # with a graph that nobody keeps
    trainer.finish()


@on_cpus
def test_a_graph_that_is_kept_is_recomputed_as_often_as_it_is_used():
    trainer = Trainer(checkpoint="auto", memory=AMPLE)
    for step in range(4):
        loss = trainer.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    assert trainer.runs[0] == 3 * 3 + 1
    trainer.finish()


# ---- steps that grow -----------------------------------------------------------------------------


def grow(grown_ranks, size):
    rank, _ = world()
    with activations_alone():
        trainer = Trainer(checkpoint="auto", memory=3 * OF_A_BLOCK)
        trainer.train(5)
        size = size if rank in grown_ranks else 4
        runs = [trainer.step(step, size=size) for step in range(3 * _keeping._INTERVAL)]
        kept = trainer.kept
        trainer.finish()
    return runs, kept


@on_cpus
def test_a_step_that_grows_is_recomputed_at_once_and_decided_anew(worlds):
    for grown_ranks in ([0, 1], [1]):
        answers = worlds(2).run(grow, grown_ranks, 30)  # each block keeps 3 KiB
        for rank, (runs, kept) in enumerate(answers):
            assert len(kept) == 1, kept
            assert sum(runs[-1]) == 5
            if rank in grown_ranks:
                assert runs[0] == [2, 2, 2]
            else:
                assert runs[0] == [1, 1, 1]
        assert answers[0][1] == answers[1][1]


@on_cpus
@activations_alone()
def test_a_rare_step_that_is_larger_changes_nothing_for_others():
    trainer = Trainer(checkpoint="auto", memory=3 * OF_A_BLOCK)
    trainer.train(5)
    for step in range(40):
        is_large = step % 10 == 5
        want = [2, 2, 2] if is_large else [1, 1, 1]
        assert trainer.step(step, size=64 if is_large else 4) == want
    trainer.finish()


@on_cpus
@activations_alone()
def test_a_peak_takes_back_what_it_needs_once(monkeypatch):
    trainer = Trainer(checkpoint="auto", memory=3 * OF_A_BLOCK)
    trainer.train(5)
    assert len(trainer.kept) == 3
    monkeypatch.setattr(_budget, "left_at_peak", lambda *_: -OF_A_BLOCK // 2)
    monkeypatch.setattr(_budget, "peak_of", lambda _: 100)  # of an evaluation, say
    trainer.train(4 * _keeping._INTERVAL)
    assert len(trainer.kept) == 2
    trainer.finish()


class GrowsBehind(Net):
    """The second and the third block get more than the first."""

    rows = 4

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.blocks[0](x).repeat(self.rows // 4, 1)
        return self.blocks[2](self.blocks[1](x))


@on_cpus
@activations_alone()
def test_growth_within_a_pass_is_measured_in_the_next_one():
    trainer = Trainer(GrowsBehind, checkpoint="auto", memory=3 * OF_A_BLOCK)
    trainer.train(5)
    trainer.model.rows = 64
    assert trainer.step() == [1, 2, 2]
    assert trainer.step() == [2, 2, 2]
    trainer.train(2 * _keeping._INTERVAL)
    assert trainer.kept == ["blocks.0"]
    trainer.finish()


@on_cpus
def test_parameters_that_are_unfrozen_begin_anew(worlds):
    worlds(2).run(unfreeze)


def unfreeze():
    trainer = Trainer(checkpoint="auto", memory=AMPLE, frozen=[1])
    trainer.train(5)
    assert len(trainer.kept) == 3
    trainer.model.blocks[1].requires_grad_(True)
    assert trainer.train(5) == [[2, 2, 2]] * 3 + [[1, 1, 1]] * 2
    trainer.finish()


@on_cpus
@activations_alone()
def test_what_is_kept_is_logged_once():
    messages = Messages()
    logger = logging.getLogger("penstock")
    before, _ = logger.level, logger.setLevel(logging.INFO)
    trainer = Trainer(checkpoint="auto", memory=2 * OF_A_BLOCK)
    trainer.train(2 * _keeping._INTERVAL)
    logger.setLevel(before)
    told = [line for line in messages.lines if "activations of" in line]
    assert len(told) == 1 and "2 of 3 blocks are kept: 2.0 KiB of 2.0 KiB" in told[0], told
    trainer.finish()


# ---- on GPUs -------------------------------------------------------------------------------------

WIDE = 1024
ROWS = 16384  # of which a tensor of that width has 64 MiB
MIB = 1 << 20


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, WIDE)
        self.down = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(torch.tanh(x))))  # keeps two tensors


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WideBlock() for _ in range(12))

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train_wide(rows, steps=7, **options):
    """Return the trained model, and the peak of the last step."""
    gc.collect()  # a model of before
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = penstock.shard(Wide().cuda(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.rand(rows(step), WIDE, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, torch.cuda.max_memory_allocated()


def within_bytes():
    model, least = train_wide(lambda _: ROWS, checkpoint="*")
    penstock.close(model)
    del model
    for blocks in (0, 5):
        memory = least + blocks * 128 * MIB + 64 * MIB
        model, peak = train_wide(lambda _: ROWS, checkpoint="auto", memory=memory)
        figures = penstock.stats(model)
        penstock.close(model)
        del model
        # One more fits where the last block's is gone before the peak.
        assert abs(figures.kept_blocks - blocks) <= 1, figures
        assert figures.kept_activations_bytes == figures.kept_blocks * 128 * MIB
        assert peak <= memory


@on_gpus
def test_a_gpu_holds_no_more_than_given(worlds):
    worlds(1).run(within_bytes)


def within_what_is_there():
    """Take what the process may have for the device's memory: more than recomputing needs."""
    model, least = train_wide(lambda _: 2 * ROWS, checkpoint="*")
    penstock.close(model)
    del model
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    limit = least + 600 * MIB + _budget._MARGIN * total
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        model, _ = train_wide(lambda _: ROWS, checkpoint="auto")
        assert penstock.stats(model).kept_blocks > 0
        penstock.close(model)
        del model
        model, _ = train_wide(
            lambda step: ROWS + min(ROWS, step * ROWS // 16), steps=40, checkpoint="auto"
        )
        assert 0 < penstock.stats(model).kept_blocks < 12
        penstock.close(model)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@on_gpus
def test_a_batch_that_grows_never_runs_out_of_memory(worlds):
    worlds(1).run(within_what_is_there)
