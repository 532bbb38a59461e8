"""What slices are: kinds, and the colors that they have in pictures."""

from __future__ import annotations

from penstock._trace_steps import GRAPH, is_wait

# Colors of Okabe and Ito, which people tell apart whatever colors they see.
COLORS = {
    "compute": "#009e73",
    "update": "#f0e442",
    "exposed": "#d55e00",
    "gather": "#0072b2",
    "reduce": "#e69f00",
    "copy": "#56b4e9",
    "offload": "#cc79a7",
    "other": "#bbbbbb",
    "phase": "#e6e6e6",
}
_WORDS = {
    "compute": ("forward", "backward", "recompute", "compute", "kernel", "step"),
    "update": ("update", "optimizer"),
    "offload": ("offload", "reload"),
    "gather": ("gather", "all_gather", "broadcast", "deliver"),
    "reduce": ("reduce", "reduce_scatter", "all_reduce", "gradients", "sum", "sums"),
    "copy": ("copy", "load", "store"),
}
_KINDS = {word: kind for kind, words in _WORDS.items() for word in words}


def kind_of(name: str, lane: str | None) -> str:
    """Return the kind of a slice, by its lane's name if it is on one, else by its own.

    Parameters
    ----------
    name : str
        Its name.
    lane : str, optional
        The lane's; None: it is a thread's.
    """
    if lane is None and is_wait(name):
        return "exposed"
    if name == GRAPH:
        return "compute"  # all of a step, on whichever lane it stands
    for text in (name, lane) if lane is None else (lane, name):
        for word in (text or "").replace("_", " ").split():
            if word in _KINDS:
                return _KINDS[word]
    return "other"


def text_color(color: str) -> str:
    """Return black or white, whichever can be read better on a color."""
    with_white, with_black = 1.05 / (_luminance(color) + 0.05), (_luminance(color) + 0.05) / 0.05
    return "#ffffff" if with_white > with_black else "#000000"


def _luminance(color: str) -> float:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
