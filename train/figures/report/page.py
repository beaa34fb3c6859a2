"""A report as one HTML file: no scripts, no network, no other files; and its pictures as PNG.

Pictures are SVG of matplotlib, put into the file. Their ink is the page's text colour, so they are
read on dark and on light.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.heads.core.files import write_atomically

from .drawings import DEPTHS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATE = "report.html.jinja"
_INK, _DARK = "#010203", "#1f2328"  # _INK is replaced by the page's own text colour
_STYLE: dict[str, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "svg.fonttype": "none", "axes.grid": False,
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A drawing with a title, and a sentence that says how to read it.

    Attributes:
        name: of its PNG.
        rows: of a drawing that is the taller the more rows it has.
        wide: whether it takes the page's whole width where there is room.
    """

    name: str
    title: str
    said: str
    draw: Callable[[Axes], None]
    rows: int = 0
    wide: bool = False

    @property
    def size(self) -> tuple[float, float]:
        """Inches."""
        return (9.6 if self.wide else 4.9), max(3.1, 1.1 + 0.36 * self.rows)


@dataclass(frozen=True)
class Sample:
    """A text in pieces, each with the depth at which it was drafted; 0 for the target's own.

    Attributes:
        before: what the text continues, on the same line.
    """

    title: str
    pieces: list[tuple[str, int]]
    before: str = ""


@dataclass(frozen=True)
class Table:
    """Figures in rows."""

    title: str
    header: list[str]
    rows: list[list[str]]


@dataclass
class Page:
    """What a report says, from top to bottom.

    Attributes:
        said: what was found, in a sentence.
        facts: labels with the main figures.
        chosen: how the samples were chosen.
        notes: what the figures say and what they do not.
    """

    title: str
    said: str
    facts: list[tuple[str, str]]
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    chosen: str = ""
    environment: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_page(page: Page, path: Path, pictures: Collection[str] = ()) -> Path:
    """Write the page, and beside it its pictures as PNG; returns the page's path.

    Args:
        pictures: the names of all that such a page may have; those that an earlier page in its
            place had, and this one has not, are removed. Without names there is no PNG.

    Without matplotlib the page has its tables and texts, and says why it has no picture.
    """
    drawn = importlib.util.find_spec("matplotlib") is not None
    shown = [(each, _svg(each)) for each in page.pictures] if drawn else []
    if drawn and pictures:
        for name in set(pictures).difference(each.name for each in page.pictures):
            path.with_name(f"{name}.png").unlink(missing_ok=True)
        for each in page.pictures:
            assert each.name in pictures
            save_png(each, path.with_name(f"{each.name}.png"))
    write_atomically(path, render(page, shown, drawn))
    return path


def save_png(picture: Picture, path: Path) -> None:
    """The picture as PNG, dark on white; equal figures make equal files."""
    figure = draw(picture, _DARK)
    figure.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})


def render(page: Page, shown: Sequence[tuple[Picture, str]], drawn: bool = True) -> str:
    """The page as HTML; everything but the drawings is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(
        loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    deepest = max((d for sample in page.samples for _, d in sample.pieces), default=0)
    return jinja.get_template(TEMPLATE).render(
        page=page, shown=shown, drawn=drawn, depths=DEPTHS, deepest=min(deepest, len(DEPTHS))
    )


def draw(picture: Picture, ink: str) -> Figure:
    """The picture on its own, without its title; lines and letters are of one colour."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = _STYLE | dict.fromkeys(names, ink) | {"axes.facecolor": "none"}
    with mpl.rc_context(style):
        figure = Figure(figsize=picture.size, layout="constrained", facecolor="none")
        axes = figure.subplots()
        picture.draw(axes)
        axes.set_title("")  # the page has it as text
        if ink != _INK:  # over the whole width: beside long names the axes are narrow
            size = mpl.rcParams["axes.titlesize"]
            figure.suptitle(picture.title, x=0.01, ha="left", fontsize=size)
    return figure


def _svg(picture: Picture) -> str:
    """The drawing as an element of HTML."""
    import matplotlib as mpl

    out = io.StringIO()
    style: Any = _STYLE | {"svg.hashsalt": picture.name}
    with mpl.rc_context(style):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw(picture, _INK).savefig(out, format="svg", metadata=nothing, transparent=True)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", text, count=1)
    # Names of parts are the picture's own, since the page holds several.
    text = re.sub(r'\bid="', f'id="{picture.name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{picture.name}-", text)
    named = f'<svg role="img" aria-label="{html.escape(picture.title)}" '
    return text.replace(_INK, "currentColor").replace("<svg ", named, 1)
