"""The report: no reference leaves the file, everything is escaped, every picture is drawn."""

import json
import shutil
import subprocess
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.train.figures import plot
from headstart.train.figures.report import drawings
from headstart.train.figures.report.page import Page, Picture, Sample, Table, write_page
from headstart.train.figures.report.parts import depths_of, sample
from headstart.train.figures.report.training import draw_acceptance, tree_picture

EVIL = "<script src='http://a.example/x.js'>alert(1)</script>&\"' "
RATIO = {"median": 1.5, "low": 1.2, "high": 1.8, "min": 1.0, "max": 2.0, "within_noise": False}
TAUS = [
    {"tree": tree, "temperature": warm, "rounds": 30, "tau": 1.5, "acceptance_by_depth": shares}
    for tree, shares in (("chain:2", [0.9, 0.5]), (EVIL, [0.5, None]))
    for warm in (0, 1)
]


def page() -> Page:
    pytest.importorskip("matplotlib")
    draws: dict[str, Any] = {
        "bars": partial(drawings.acceptance_by_depth, shares={"": [0.9, 0.5, None]}),
        "trees": partial(drawings.acceptance_of_trees, found=TAUS),
        "lines": partial(drawings.acceptance_by_depth, shares={EVIL: [0.9], "b": [0.5, 0.1]}),
        "round": partial(
            drawings.round_parts, parts={EVIL: {"verify": 2.0, "draft": 1.0, "loop": -0.1}}
        ),
        "ratios": partial(
            drawings.ratios,
            found={EVIL: RATIO, "b": RATIO | {"low": None, "high": None, "within_noise": None}},
            label="x",
        ),
        "values": partial(drawings.values, found={"a, b": 2.0, "c": 1.0}, label="τ"),
        "prompts": partial(drawings.by_prompt, each={"": [1.0, 3.0, float("nan")]}, label="τ"),
    }
    pictures = [Picture(name, f"{name} {EVIL}", EVIL, draw, 2) for name, draw in draws.items()]
    tree = tree_picture([[0], [1], [0, 0], [0, 0, 0]], [0.6, 0.2, 0.3, 0.1])
    return Page(
        EVIL, EVIL, [(EVIL, EVIL)], [*pictures, tree], [Table(EVIL, [EVIL], [[EVIL]])],
        [Sample(EVIL, [(EVIL, 0), (EVIL, 3), (EVIL, 99)], EVIL)], EVIL, [(EVIL, EVIL)], [EVIL],
    )  # fmt: skip


class References(HTMLParser):
    """Tags, and every attribute that makes a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster"):
                self.fetched.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def read(text: str) -> References:
    found = References()
    found.feed(text)
    return found


def test_nothing_outside_of_the_file_is_asked_for(tmp_path: Path) -> None:
    names = [each.name for each in page().pictures]
    (tmp_path / "earlier.png").touch()
    (tmp_path / "of a user.png").touch()
    written = write_page(page(), tmp_path / "report.html", [*names, "earlier"])
    text = written.read_text()
    found = read(text)
    assert {"svg", "table", "figure"} <= set(found.tags)
    assert not {"script", "iframe", "img", "object", "embed"} & set(found.tags)
    assert all(value.startswith("#") or value == "data:," for value in found.fetched)
    assert "@import" not in text and "url(http" not in text
    assert len(found.ids) == len(set(found.ids)), "names in one file are one each"
    assert {value[1:] for value in found.fetched if value[0] == "#"} <= set(found.ids)
    assert "#010203" not in text  # ink is the page's
    assert 'class="d8" title="drafted at depth 99"' in text
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == {*names, "of a user"}


def test_a_reference_would_be_found() -> None:
    assert read("<img src='http://x'><a href='y'>").fetched == ["http://x", "y"]


def test_prompts_and_steps_are_whole_numbers_and_no_point_is_cut() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    steps = [{"step": n, "tau": 1.0 + n / 9, "acceptance_by_depth": [n / 9]} for n in range(1, 5)]
    for draw in (
        partial(drawings.by_prompt, each={"": [1.0, 1.2, 1.35]}, label="τ"),
        partial(plot.draw_by_depth, lines=steps, name="acceptance"),
        partial(plot.draw_tau, lines=steps, best=2),
    ):
        axes = Figure(figsize=(5, 3)).subplots()
        draw(axes)
        assert all(tick == round(tick) for tick in axes.get_xticks())
        drawn = [np.asarray(line.get_ydata()) for line in axes.lines]
        assert max(each.max() for each in drawn if len(each) > 2) < axes.get_ylim()[1]


def test_without_matplotlib_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = page()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = write_page(shown, tmp_path / "report.html", ["bars"]).read_text()
    assert "pip install matplotlib" in text and "<svg" not in text
    assert not list(tmp_path.glob("*.png"))


def test_pieces_are_whole_characters_with_their_depth() -> None:
    class Bytes:
        def decode(self, ids: list[int], **_: bool) -> str:
            return bytes(ids).decode("utf-8", "replace")

    ids = list("aé€b".encode())
    rounds = [(3, 3), (3, 4)]
    assert depths_of(rounds) == [0, 1, 2, 0, 1, 2, 3]
    # é is drafted at depth 1 and 2; of the three bytes of € one is the target's own.
    found = sample("x", Bytes(), ids, rounds, list(b"one\ntwo("))
    assert found.before == "two("
    assert found.pieces == [("a", 0), ("é", 2), ("€", 0), ("b", 3)]


@pytest.mark.proof
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_it_without_errors(width: int, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    write_page(page(), tmp_path / "report.html")
    # A window is 500 pixels wide at least: the page stands in a frame of the width that is tested,
    # and says how wide it would like to be.
    (tmp_path / "frame.html").write_text(
        f"<iframe id=f src=report.html width={width} height=900></iframe><p id=said></p><script>"
        "onload = () => { const d = f.contentDocument.documentElement; "
        "said.textContent = JSON.stringify([d.scrollWidth, d.clientWidth, "
        "f.contentWindow.performance.getEntriesByType('resource').length]); }</script>"
    )
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu",
        "--allow-file-access-from-files",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width + 100},1000", "--virtual-time-budget=3000", "--dump-dom",
        (tmp_path / "frame.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = done.stdout.split('<p id="said">')[1].split("<")[0]
    wanted, given, requests = json.loads(said)
    assert wanted <= given, "nothing stands out on the right"
    assert requests == 0
    assert "CONSOLE" not in done.stderr, done.stderr


def test_the_picture_of_acceptance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few drafted tokens give no point, and each point has its standard error."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    drawings.acceptance_of_trees(axes, TAUS)
    drawn: list[Any] = axes.containers
    lines = {each.get_label(): each.lines[0] for each in drawn}
    assert lines["chain:2, temperature 0"].get_xdata().tolist() == [1, 2]
    assert lines[f"{EVIL}, temperature 1"].get_ydata().tolist() == [50]
    fewer = [{**of, "rounds": 21} for of in TAUS]
    axes = Figure().subplots()
    drawings.acceptance_of_trees(axes, fewer)
    drawn = axes.containers
    assert {len(each.lines[0].get_xdata()) for each in drawn} == {1}

    image, bars = tmp_path / "a.png", tmp_path / "b.png"
    assert draw_acceptance({"taus": TAUS}, image) and image.read_bytes()[:4] == b"\x89PNG"
    assert draw_acceptance({"acceptance_by_depth": [0.5, None]}, bars)
    assert bars.read_bytes() != image.read_bytes()
    assert not draw_acceptance({"acceptance_by_depth": [None]}, bars)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not draw_acceptance({"taus": TAUS}, image)
