"""Figures of a sharded model, on the CPU and on GPUs."""

import dataclasses
from dataclasses import replace

import penstock
import pytest
import torch
from equality import world
from models import DEVICE, Net, loss_of, make
from penstock._exposition import expose
from penstock._page import Head


def time_waits(wanted):
    rank, _ = world()
    sharded = penstock.shard(make(Net), time_waits=wanted)
    for step in range(4):
        loss_of(sharded, step, rank).backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    figures = penstock.stats(sharded, reset=True)
    again = penstock.stats(sharded)
    penstock.close(sharded)
    return figures, again


@pytest.mark.parametrize("wanted", [False, True], ids=["not asked", "asked"])
def test_the_stream_that_computes_is_timed_on_gpus_if_asked(worlds, wanted):
    for figures, again in worlds(2).run(time_waits, wanted):
        is_timed = wanted and DEVICE == "cuda"
        assert (figures.timed_waits > 0) == is_timed
        assert (figures.device_gather_ns > 0) == is_timed
        assert (figures.device_reduce_ns > 0) == is_timed
        assert figures.untimed_waits == 0
        if DEVICE != "cuda":
            assert figures.exposed_ns > 0
        assert again.timed_waits == again.device_gather_ns == again.device_reduce_ns == 0


def test_figures_are_printed_with_units_and_without_zeros():
    sharded = penstock.shard(make(Net))
    loss_of(sharded, 0, 0)
    figures = replace(penstock.stats(sharded), exposed_ns=2_500_000, arena_peak=3 << 19)
    lines = dict(line.split(maxsplit=1) for line in str(figures).splitlines())
    assert lines["forwards"] == "1" and "backwards" not in lines
    assert lines["exposed_ns"] == "2.500 ms" and lines["arena_peak"] == "1.500 MiB"
    penstock.close(sharded)


# ---- as Prometheus reads them -------------------------------------------------------------------


def expose_in_training():
    rank, _ = world()
    sharded = penstock.shard(make(Net))
    for step in range(3):
        loss_of(sharded, step, rank).backward()
    text = penstock.stats(sharded, format="prometheus", reset=True)
    figures = penstock.stats(sharded)
    penstock.close(sharded)
    return text, figures


def samples_of(text):
    """Read the text as Prometheus does: samples by name, kind and lane."""
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="prometheus-client is missing: pip install it"
    )
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.documentation and family.type != "unknown" for family in families)
    samples = [(family, sample) for family in families for sample in family.samples]
    for family, sample in samples:
        assert sample.name.startswith("penstock_")
        assert sample.name.endswith("_total") == (family.type == "counter")
        assert {"rank"} <= sample.labels.keys() <= {"rank", "kind", "lane", "communicator"}
    keys = [(s.name.removeprefix("penstock_"), *s.labels.values()) for _, s in samples]
    assert len({*keys}) == len(keys)
    return dict(zip(keys, [sample.value for _, sample in samples], strict=True))


def test_prometheus_reads_the_figures_in_base_units(worlds):
    for rank, (text, figures) in enumerate(worlds(2).run(expose_in_training)):
        samples, own = samples_of(text), str(rank)
        assert samples["passes_total", own, "forward"] == 3
        assert samples["collectives_total", own, "gather"] > 0
        assert samples["collective_bytes_total", own, "gather"] > 1000
        assert samples["info", own, figures.communicator] == 1
        assert samples["memory_bytes", own, "gathers"] == figures.arena_reserved
        assert 0 <= samples["timed_passes_seconds_total", own] < 60
        assert figures.forwards == 0


def test_every_figure_has_a_sample():
    fields = [field.name for field in dataclasses.fields(penstock.Stats)]
    numbers = {name: 1_000_003 * (i + 1) for i, name in enumerate(fields)}
    head = Head(rank=7, lane_count=3)
    head.place.steps, head.place.steps_ns = 5, 1_500_000_000
    for lane, name in zip(head.lanes, (b'a "lane"\\', b"b", b"b"), strict=False):
        lane.name, lane.bytes, lane.busy_ns = name, 10, 2_000_000_000
    text = expose({**numbers, "communicator": "c\n"}, head)
    samples = samples_of(text)
    told = sorted(samples.values())
    # The communicator is no number, exposed_ns the sum of two others.
    for name in [name for name in fields if name not in ("communicator", "exposed_ns")]:
        value = numbers[name] * (1e-9 if name.endswith("_ns") else 1)
        assert value in told, name
    assert samples["info", "7", "c\n"] == 1
    assert samples["steps_total", "7"] == 5 and samples["steps_seconds_total", "7"] == 1.5
    assert samples["lane_bytes_total", "7", 'a "lane"\\'] == 10
    assert samples["lane_bytes_total", "7", "b"] == 20
    assert samples["lane_busy_seconds_total", "7", "b"] == 4


def test_another_format_is_refused():
    sharded = penstock.shard(make(Net))
    with pytest.raises(penstock.PenstockError, match=r"format.*give 'prometheus'"):
        penstock.stats(sharded, format="json")
    penstock.close(sharded)
