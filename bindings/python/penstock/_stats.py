"""Figures of a sharded model."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal, overload

from torch import nn

from penstock._arguments import check_flag, refuse
from penstock._checkpoint import Way
from penstock._engine import Engine, engine_of
from penstock._errors import PenstockError
from penstock._exposition import expose
from penstock._figures import Figures
from penstock._page import copy_head


@dataclass(frozen=True)
class Stats:
    """Counts of this rank since ``shard`` or ``stats(model, reset=True)``, whichever was later.

    They begin anew where parameters are trained that were frozen until then, and where ``memory=``
    makes the model go on in another stage.

    Printed, they have units, a line each, and those that are zero are left out.

    Attributes
    ----------
    communicator : str
        What moves the data: on the CPU "c10d", or "local" for a process alone; on GPUs "ce",
        "nccl" or "crossover"; on both "hierarchy".
    gathers, gather_bytes : int
        All-gathers issued, and bytes of the groups gathered.
    reduces, reduce_bytes : int
        Reduce-scatters issued, and bytes of the whole gradients.
    all_reduces, all_reduce_bytes : int
        All-reduces issued between replicas, and bytes of this rank's sums.
    exposed_ns, exposed_gather_ns, exposed_reduce_ns : int
        Nanoseconds in which the calling thread waited for communication: on the CPU this is what
        the compute waited. On GPUs it is a wait for launches alone.
    device_gather_ns, device_reduce_ns : int
        On GPUs, with ``time_waits`` or in a trace: nanoseconds in which the compute stream
        waited for communication, by the GPU's clock, as far as the GPU has come. A wait for what is
        there already counts with the few microseconds between two events.
    timed_waits, untimed_waits : int
        Waits that these are the sum of, and waits that could not be timed.
    late_launches : int
        On GPUs: waits for a collective that was not launched by then.
    forwards, backwards, planned_passes, replayed_passes, deviations, prefetches : int
        Passes; those that followed a plan to their end; those whose collectives were launched as
        one sealed graph; how often one left the path that was expected; groups gathered ahead.
    timed_passes, passes_ns : int
        Passes with a backward, as far as the device has come, and the nanoseconds that they took
        from the beginning of the forward to the end of the backward, by its clock.
    timed_graphs, graphs_ns : int
        The same of steps that `penstock.step` has launched as a graph, from the begin of the step
        to its end. What is in a graph is counted nowhere else but once, where it is captured.
    predicted_pass_ns, predicted_exposed_ns : int
        Nanoseconds of a pass by the latest plan for training, as it predicts them, and those in
        which compute waits for communication; 0: it was not made by `penstock.compile` or for
        ``memory=``, or without times.
    predicted_peak_bytes : int
        On GPUs, with ``memory=``: bytes that torch has allocated at most in a step, Penstock's too,
        as predicted when it was decided what stays; else 0.
    updates : int
        Groups that were updated behind their reductions: see `penstock.AdamW`.
    broken_backwards : int
        Backwards that failed; see `shard` for what becomes of gradients.
    arena_peak, arena_reserved, bucket_peak : int
        Bytes of gathered groups at most, of memory reserved, of gradient buckets at most.
    plan_peak, plan_lower_bound : int
        Bytes that the training plan needs, and the least any plan could need; 0 before it exists.
    places_reserved, sources_reserved, staging_reserved : int
        Bytes reserved beside ``arena_reserved``: where shards lie for their peers to read, and in
        stages 1 and 2 what is gathered around them; for copies of shards in another dtype, and
        buckets; for what reductions bring together.
    kept_blocks, selective_blocks, recomputed_blocks, offloaded_blocks : int
        With ``checkpoint=`` or ``offload=``: blocks that keep their activations on the device,
        among those that might do otherwise, that keep those which are dear to recompute, that
        recompute all of them, and that offload what they do not recompute.
    kept_activations_bytes, saved_recomputing_ns : int
        With ``checkpoint="auto"``: what the activations take that stay on the device, and the time
        that a pass saves by not recomputing these and offloaded ones, as measured.
    offload_bytes, reload_bytes : int
        Activations that were copied to the host, and back.
    offload_host_peak : int
        Bytes of the host's memory that they took at most.
    """

    communicator: str
    gathers: int
    gather_bytes: int
    reduces: int
    reduce_bytes: int
    all_reduces: int
    all_reduce_bytes: int
    exposed_ns: int
    exposed_gather_ns: int
    exposed_reduce_ns: int
    forwards: int
    backwards: int
    broken_backwards: int
    planned_passes: int
    replayed_passes: int
    timed_passes: int
    passes_ns: int
    timed_graphs: int
    graphs_ns: int
    predicted_pass_ns: int
    predicted_exposed_ns: int
    predicted_peak_bytes: int
    updates: int
    deviations: int
    prefetches: int
    arena_peak: int
    arena_reserved: int
    bucket_peak: int
    plan_peak: int
    plan_lower_bound: int
    late_launches: int
    device_gather_ns: int
    device_reduce_ns: int
    timed_waits: int
    untimed_waits: int
    places_reserved: int
    sources_reserved: int
    staging_reserved: int
    kept_blocks: int
    selective_blocks: int
    recomputed_blocks: int
    offloaded_blocks: int
    kept_activations_bytes: int
    saved_recomputing_ns: int
    offload_bytes: int
    reload_bytes: int
    offload_host_peak: int

    def __str__(self) -> str:
        figures = asdict(self).items()
        lines = (f"{name:<24}{_readable(name, value)}" for name, value in figures if value)
        return "\n".join(lines)


def _readable(name: str, value: str | int) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_ns"):
        return f"{value / 1e6:.3f} ms"
    is_bytes = name.endswith(("_bytes", "_peak", "_bound", "_reserved"))
    return f"{value / 2**20:.3f} MiB" if is_bytes else str(value)


@overload
def stats(model: nn.Module | None = None, *, reset: bool = False, format: None = None) -> Stats: ...
@overload
def stats(
    model: nn.Module | None = None, *, reset: bool = False, format: Literal["prometheus"]
) -> str: ...
def stats(
    model: nn.Module | None = None, *, reset: bool = False, format: str | None = None
) -> Stats | str:
    """Figures of a sharded model.

    Parameters
    ----------
    model : nn.Module, optional
        The model; may be left out while only one sharded model lives.
    reset : bool
        Begin to count anew after reading.
    format : {"prometheus"}, optional
        As a text that Prometheus reads, in its exposition format: counters, which end in
        ``_total``, and gauges, in seconds and bytes, with the labels ``rank``, ``kind`` and, beside
        these figures, bytes and busy time by ``lane``. Serve it by HTTP, or write it to a file of
        node_exporter's textfile collector.

    Returns
    -------
    Stats or str
        Lanes are up to a quarter of a second old.
    """
    check_flag("reset", reset)
    if format not in (None, "prometheus"):
        refuse("format", format, "give 'prometheus', or None for an object")
    engine = engine_of(model)
    offloaded = sum(block.offloads for block in engine.checkpointed)
    here = Counter(block.way for block in engine.checkpointed if not block.offloads)
    copies = engine.offloading.stats()
    saved = Figures() if engine.keeping is None else engine.keeping.saved()
    predicted = _predicted(engine)
    figures = Stats(
        communicator=engine.native.communicator(),
        broken_backwards=engine.broken_backwards,
        kept_blocks=here[Way.KEEP],
        selective_blocks=here[Way.SELECT],
        recomputed_blocks=here[Way.RECOMPUTE],
        offloaded_blocks=offloaded,
        kept_activations_bytes=saved.kept,
        saved_recomputing_ns=saved.nanoseconds,
        offload_bytes=copies["store_bytes"],
        reload_bytes=copies["load_bytes"],
        offload_host_peak=copies["host_peak"],
        predicted_pass_ns=predicted[0],
        predicted_exposed_ns=predicted[1],
        predicted_peak_bytes=0 if engine.keeping is None else engine.keeping.predicted_peak,
        **engine.native.stats(),
    )
    told: Stats | str = figures
    if format is not None:
        told = expose(asdict(figures), copy_head(memoryview(engine.world.roll.page)))
    if reset:
        engine.native.reset_stats()
        engine.offloading.reset_stats()
        engine.broken_backwards = 0
    return told


def _predicted(engine: Engine) -> tuple[int, int]:
    # The first pass, which others are made by, is not like those that follow it.
    if True not in engine.plans and (engine.keeping is None or not engine.keeping.is_decided):
        return 0, 0
    try:
        forecast = engine.native.forecast(True)
    except PenstockError:  # no plan
        return 0, 0
    # What memory= plans by was recorded while blocks recomputed all.
    if engine.keeping is None or True in engine.plans or forecast.step_ns == 0:
        return forecast.step_ns, forecast.exposed_ns
    return forecast.step_ns - engine.keeping.gain, forecast.exposed_ns
