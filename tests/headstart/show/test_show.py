"""Text as it is written: what reaches a terminal, a pipe and a notebook."""

import html
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from headstart.heads import OptionError, load_drafter
from headstart.infer import Emitted, Speculator
from headstart.show import Report, ShowStreamer
from headstart.show.figures import Figures
from headstart.show.views import StreamView, TerminalView, view_for
from tests.support.bytewise import save_target

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def emitted(tokens: list[int], nodes: int, steps: int = 5) -> Emitted:
    padded = tokens + tokens[-1:] * (steps - len(tokens))
    return Emitted(np.array([len(tokens)]), np.array([nodes]), np.array([padded]))


class Characters:
    """Decodes ids as code points."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def shown(text: str, width: int = 20, **environment: Any) -> tuple[str, Any]:
    out = Screen()
    console = Console(
        file=out, width=width, force_terminal=True, color_system="truecolor", markup=False,
        no_color=environment.get("no_color", False), legacy_windows=False,
    )  # fmt: skip
    with ShowStreamer(Characters(), view=TerminalView(console)) as streamer:
        streamer.put_round(emitted([ord(text[0])], 1, 1))
        for at in range(1, len(text), 3):
            part = [ord(c) for c in text[at : at + 3]]
            streamer.put_round(emitted(part, 3))
    return out.getvalue(), streamer


def screen_of(written: str, width: int) -> list[str]:
    """What stands on the screen: lines, after moves up and erasures, wide characters as one."""
    rows, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\n|\r)", written):
        if part == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif part == "\r":
            continue
        elif part.startswith("\x1b"):
            if part.endswith("A"):
                row -= int(part[2:-1] or 1)
            elif part == "\x1b[2K":
                rows[row] = ""
        else:
            rows[row] += part
    assert all(cell_len(line) <= width for line in rows), rows
    return rows


@pytest.mark.parametrize("width", [20, 80])
def test_a_terminal_shows_the_text_and_figures_below_it(width: int) -> None:
    text = "def function(x):\n    return '東京東京東京東京東京東京' + y\n\nthe end of a long line"
    written, streamer = shown(text, width)
    rows = screen_of(written, width)
    line = next(i for i, row in enumerate(rows) if row.startswith("─"))
    assert "".join("".join(rows[:line]).split()) == "".join(text.split())
    assert rows[0].startswith("def function(x):") and rows[1].startswith("    return")
    assert rows[line + 1].startswith(f"{len(text)} tokens")
    assert "\x1b[38;2;59;130;246m" in written  # depth 1
    assert str(streamer.text) == text and streamer.ids == [ord(c) for c in text]
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # the cursor is back


def test_a_finished_line_is_on_the_screen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.show.views._PAUSE", 0.0)  # every piece is drawn
    screen = Screen()
    console = Console(file=screen, width=40, force_terminal=True, color_system=None)
    with ShowStreamer(Characters(), view=TerminalView(console)) as streamer:
        for number, letter in enumerate("one two\nthree\n\nfour", 1):
            streamer.put_round(emitted([ord(letter)], 1, 1))
            rows = screen_of(screen.getvalue(), 40)
            line = next(i for i, row in enumerate(rows) if row.startswith("─"))
            said = str(streamer.text)
            assert [row.rstrip() for row in rows[:line]] == [r.rstrip() for r in said.split("\n")]
            assert rows[line + 1].startswith(f"{number} token")


def test_what_the_text_continues_stands_in_front_of_it() -> None:
    screen = Screen()
    console = Console(file=screen, width=40, force_terminal=True, color_system="truecolor")
    with ShowStreamer(Characters(), view=TerminalView(console, "def read(\x1b")) as streamer:
        streamer.put_round(emitted([ord("x"), ord(")")], 0, 1))
    assert screen_of(screen.getvalue(), 40)[0] == "def read(\\x1bx)"
    assert str(streamer.text) == "x)"


def test_control_characters_never_reach_a_terminal() -> None:
    evil = "a\x1b]0;title\x07b\x9b2Jc\rd\u202ee"
    written, _ = shown(evil, 80)
    rest = ESCAPES.sub("", written)
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(rest)
    assert "\\x1b]0;title\\x07b\\x9b2Jc\\rd\\u202ee" in "".join(screen_of(written, 80))
    out = Screen()
    with ShowStreamer(Characters(), out, coloured=False) as streamer:
        streamer.put_round(emitted([ord(c) for c in evil], 1, 30))
    assert "\x1b" not in out.getvalue() and "\x07" not in out.getvalue()


def test_no_colour_underlines() -> None:
    written, _ = shown("abcdefgh", no_color=True)
    assert "\x1b[38" not in written and "\x1b[4m" in written


def test_a_pipe_gets_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ShowStreamer(Characters(), out) as streamer:
        streamer.put_round(emitted([ord("a")], 1, 1))
        streamer.put_round(emitted([ord("\x1b"), ord("東")], 2))
        streamer.end()
    assert out.getvalue() == "a\x1b東\n"


def test_a_dumb_terminal_gets_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(view_for(Screen()), StreamView)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(view_for(Screen()), TerminalView)
    assert isinstance(view_for(Screen(), coloured=False), StreamView)


def test_a_notebook_updates_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    def display(page: Any, display_id: bool) -> Any:
        pages.append(page)
        return SimpleNamespace(update=pages.append)

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display, HTML=str))
    with ShowStreamer(Characters()) as streamer:
        streamer.put_round(emitted([ord("a")], 1, 1))
        streamer.put_round(emitted([ord("b"), ord("<")], 2))
    assert "b</span>" in pages[-1] and "&lt;" in pages[-1] and "3 tokens" in pages[-1]
    assert streamer.text.to_html() in pages[-1]


def test_figures_are_those_of_the_statistics(tmp_path: Any) -> None:
    model, tokenizer = save_target(tmp_path / "target")
    speculator = Speculator(model, load_drafter("lookup", model, tokenizer), tree="chain:4")
    ids = torch.tensor([[97, 98, 99, 97, 98, 99, 97, 98]])
    out = io.StringIO()
    with ShowStreamer(tokenizer, out) as streamer:
        found = speculator.generate(ids, max_new_tokens=60, do_sample=False, streamer=streamer)
    figures, stats = streamer.figures, speculator.stats
    assert streamer.ids == found[0, 8:].tolist()
    assert (figures.tokens, figures.rounds) == (60, stats.rounds)
    assert figures.tau == pytest.approx(stats.tau)
    assert figures.drafted == (stats.drafted.depths > 0).sum() > 5
    known = [share for share in stats.acceptance_by_depth if share == share]
    assert figures.acceptance == pytest.approx(known)
    assert out.getvalue() == f"{tokenizer.decode(streamer.ids)}\n"
    assert "τ" in figures.line() and "drafted" in figures.line()


def test_a_legend_is_cut_to_the_width() -> None:
    figures = Figures()
    figures.add(emitted([1], 1, 1))
    figures.add(emitted(list(range(30)), 30, 31))
    for width in (60, 80, 120):
        assert figures.legend(width, True).cell_len <= width
    assert "…" in figures.legend(80, True).plain


def test_what_a_plain_token_means_is_left_out_before_a_share() -> None:
    figures = Figures()
    assert figures.legend(80, True).plain == "no round yet"
    figures.add(emitted([1], 1, 1))
    assert figures.legend(80, True).plain == "no round yet"  # the prefill is none
    figures.add(emitted(list(range(4)), 4, 5))
    whole = "accepted at depth 1: 100%  2: 100%  3: 100%  4: 0%"
    assert figures.legend(80, True).plain == f"{whole} · plain: the target's own"
    assert figures.legend(50, True).plain == whole


def test_a_report_is_a_page_within_the_notebook(tmp_path: Path) -> None:
    page = '<style>body { margin: 0 }</style><p title="a">1 < 2 & "3"</p>'
    (tmp_path / "report.html").write_text(page)
    for place in (tmp_path, tmp_path / "report.html"):
        found = Report(place, height=300)._repr_html_()
        assert found.startswith('<iframe sandbox="" ') and "height:300px" in found
        (inside,) = re.findall(r'srcdoc="([^"]*)"', found)
        assert html.unescape(inside) == page
    (heads := tmp_path / "run" / "heads").mkdir(parents=True)  # of `headstart train`
    (tmp_path / "report.html").rename(heads / "report.html")
    assert Report(tmp_path / "run").path == heads / "report.html"
    with pytest.raises(OptionError, match=r"no report at .*nothing"):
        Report(tmp_path / "nothing")
