"""Files of pictures: SVG as it is, or PNG, which resvg makes of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_FAMILIES = ("Helvetica", "Arial", "Liberation Sans", "DejaVu Sans", "Noto Sans", "Cantarell")
_LETTER = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><text y="9">{}</text></svg>'


class PictureError(ValueError):
    """A picture that cannot be written; the text says what to do."""


def write_picture(lines: Iterable[str], out: str | os.PathLike[str]) -> None:
    """Write the lines of an SVG picture; as PNG to a file whose name ends in ``.png``.

    Raises
    ------
    PictureError
        There is nothing that makes a PNG, or no font for it.
    OSError
        The file cannot be written.
    """
    svg = "\n".join(lines)
    if Path(out).suffix.lower() == ".png":
        Path(out).write_bytes(_png_of(svg))
    else:
        Path(out).write_text(svg, encoding="utf-8")


def _png_of(svg: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise PictureError(
            "PNG pictures are made by resvg: pip install resvg-py, or give a name that ends in .svg"
        ) from None
    family = next((name for name in _FAMILIES if _has_font(resvg_py, name)), None)
    if family is None:
        raise PictureError(
            f"PNG pictures need a font, one of {', '.join(_FAMILIES)}: install fonts-dejavu-core, "
            "for example, or give a name that ends in .svg"
        )
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, sans_serif_family=family))


def _has_font(resvg: Any, family: str) -> bool:
    """Return whether a letter in it can be seen."""
    shown, empty = (
        resvg.svg_to_bytes(svg_string=_LETTER.format(text), font_family=family)
        for text in ("x", "")
    )
    return bytes(shown) != bytes(empty)
