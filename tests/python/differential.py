"""Random programs run with a sharded model and with an unsharded one, and compared.

A seed makes a model, options of `shard`, and a program: backwards with and without `no_sync`,
optimizer steps, evaluations, failures, writes, loads, ... in random order. The unsharded model runs
all ranks' batches; after each event gradients, losses and parameters have to be the same. All in
float64, so that what differs is wrong.

    python tests/python/differential.py --seeds 1000 --first 0 --ranks 2
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import penstock
import torch
from equality import whole, world
from random_models import ROOT, Model, Node, OnOneRank, OtherDtype, StopError, loss_of
from ranks import World
from torch import nn
from torch.distributed.tensor import DTensor

Gradients = dict[str, torch.Tensor]


class NoProgramError(Exception):
    """The seed makes no program that an unsharded model could run."""


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


class Program:
    """What one seed makes, on one rank.

    Parameters
    ----------
    seed : int
        Of the model, its options and the events; the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.rank, self.size = world()
        self.seed = seed
        self.chance = chance = random.Random(seed)
        torch.manual_seed(seed)
        how = chance.choice(["found", "found", "found", "none", "named", "chosen", "kind"])
        self.reference = Model(chance, reads=how in ("found", "none"))
        self.sharded = copy.deepcopy(self.reference)
        blocks = self._draw_blocks(how)
        self.options = self._draw_options(seed)
        try:
            penstock.shard(self.sharded, blocks=blocks, **self.options)
        except penstock.PenstockError as error:
            if "matches no" in str(error):
                raise NoProgramError from None
            raise
        self.pairs = [
            (name, mine, twin)
            for (name, mine), twin in zip(
                self.sharded.named_parameters(), self.reference.parameters(), strict=True
            )
        ]
        self.trained = [pair for pair in self.pairs if pair[2].requires_grad]
        self.optimizers = self._draw_optimizers()
        is_single = any(isinstance(m, OtherDtype) for m in self.reference.modules())
        self.tolerance = 2e-5 if is_single else 1e-8
        self.step = 0
        self.kept: Gradients = {}  # of backwards without communication
        self.events: list[str] = []

    def _draw_blocks(self, how: str) -> Any:
        names = [name for name, _ in self.sharded.named_modules() if name]
        some = self.chance.sample(names, min(len(names), self.chance.randint(1, 6)))
        kinds = [Node, nn.Linear, nn.LayerNorm]
        ways: dict[str, Any] = {
            "none": [],
            "named": some[:4],
            "chosen": lambda name, module: name in some,
            "kind": [self.chance.choice(kinds)],
        }
        return ways.get(how)

    def _draw_options(self, seed: int) -> dict[str, Any]:
        choice = self.chance.choice
        return {
            "stage": choice([1, 2, 3, 3]),
            "prefetch_ahead": choice([0, 1, 2, 5]),
            "prefetch_bytes": choice([None, None, 64, 4096]),
            "bucket_bytes": choice([64, 1024, 8 << 20]),
            "part_bytes": choice([None, None, 128, 1024]),
            "verify": choice([True, True, True, False]),
            "offload": None if seed % 3 else "optimizer",
            "timeout": 20.0,
        }

    def _draw_optimizers(self) -> list[torch.optim.Optimizer]:
        foreach = self.chance.choice([True, False])
        adam = {"lr": 1e-2, "eps": 1e-4}  # a smaller eps makes steps of what rounding leaves
        make = self.chance.choice(
            [
                lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
                lambda parameters: torch.optim.AdamW(parameters, **adam, foreach=foreach),
                lambda parameters: torch.optim.Adam(parameters, **adam, foreach=False),
            ]
        )
        return [make(model.parameters()) for model in (self.reference, self.sharded)]

    # ---- comparing ------------------------------------------------------------------------------

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole tensor."""
        rows = dense(tensor).chunk(self.size)
        return rows[self.rank] if self.rank < len(rows) else dense(tensor)[:0]

    def is_close(self, got: torch.Tensor, want: torch.Tensor) -> bool:
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        if got.numel() == 0:
            return True
        limit = self.tolerance if want.dtype == torch.float64 else max(self.tolerance, 2e-5)
        distance = (got.double() - want.double()).abs().max()
        return bool(distance <= limit * max(want.double().abs().max().item(), 1e-3))

    def check(self, what: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
        assert (got is None) == (want is None), f"{what}: {got} instead of {want}"
        if got is not None and want is not None:
            assert self.is_close(dense(got), dense(want)), f"{what}: {got} instead of {want}"

    def check_gradients(self) -> None:
        for name, mine, twin in self.pairs:
            got = None if mine.grad is None else rows_of(mine.grad)
            want = None if twin.grad is None else self.mine(twin.grad)
            self.check(f"gradient of {name}", got, want)

    def check_parameters(self) -> None:
        for name, mine, twin in self.pairs:
            self.check(name, rows_of(mine).detach(), self.mine(twin.detach()))

    # ---- running --------------------------------------------------------------------------------

    def batch(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 7919 + self.step * 31 + rank)
        return torch.randn(3, 5, generator=generator)

    def loss(self, model: Model, rank: int, x: torch.Tensor | None = None) -> torch.Tensor:
        model.control.rank, model.control.step = rank, self.step
        with self.refusing(model):
            return loss_of(model, self.batch(rank) if x is None else x)

    @contextmanager
    def refusing(self, model: Model) -> Iterator[None]:
        """Give the program up where torch refuses what the unsharded model does."""
        try:
            yield
        except RuntimeError as error:
            if model is self.reference:
                raise NoProgramError from error
            raise

    def losses(self, model: Model, rank: int, forwards: int) -> torch.Tensor:
        """Sum of the losses of this step and the next ones."""
        first, total = self.step, torch.zeros(())
        for self.step in range(first, first + forwards):
            total = total + self.loss(model, rank)
        self.step = first
        return total

    def reference_gradients(self, forwards: int = 1, backwards: int = 1) -> tuple[Gradients, float]:
        """Return the means over ranks, and this rank's loss; `.grad` stays as it is."""
        parameters = dict(self.reference.named_parameters())
        before = {name: parameter.grad for name, parameter in parameters.items()}
        own = 0.0
        for parameter in parameters.values():
            parameter.grad = None
        for rank in range(self.size):
            value = self.losses(self.reference, rank, forwards)
            own = value.item() if rank == self.rank else own
            with self.refusing(self.reference):
                for left in range(backwards if value.requires_grad else 0, 0, -1):
                    (value / self.size).backward(retain_graph=left > 1)
        gradients = {name: dense(p.grad) for name, p in parameters.items() if p.grad is not None}
        for name, parameter in parameters.items():
            parameter.grad = before[name]
        return gradients, own

    def keep(self, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            self.kept[name] = self.kept[name] + gradient if name in self.kept else gradient

    def reduce(self, gradients: Gradients) -> None:
        """Add to the reference what a backward that reduces adds: what was kept goes along."""
        self.keep(gradients)
        for name, _, twin in self.pairs:
            if name in self.kept:
                kept = self.kept[name]
                twin.grad = kept.clone() if twin.grad is None else dense(twin.grad) + kept
        self.kept = {}

    # ---- events ---------------------------------------------------------------------------------

    def backward(self, forwards: int = 1, backwards: int = 1, reduces: bool = True) -> None:
        gradients, want = self.reference_gradients(forwards, backwards)
        with nullcontext() if reduces else penstock.no_sync(self.sharded):
            value = self.losses(self.sharded, self.rank, forwards)
            got = value.item()
            assert abs(got - want) <= self.tolerance * max(1.0, abs(want)), f"{got} for {want}"
            for left in range(backwards if value.requires_grad else 0, 0, -1):
                value.backward(retain_graph=left > 1)
        self.step += forwards
        if not reduces:
            self.keep(gradients)
        elif value.requires_grad:
            self.reduce(gradients)
        self.check_gradients()

    def backward_locally(self) -> None:
        self.backward(reduces=False)

    def two_forwards(self) -> None:
        self.backward(forwards=2)

    def two_backwards(self) -> None:
        self.backward(backwards=2)

    def update(self) -> None:
        if self.chance.random() < 0.4 and any(twin.grad is not None for _, _, twin in self.pairs):
            foreach = self.chance.choice([None, False])
            for model, way in ((self.reference, None), (self.sharded, foreach)):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=way)
        for optimizer in self.optimizers:
            optimizer.step()
        self.check_parameters()

    def zero(self) -> None:
        to_none = self.chance.random() < 0.7
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        self.check_gradients()

    def evaluate(self) -> None:
        with self.chance.choice([torch.no_grad, torch.no_grad, torch.inference_mode])():
            want = self.loss(self.reference, self.rank)
            self.sharded.eval()
            got = self.loss(self.sharded, self.rank)
            self.sharded.train()
        self.step += 1
        self.check("loss of an evaluation", got, want)
        self.check_gradients()

    def forward(self) -> None:
        self.loss(self.sharded, self.rank)
        self.step += 1
        self.check_gradients()

    def fail_forward(self) -> None:
        control = self.sharded.control
        control.fails_forward = self.chance.choice([*range(control.nodes), ROOT])
        control.error = self.chance.choice([StopError, KeyboardInterrupt])
        is_interrupted = False
        try:
            self.loss(self.sharded, self.rank)
        except StopError:
            pass
        except KeyboardInterrupt:
            is_interrupted = True
        control.fails_forward = None
        self.step += 1
        self.check_gradients()
        if is_interrupted:
            self.forward()  # the shards show again

    def fail_backward(self) -> None:
        """Gradients are as before, or gone; what was kept is gone, too."""
        gradients, _ = self.reference_gradients()
        control = self.sharded.control
        control.error, control.fails_backward = StopError, self._draw_reached()
        is_stopped = False
        try:
            value = self.loss(self.sharded, self.rank)
            if value.requires_grad:
                value.backward()
        except StopError:
            is_stopped = True
        control.fails_backward = None
        self.step += 1
        if not is_stopped:
            if value.requires_grad:
                self.reduce(gradients)
            self.check_gradients()
            return
        self.kept = {}
        for name, mine, twin in self.pairs:
            if mine.grad is not None:
                self.check(f"gradient of {name}", rows_of(mine.grad), self.mine(twin.grad))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.chance.random() < 0.5:
            self.forward()
        self.check_gradients()

    def _draw_reached(self) -> int:
        """Draw a node whose backward all ranks get to, or none does."""
        modules = list(self.sharded.modules())
        on_one = {m for one in modules if isinstance(one, OnOneRank) for m in one.inner.modules()}
        nodes = [m.number for m in modules if isinstance(m, Node) and m not in on_one]
        return self.chance.choice([*nodes, ROOT])

    def input_gradient(self) -> None:
        """By `autograd.grad`: parameters get none."""
        if self.kept:
            return  # which would be reduced
        found = []
        for model in (self.reference, self.sharded):
            x = self.batch(self.rank).requires_grad_()
            value = self.loss(model, self.rank, x)
            with self.refusing(model):
                found.append(torch.autograd.grad(value, x, allow_unused=True)[0])
        self.step += 1
        self.check("gradient of the input", found[1], found[0])
        self.check_gradients()

    @torch.no_grad()
    def write(self) -> None:
        for _, mine, twin in self.pairs:
            if self.chance.random() < 0.3:
                (rows_of(mine) if self.chance.random() < 0.5 else mine).mul_(0.9)
                twin.mul_(0.9)
        self.check_parameters()

    @torch.no_grad()
    def load(self) -> None:
        state = {name: value * 1.01 for name, value in self.reference.state_dict().items()}
        self.reference.load_state_dict(state)
        mine = self.sharded.state_dict()
        for name, value in mine.items():
            rows_of(value).copy_(self.mine(state[name]))
        if self.chance.random() < 0.75:
            self.sharded.load_state_dict(mine, assign=self.chance.random() < 0.3)
        self.check_parameters()

    def freeze(self) -> None:
        """Or unfreeze what was trained in the beginning."""
        if self.kept:
            return  # which would stay
        _, mine, twin = self.chance.choice(self.trained)
        is_last = sum(p.requires_grad for _, _, p in self.trained) == 1
        if not (twin.requires_grad and is_last):
            for parameter in (mine, twin):
                parameter.requires_grad_(not parameter.requires_grad)

    def record(self) -> None:
        with penstock.record(self.sharded):
            self.backward()
        operations = penstock.get_recorded_ops(self.sharded)
        if not operations:
            return
        plan = penstock.compile(
            self.sharded,
            recorded_ops=operations,
            prefetch_ahead=self.chance.choice([0, 1, 3]),
            prefetch_bytes=self.chance.choice([None, 128]),
        )
        with plan.execute():
            for _ in range(self.chance.randint(1, 2)):
                self.backward()

    def fail_hook(self) -> None:
        """A hook of one parameter raises: all gradients are there."""
        _, mine, twin = self.chance.choice(self.pairs)
        if not twin.requires_grad:
            return
        gradients, _ = self.reference_gradients()

        def fail(parameter: torch.Tensor) -> None:
            raise StopError

        handle = mine.register_post_accumulate_grad_hook(fail)
        value = self.loss(self.sharded, self.rank)
        try:
            if value.requires_grad:
                value.backward()
        except StopError:
            pass
        handle.remove()
        self.step += 1
        if value.requires_grad:
            self.reduce(gradients)
        self.check_gradients()

    def look(self) -> None:
        """At figures, and at whole parameters."""
        penstock.stats(self.sharded)
        penstock.invalidate(self.sharded)
        for name, mine, twin in self.pairs:
            self.check(name, whole(mine), twin.detach())

    def call_block(self) -> None:
        """Outside of the model; refused where it has a parameter that is shared."""
        place = self.chance.randrange(len(self.sharded.blocks))
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(self.seed + self.step))
        found = []
        with torch.no_grad():
            for model in (self.reference, self.sharded):
                model.control.rank, model.control.step = self.rank, self.step
                try:
                    found.append(model.blocks[place](x.clone()))
                except RuntimeError as error:
                    refusals = (
                        "mixed torch.Tensor and DTensor",
                        "outside of the model's own forward",
                    )
                    if not any(refusal in str(error) for refusal in refusals):
                        raise
        self.step += 1
        if len(found) == 2:
            self.check("output of a block", found[1], found[0])

    EVENTS: tuple[tuple[Callable[[Program], None], float], ...] = (
        (backward, 6),
        (backward_locally, 2),
        (two_forwards, 1),
        (two_backwards, 1),
        (update, 4),
        (zero, 3),
        (evaluate, 1),
        (forward, 1),
        (fail_forward, 1.5),
        (fail_backward, 1.5),
        (input_gradient, 0.7),
        (write, 0.5),
        (load, 0.5),
        (freeze, 0.6),
        (record, 0.5),
        (fail_hook, 0.5),
        (look, 0.5),
        (call_block, 0.3),
    )

    def run(self) -> None:
        """Run some events, each of which compares."""
        events, weights = zip(*self.EVENTS, strict=True)
        for _ in range(self.chance.randint(4, 14)):
            (event,) = self.chance.choices(events, weights)
            self.events.append(event.__name__)
            event(self)
        self.look()
        self.check_gradients()


def run_seed(seed: int) -> int:
    """Run a seed's program on this rank; returns the number of its events, 0 where it is none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.WARNING)  # what failing backwards give up
    program = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = Program(seed)
            program.run()
        return len(program.events)
    except NoProgramError:
        return 0
    except Exception as error:
        made = f": {program.options}, {program.events}" if program else ""
        raise AssertionError(f"seed {seed}{made}") from error
    finally:
        torch.set_default_dtype(before)
        logging.disable(logging.NOTSET)
        if program is not None:
            penstock.close(program.sharded)


def run_seeds(seeds: range) -> int:
    """Run the programs of several seeds on this rank, up to one that fails."""
    return sum(run_seed(seed) for seed in seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    begin, failed, tally = time.monotonic(), [], Counter()
    ranks = World(given.ranks)
    for seed in range(given.first, given.first + given.seeds):
        answers = ranks.collect(run_seed, seed, answer_within=300)
        if all(ok for ok, _ in answers):
            tally["programs" if answers[0][1] else "no programs"] += 1
            tally["events"] += answers[0][1]
            continue
        failed.append(seed)
        print(f"seed {seed} fails", flush=True)
        for rank, (ok, text) in enumerate(answers):
            print(f"rank {rank}: {'ok' if ok else text}", flush=True)
        ranks.close()
        ranks = World(given.ranks)
    ranks.close()
    print(f"{dict(tally)}, failing seeds {failed}, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
