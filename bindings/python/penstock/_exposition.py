"""Figures as Prometheus reads them: its text format, in base units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock._page import Head, Lane, text_of

_NANOSECONDS = 1e-9
Labels = Mapping[str, str]
Sample = tuple[Labels, float]
Figures = Mapping[str, Any]


# Names without the prefix penstock_: what ends in _total is a counter, else a gauge. Then what it
# is, and fields of `Stats` by the label "kind"; an empty one: there is no such label.
_FAMILIES: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "collectives_total",
        "Collectives issued.",
        {"gather": "gathers", "reduce": "reduces", "all_reduce": "all_reduces"},
    ),
    (
        "collective_bytes_total",
        "Bytes of gathered groups, of whole gradients, and of this rank's sums between replicas.",
        {"gather": "gather_bytes", "reduce": "reduce_bytes", "all_reduce": "all_reduce_bytes"},
    ),
    (
        "exposed_seconds_total",
        "Time in which the training thread waited for communication; on GPUs for launches alone.",
        {"gather": "exposed_gather_ns", "reduce": "exposed_reduce_ns"},
    ),
    (
        "stalled_seconds_total",
        "Time in which the compute stream waited for communication, by the GPU's clock.",
        {"gather": "device_gather_ns", "reduce": "device_reduce_ns"},
    ),
    (
        "stream_waits_total",
        "Waits of the compute stream that were timed, and that could not be.",
        {"timed": "timed_waits", "untimed": "untimed_waits"},
    ),
    (
        "late_launches_total",
        "Waits for a collective that was not launched by then.",
        {"": "late_launches"},
    ),
    (
        "passes_total",
        "Passes: forwards, backwards, those that failed, that followed a plan to their end, that "
        "were launched as one graph, and passes with a backward whose time is known.",
        {
            "forward": "forwards",
            "backward": "backwards",
            "broken_backward": "broken_backwards",
            "planned": "planned_passes",
            "replayed": "replayed_passes",
            "timed": "timed_passes",
        },
    ),
    (
        "timed_passes_seconds_total",
        "Time of the timed passes, from the forward's beginning to the backward's end.",
        {"": "passes_ns"},
    ),
    (
        "timed_graphs_total",
        "Launches of captured steps whose time is known.",
        {"": "timed_graphs"},
    ),
    (
        "graphs_seconds_total",
        "Time of these launches, by the device's clock.",
        {"": "graphs_ns"},
    ),
    ("deviations_total", "Passes that left the path that was expected.", {"": "deviations"}),
    ("prefetches_total", "Groups gathered ahead.", {"": "prefetches"}),
    ("updates_total", "Groups updated behind their reductions.", {"": "updates"}),
    (
        "predicted_pass_seconds",
        "A training pass as its plan predicts it: all, and what compute waits in it.",
        {"pass": "predicted_pass_ns", "exposed": "predicted_exposed_ns"},
    ),
    (
        "predicted_peak_bytes",
        "What torch has allocated at most in a step as it is planned.",
        {"": "predicted_peak_bytes"},
    ),
    (
        "memory_bytes",
        "Memory reserved: for gathered groups, shards that peers read, copies of shards and "
        "buckets, and what reductions bring together.",
        {
            "gathers": "arena_reserved",
            "places": "places_reserved",
            "sources": "sources_reserved",
            "staging": "staging_reserved",
        },
    ),
    (
        "memory_peak_bytes",
        "The most memory that was used at once: by gathered groups, by buckets.",
        {"gathers": "arena_peak", "buckets": "bucket_peak"},
    ),
    (
        "plan_bytes",
        "What the training plan needs, and the least that any plan could need.",
        {"peak": "plan_peak", "lower_bound": "plan_lower_bound"},
    ),
    (
        "checkpointed_blocks",
        "Blocks that keep their activations among those that might do otherwise, that keep those "
        "which are dear to recompute, that recompute all, and that offload them.",
        {
            "kept": "kept_blocks",
            "selective": "selective_blocks",
            "recomputed": "recomputed_blocks",
            "offloaded": "offloaded_blocks",
        },
    ),
    (
        "kept_activations_bytes",
        "Activations that blocks keep which might do otherwise.",
        {"": "kept_activations_bytes"},
    ),
    (
        "saved_recomputing_seconds",
        "What a pass saves by activations that are not recomputed, as measured.",
        {"": "saved_recomputing_ns"},
    ),
    (
        "offloaded_bytes_total",
        "Activations copied to the host, and back.",
        {"offload": "offload_bytes", "reload": "reload_bytes"},
    ),
    (
        "offload_host_peak_bytes",
        "The host's memory that activations took at most.",
        {"": "offload_host_peak"},
    ),
)


def expose(figures: Figures, head: Head) -> str:
    """Return figures in Prometheus's text format.

    Parameters
    ----------
    figures : dict
        Those of `Stats`, by name.
    head : Head
        Of this rank's page: its rank, steps and lanes.
    """
    lines: list[str] = []

    def add(name: str, text: str, samples: Iterable[Sample]) -> None:
        lines.append(f"# HELP penstock_{name} {text}")
        lines.append(f"# TYPE penstock_{name} {'counter' if name.endswith('_total') else 'gauge'}")
        for labels, value in samples:
            told = _labels({"rank": str(head.rank), **labels})
            lines.append(f"penstock_{name}{{{told}}} {value!r}")

    add("info", "What moves the data.", [({"communicator": figures["communicator"]}, 1)])
    for name, text, kinds in _FAMILIES:
        scale = _NANOSECONDS if "_seconds" in name else 1
        add(name, text, [({"kind": k} if k else {}, figures[f] * scale) for k, f in kinds.items()])
    _add_page(head, add)
    return "\n".join(lines) + "\n"


def _add_page(head: Head, add: Callable[[str, str, Iterable[Sample]], None]) -> None:
    moved: defaultdict[str, list[Lane]] = defaultdict(list)  # lanes may have one name
    for lane in sorted(head.lanes[: head.lane_count], key=lambda lane: lane.name):
        moved[text_of(lane.name)].append(lane)
    add("steps_total", "Training steps that have ended.", [({}, head.place.steps)])
    add(
        "steps_seconds_total",
        "Time of the steps, each to where the next one begins.",
        [({}, head.place.steps_ns * _NANOSECONDS)],
    )
    add(
        "lane_bytes_total",
        "Bytes that tasks of a lane moved.",
        [({"lane": name}, sum(lane.bytes for lane in own)) for name, own in moved.items()],
    )
    add(
        "lane_busy_seconds_total",
        "Time in which tasks of a lane moved bytes, from launches to ends as they were noticed.",
        [
            ({"lane": name}, sum(lane.busy_ns for lane in own) * _NANOSECONDS)
            for name, own in moved.items()
        ],
    )


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
