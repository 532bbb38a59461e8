"""Pictures of steps, on traces built here."""

from __future__ import annotations

import os
import struct
import sys
from random import Random
from xml.etree import ElementTree

import penstock.trace as tool
import pytest
from made_traces import SVG, RankTrace, a_step, merged, slices_of
from penstock import _picture_files


def drawn(tmp_path, trace, step=None):
    out = tmp_path / "step.svg"
    tool.draw(trace.save(tmp_path), out, step)
    return ElementTree.parse(out).getroot()


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def titles(root):
    return [title.text for title in root.iter(f"{SVG}title")]


def test_a_picture_has_a_bar_a_slice_and_a_row_a_track(tmp_path):
    root = drawn(tmp_path, a_step(0))
    assert len(titles(root)) == 4  # the step is the frame
    assert {"main", "gather", "reduce"} <= set(texts(root))
    assert "rank 0: 100.0 \u00b5s, of which 30.0 \u00b5s (30.0%) exposed communication" in texts(
        root
    )


def test_a_picture_shows_the_asked_step_and_else_the_one_in_the_middle(tmp_path):
    trace = RankTrace(0)
    for step in range(5):
        trace.host("step", step * 100, step * 100 + 90)
        trace.task("gather", f"task of {step}", step * 100 + 5, step * 100 + 10)
    assert any("task of 2" in title for title in titles(drawn(tmp_path, trace)))
    for step, number in ((1, 1), (-1, 4)):
        root = drawn(tmp_path, trace, step)
        assert [title.partition(":")[0] for title in titles(root)] == [f"task of {number}"]
        assert f"Step {number} of rank0.json: 90.0 \u00b5s" in texts(root)


def test_bars_stay_inside_the_picture(tmp_path):
    trace = RankTrace(0).host("step", 100, 200).task("copy", "long", 0, 1000)
    root = drawn(tmp_path, trace)
    width = float(root.get("width"))
    for rect in root.iter(f"{SVG}rect"):
        x = float(rect.get("x", 0))
        assert x >= 0 and x + float(rect.get("width")) <= width + 0.01


def test_a_picture_is_as_wide_as_asked_for(tmp_path):
    path, out = a_long_step(0).save(tmp_path), tmp_path / "step.svg"
    tool.draw(path, out, width=800)
    root = ElementTree.parse(out).getroot()
    assert root.get("width") == "800" and root.get("viewBox").startswith("0 0 800 ")
    ends = [float(r.get("x", 0)) + float(r.get("width")) for r in root.iter(f"{SVG}rect")]
    assert max(ends) == 800
    for text in root.iter(f"{SVG}text"):  # 7.5: a letter of the title
        assert text.get("text-anchor") or float(text.get("x")) + 7.5 * len(text.text) < 800
    with pytest.raises(tool.TraceError, match="799 pixels has no room"):
        tool.draw(path, out, width=799)


def test_slices_that_share_time_do_not_cover_each_other(tmp_path):
    trace = RankTrace(0).host("outer", 0, 100).host("inner", 10, 20)
    trace.task("copy", "a", 0, 50).overlap("copy", "b", 40, 60, 1)
    rects = [
        tuple(float(rect.get(key)) for key in ("x", "y", "width", "height"))
        for group in drawn(tmp_path, trace).iter(f"{SVG}g")
        for rect in group.iter(f"{SVG}rect")
    ]
    assert len(rects) == 5  # the outer one goes on behind the inner one
    for i, (x, y, width, height) in enumerate(rects):
        for u, v, other_width, other_height in rects[:i]:
            apart = x >= u + other_width or u >= x + width
            assert apart or y >= v + other_height or v >= y + height


def a_long_step(rank, slow=1.0):
    """Forward, backward and optimizer with blocks, and each lane's tasks; milliseconds."""
    trace = RankTrace(rank, world_size=40)
    for name, begin, end in (
        ("step", 0, 100),
        ("forward", 1, 40),
        ("forward blocks.0", 2, 38),
        ("wait blocks.0", 3, 13),
        ("backward", 41, 90),
        ("wait gradients", 70, 85),
        ("optimizer", 91, 100),
    ):
        trace.host(name, begin * 1000 * slow, end * 1000 * slow)
    trace.host("blocks.0", 100, 90_000, track="worker gather")
    for lane, name in (("gather", "blocks.0"), ("reduce", "gradients blocks.0"), ("reload", "a")):
        trace.task(lane, name, 5000 * slow, 25_000 * slow, ticket=1)
    return trace.task("copies", "copy", 1000, 30_000).task("odd", "b", 1000, 30_000)


def test_the_compute_row_has_the_innermost_slices(tmp_path):
    root = drawn(tmp_path, a_long_step(0))
    shown = [title.partition(":")[0] for title in titles(root)]
    assert shown[:3] == ["forward", "backward", "optimizer"]  # the phases
    parts = ["forward", "forward blocks.0", "wait blocks.0", "forward blocks.0", "forward"]
    assert shown[3:8] == parts
    assert shown[8:12] == ["backward", "wait gradients", "backward", "optimizer"]
    labels = texts(root)
    assert {"phase", "compute", "gather", "reduce", "reload"} <= set(labels)
    assert "worker gather" not in labels
    assert "rank 0: 100.0 ms, of which 25.0 ms (25.0%) exposed communication" in labels


def test_a_legend_names_what_is_in_the_picture(tmp_path):
    kinds = ("compute", "optimizer", "exposed communication", "gather", "reduce", "offload")
    assert {*kinds, "other"} <= set(texts(drawn(tmp_path, a_long_step(0))))
    labels = texts(drawn(tmp_path, RankTrace(0).task("gather", "g", 0, 10)))
    assert "gather" in labels and "compute" not in labels


def test_ticks_are_round_and_do_not_overlap(tmp_path):
    seed = int(os.environ.get("PST_SEED", "1"))
    print(f"PST_SEED={seed}")
    random = Random(seed)
    units = {"\u00b5s": 1.0, "ms": 1e3, "s": 1e6}
    for _ in range(50):
        span = 10 ** random.uniform(0, 7.9)
        root = drawn(tmp_path, RankTrace(0).task("gather", "g", 0, span))
        ticks = [t for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "middle"]
        times = [float(t.text.split()[0]) * units[t.text.split()[1]] for t in ticks]
        distance = times[1] - times[0]
        assert len(ticks) >= 3 and times[0] == 0 and times[-1] <= span
        assert times == pytest.approx([i * distance for i in range(len(times))])
        assert f"{distance:.0e}"[0] in "125" and distance == pytest.approx(float(f"{distance:.0e}"))
        places = [float(t.get("x")) for t in ticks]
        halves = [4 * len(t.text) for t in ticks]
        assert places[0] >= halves[0] and places[-1] + halves[-1] <= float(root.get("width"))
        for i in range(len(ticks) - 1):
            assert places[i + 1] - places[i] > halves[i] + halves[i + 1]


def contrast(one, other):
    """How well colors are told apart, as WCAG 2 defines it: 4.5 is enough for small text."""
    shades = []
    for color in (one, other):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p < 0.04 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        shades.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(shades) / min(shades)


def test_text_can_be_read_on_every_color(tmp_path):
    seen = set()
    for group in drawn(tmp_path, a_long_step(0)).iter(f"{SVG}g"):
        fill, text = group.find(f"{SVG}rect").get("fill"), group.find(f"{SVG}text")
        if text is not None:
            seen.add(fill)
            assert contrast(fill, text.get("fill")) >= 4.5
    assert len(seen) == 9


def test_of_many_ranks_the_fastest_the_median_and_the_slowest_are_drawn(tmp_path):
    sixteen = merged(tmp_path, *(a_long_step(rank) for rank in range(16)))
    assert len(slices_of(sixteen, "step")) == 16
    tool.draw(tmp_path / "merged.json", tmp_path / "step.svg")
    labels = texts(ElementTree.parse(tmp_path / "step.svg").getroot())
    assert sum(label.startswith("rank ") for label in labels) == 16
    merged(tmp_path, *(a_long_step(rank, 1 + (rank * 7 % 17) / 100) for rank in range(17)))
    tool.draw(tmp_path / "merged.json", tmp_path / "step.svg")
    labels = texts(ElementTree.parse(tmp_path / "step.svg").getroot())
    assert [label.partition(":")[0] for label in labels if label.startswith("rank ")] == [
        "rank 0, the fastest of 17",
        "rank 6, the median",
        "rank 12, the slowest",
    ]


def test_a_bar_too_short_for_its_name_has_all_of_it_but_the_first_word(tmp_path):
    name = "gradients blocks.3 to blocks.0 (4 groups)"
    for end, shown in ((40, name), (20, "blocks.3 to blocks.0 (4 groups)"), (5, None)):
        trace = RankTrace(0).task("reduce", name, 0, end).task("copy", "copy", 0, 100)
        (bar, _) = drawn(tmp_path, trace).iter(f"{SVG}g")
        text = bar.find(f"{SVG}text")
        assert (text if text is None else text.text) == shown


def test_bars_too_narrow_to_be_seen_are_drawn_once(tmp_path):
    trace = RankTrace(0)
    for i in range(20_000):
        trace.task("gather", "g", i * 10, i * 10 + 5, ticket=i)
    assert 1000 < len(titles(drawn(tmp_path, trace))) < 10_000


def test_names_may_hold_markup_and_control_characters(tmp_path):
    root = drawn(tmp_path, RankTrace(0).task("<lane>", 'a<b>&"c"\x01\n', 0, 10))
    assert any('a<b>&"c"\ufffd\ufffd' in title for title in titles(root))


def test_a_step_that_is_not_there_is_an_error_with_their_number(tmp_path):
    with pytest.raises(tool.TraceError, match="no step 7; it has 1"):
        drawn(tmp_path, a_step(0), step=7)


def test_a_trace_without_slices_is_drawn(tmp_path):
    assert titles(drawn(tmp_path, RankTrace(0))) == []


# ---- PNG ----------------------------------------------------------------------------------------


def size_of(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and png[12:16] == b"IHDR"
    return struct.unpack(">II", png[16:24])


def test_a_name_that_ends_in_png_gets_a_png_with_its_texts(tmp_path):
    pictures = []
    for rank in range(2):  # their names are all that differs
        out = tmp_path / f"{rank}.PNG"
        tool.draw(a_step(rank).save(tmp_path), out, width=900)
        pictures.append(out.read_bytes())
    root = drawn(tmp_path, a_step(0))
    assert [size_of(png) for png in pictures] == [(900, int(root.get("height")))] * 2
    assert pictures[0] != pictures[1]


def test_without_what_makes_png_the_error_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    out = tmp_path / "step.png"
    assert tool.main(["draw", str(a_step(0).save(tmp_path)), str(out)]) == 2
    assert "pip install resvg-py" in capsys.readouterr().err
    assert not out.exists()


def test_without_a_font_no_png_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_picture_files, "_FAMILIES", ("No Such Family",))
    out = tmp_path / "step.png"
    assert tool.main(["draw", str(a_step(0).save(tmp_path)), str(out)]) == 2
    assert "install fonts-dejavu-core" in capsys.readouterr().err
    assert not out.exists()
