"""Train a byte-level GPT with ZeRO over the processes that torchrun starts.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

The training loop, in `Training.run`, is an ordinary one. The rest chooses the text, draws a
progress bar, counts bytes, writes a trace, and with --check trains unsharded too and compares.
"""

import sys
import time
from argparse import Namespace

import penstock
from gpt import check, options, report, text, traces
from gpt.model import GPT, build
from gpt.ranks import Ranks


class Training:
    """The sharded training of one rank, and what is known of it so far."""

    def __init__(self, model: GPT, batches: text.Batches, ranks: Ranks, given: Namespace) -> None:
        self.model = model
        self.batches = batches
        self.ranks = ranks
        self.given = given
        self.optimizer = options.optimizer(given, model)
        self.progress = report.Progress("step", given.steps) if ranks.first else None
        self.losses: list[float] = []  # of this rank
        self.gradients: check.Tensors = {}  # of the first step
        self.held = report.Held(0, 0, 0)
        self.seconds = 0.0
        self.exposed = 0.0  # seconds

    def run(self, steps: range) -> None:
        """Train these steps."""
        for step in steps:
            started = time.perf_counter()
            loss = self.model(*self.batches.draw(step, self.ranks.rank))
            loss.backward()
            if step == 0 and self.given.check:
                self.gradients = check.gradients(self.model)
            self.optimizer.step()
            if step == 0:
                self.held = report.Held.measure(self.model, self.optimizer)
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.show(step, time.perf_counter() - started)

    def show(self, step: int, seconds: float) -> None:
        """Count the step's times and draw the progress bar."""
        exposed = penstock.stats(self.model).exposed_ns / 1e9
        if self.progress:
            speed = report.speed(self.tokens(1), seconds, exposed - self.exposed)
            self.progress.show(step, f"loss {self.losses[-1]:.3f}  {speed}")
        self.seconds += seconds
        self.exposed = exposed

    def tokens(self, steps: int) -> int:
        """Tokens of all ranks in so many steps."""
        return steps * self.ranks.size * self.given.batch * self.given.seq

    def result(self) -> check.Run:
        """All ranks' losses, the first gradients and the final parameters, on every rank."""
        losses = [list(step) for step in zip(*self.ranks.gather(self.losses), strict=True)]
        return check.Run(losses, self.gradients, check.parameters(self.model))


def train(given: Namespace, batches: text.Batches, ranks: Ranks) -> int:
    """Train as the options ask; return the exit status."""
    model = build(options.shape(given), given.seed, ranks.device)
    penstock.shard(
        model,
        stage=given.stage,
        prefetch_ahead=given.prefetch_ahead,
        bucket_bytes=given.bucket_kib << 10,
    )
    training = Training(model, batches, ranks, given)
    before, during, after = traces.split(given.steps)
    training.run(before)
    with traces.traced(model, ranks, given.trace) as trace:
        training.run(during)
    training.run(after)

    held = report.Held.most(ranks.gather(training.held))
    result = training.result() if given.check else None
    passed = True
    if ranks.first:
        close(training, held, unsharded_step(batches, given))
        if result:
            passed = compare(result, batches, ranks.size, given)
        print(f"trace   {trace} (open it at https://ui.perfetto.dev)")
    return 0 if ranks.share(passed) else 1


def unsharded_step(batches: text.Batches, given: Namespace) -> report.Held:
    """Train one step without sharding, to count the bytes that takes."""
    model = build(options.shape(given), given.seed, batches.device)
    optimizer = options.optimizer(given, model)
    model(*batches.draw(0, 0)).backward()
    optimizer.step()
    return report.Held.measure(model, optimizer)


def close(training: Training, held: report.Held, unsharded: report.Held) -> None:
    """Print the closing tables."""
    given = training.given
    stats = penstock.stats(training.model)
    parameters = sum(p.numel() for p in training.model.parameters())
    ranks = training.ranks.size
    speed = report.speed(training.tokens(given.steps), training.seconds, training.exposed)
    print(
        f"\n{parameters:,} parameters, {ranks} rank{'s' * (ranks > 1)}, ZeRO-{given.stage}: "
        f"{given.steps} steps in {training.seconds:.1f} s  {speed}\n"
    )
    print(report.memory_table(held, unsharded, stats) + "\n")
    print(report.communication_table(stats) + "\n")
    print(report.arena_line(stats))


def compare(result: check.Run, batches: text.Batches, ranks: int, given: Namespace) -> bool:
    """Train unsharded from the same start and print how far the sharded training is from it."""
    model = build(options.shape(given), given.seed, batches.device)
    progress = report.Progress("unsharded", given.steps)
    reference = check.train_unsharded(
        model,
        options.optimizer(given, model),
        batches,
        ranks=ranks,
        steps=given.steps,
        progress=progress.show,
    )
    comparisons = check.compare(result, reference, given.optimizer)
    print("\n" + report.comparison_table(comparisons))
    return all(c.passed for c in comparisons)


def main() -> int:
    """Train over the ranks that there are."""
    given = options.parse()
    ranks = Ranks(given.device)
    try:
        content = text.load(given.text, given.seq)
    except (OSError, ValueError) as error:
        if ranks.first:
            print(f"train_gpt.py: {error}", file=sys.stderr)
        return 2
    with ranks:
        batches = text.Batches(content, given.batch, given.seq, given.seed, ranks.device)
        return train(given, batches, ranks)


if __name__ == "__main__":
    sys.exit(main())
