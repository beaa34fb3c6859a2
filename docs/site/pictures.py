"""Draws the pictures of README and docs/concepts.md: `python docs/site/pictures.py`.

They go into docs/pictures, and stand on a light card of their own, so that they can be read on a
light and on a dark page.
"""

import json
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
INK, SOFT, CARD, LINE = "#1f2937", "#5b6472", "#f5f6fa", "#9aa3b2"
KEPT, REFUSED, OWN = "#1a7f5a", "#8a93a3", "#3b4cca"  # accepted, rejected, the target's own token
DEPTHS = ("#3b82f6", "#06a3b7", "#12a150", "#8aa00a", "#d99a00")  # as reports have them

# The example of all pictures: name, parent, depth, column, row, whether it is accepted.
NODES = [
    ("sat", -1, 0, 1.5, True),
    ("on", 0, 1, 0.8, True),
    ("down", 0, 1, 2.4, False),
    ("the", 1, 2, 0.3, True),
    ("a", 1, 2, 1.4, False),
    ("mat", 3, 3, 0.0, True),
    ("sofa", 3, 3, 0.9, False),
]


def text(x: float, y: float, words: str, size: int = 15, fill: str = INK, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" {more}>{words}</text>'


def middle(x: float, y: float, words: str, size: int = 15, fill: str = INK) -> str:
    return text(x, y, words, size, fill, 'text-anchor="middle"')


def box(x: float, y: float, wide: float, high: float, fill: str, more: str = "") -> str:
    size = f'width="{wide:.0f}" height="{high:.0f}"'
    return f'<rect x="{x:.0f}" y="{y:.0f}" {size} rx="6" fill="{fill}" {more}/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE, width: float = 2) -> str:
    ends = f'x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def save(name: str, wide: int, high: int, title: str, parts: list[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" role="img" font-family="system-ui, DejaVu Sans, sans-serif">'
        f"<title>{title}</title>"
    )
    card = f'<rect width="{wide}" height="{high}" rx="12" fill="{CARD}"/>'
    lines = "\n".join([head, card, *parts, "</svg>"])
    (FOLDER / f"{name}.svg").write_text(lines + "\n", encoding="utf-8")


def drawn_tree(left: float, top: float, wide: float, high: float) -> list[str]:
    """The tree, its nodes' numbers included: `wide` a column, `high` a level."""
    places = [(left + column * wide, top + depth * high) for _, _, depth, column, _ in NODES]
    parts = []
    for number, (_, parent, _, _, kept) in enumerate(NODES):
        if parent >= 0:
            (x1, y1), (x2, y2) = places[parent], places[number]
            parts.append(line(x1, y1 + 14, x2, y2 - 14, KEPT if kept else LINE, 4 if kept else 2))
    for number, ((word, _, depth, _, kept), (x, y)) in enumerate(zip(NODES, places, strict=True)):
        fill = INK if depth == 0 else KEPT if kept else "#ffffff"
        edge = "" if kept else f'stroke="{REFUSED}" stroke-width="1.5" stroke-dasharray="4 3"'
        parts.append(box(x - 32, y - 16, 64, 32, fill, edge))
        parts.append(middle(x, y + 5, word, 15, "#ffffff" if kept else SOFT))
        parts.append(text(x + 36, y - 6, str(number), 11, SOFT))
    return parts


def tree() -> None:
    parts = [text(24, 34, "… the cat", 15, SOFT), *drawn_tree(90, 62, 120, 74)]
    parts += [line(90, 300, 90, 334, OWN, 3), box(58, 334, 64, 32, OWN)]
    parts += [middle(90, 355, "and", 15, "#ffffff")]
    for row, (colour, words) in enumerate(
        [
            (INK, "the last token so far: the root"),
            (KEPT, "drafted and accepted"),
            (REFUSED, "drafted and rejected"),
            (OWN, "the target’s own next token: the bonus"),
        ]
    ):
        y = 250 + 30 * row
        dashed = f'stroke="{colour}" stroke-width="1.5" stroke-dasharray="4 3"'
        rejected = colour == REFUSED
        parts += [box(330, y - 13, 22, 16, "#ffffff" if rejected else colour, dashed * rejected)]
        parts += [text(362, y, words, 14, SOFT)]
    save("tree", 680, 390, "A token tree and what is accepted of it", parts)


def mask() -> None:
    parts = drawn_tree(60, 96, 106, 74)
    left, top, cell, prefix = 440, 96, 34, 3
    names = ["the", "cat", "…", *(word for word, *_ in NODES)]
    for column, name in enumerate(names):
        x = left + column * cell + cell / 2 + 4
        colour = SOFT if column < prefix else INK
        turned = f'transform="rotate(-45 {x:.0f} {top - 10})"'
        parts.append(text(x, top - 10, name, 13, colour, turned))
    for row, (word, *_) in enumerate(NODES):
        y = top + row * cell
        parts.append(text(left - 10, y + 22, word, 13, INK, 'text-anchor="end"'))
        seen = {row}
        while NODES[min(seen)][1] >= 0:
            seen.add(NODES[min(seen)][1])
        for column in range(len(names)):
            before = column < prefix
            fill = "#c3cad8" if before else KEPT if column - prefix in seen else "#ffffff"
            more = 'stroke="#d9dee8"'
            parts.append(box(left + column * cell, y, cell - 3, cell - 3, fill, more))
    y = top + len(NODES) * cell + 30
    parts += [middle(left + 1.5 * cell, y, "the text so far", 13, SOFT)]
    parts += [middle(left + 6.5 * cell, y, "the nodes of the tree", 13, SOFT)]
    parts += [text(24, 34, "Each node sees the text and the nodes above it, and no other.", 16)]
    save("mask", 820, 390, "The mask of a token tree", parts)


def round_() -> None:
    parts = [text(24, 36, "Plain decoding: one forward of the target a token", 16)]
    for step, word in enumerate(["on", "the", "mat", "and"]):
        parts += [
            box(24 + 150 * step, 52, 142, 34, OWN),
            middle(95 + 150 * step, 74, word, 15, "#fff"),
        ]
    parts += [text(24, 132, "Speculative decoding: one round, the same four tokens", 16)]
    steps = [
        ("draft", 70, SOFT),
        ("verify all nodes: one forward", 240, OWN),
        ("accept, commit", 120, KEPT),
    ]
    x = 24
    for name, wide, fill in steps:
        parts += [box(x, 148, wide, 34, fill), middle(x + wide / 2, 170, name, 13, "#fff")]
        x += wide + 8
    parts += [text(x + 4, 171, "→ on the mat and", 15)]
    parts += [line(24, 212, 630, 212), text(24, 232, "time", 13, SOFT)]
    parts += [text(24, 256, "Lengths are a sketch, not a measurement.", 13, SOFT)]
    save("round", 660, 276, "Plain decoding and one round", parts)


def acceptance() -> None:
    words, p, q = ["on", "down", "by", "up"], [0.5, 0.2, 0.2, 0.1], [0.3, 0.5, 0.1, 0.1]
    parts, high, base = [], 280, 230
    panels = [
        ("drafter q and target p", 30),
        ("kept: min(p, q) = 0.7", 300),
        ("drawn anew: p − kept = 0.3", 540),
    ]
    for title, left in panels:
        parts += [text(left, 40, title, 15), line(left, base, left + 210, base)]
    for i, word in enumerate(words):
        kept = min(p[i], q[i])
        for left in (30, 300, 540):
            parts.append(middle(left + 52 * i + 26, base + 20, word, 13, SOFT))
        x = 30 + 52 * i
        parts += [box(x + 4, base - q[i] * high, 20, q[i] * high, REFUSED)]
        parts += [box(x + 27, base - p[i] * high, 20, p[i] * high, OWN)]
        parts += [box(300 + 52 * i + 12, base - kept * high, 28, kept * high, KEPT)]
        if (rest := p[i] - kept) > 0:
            parts += [box(540 + 52 * i + 12, base - rest * high, 28, rest * high, OWN)]
    parts += [
        box(30, 264, 16, 14, REFUSED),
        text(52, 276, "q, what the drafter draws from", 13, SOFT),
    ]
    parts += [box(270, 264, 16, 14, OWN), text(292, 276, "p, the target", 13, SOFT)]
    parts += [text(400, 276, "kept + drawn anew = p, at every token", 14, INK)]
    save("acceptance", 780, 296, "How rejection sampling keeps the target’s distribution", parts)


def written(rows: int = 9) -> None:
    """The first rows of a text that was sampled, which sample.json holds as it was written.

    Each token has the width that it takes, whatever the reader's font.
    """
    sample = json.loads(Path(__file__).with_name("sample.json").read_text(encoding="utf-8"))
    wide, high, left, top = 8.4, 24, 24, 34
    parts = [text(left, top, "headstart generate --show", 13, SOFT)]
    row, column = 1, 0.0

    def piece(words: str, depth: int | None) -> None:
        nonlocal column
        x, y, width = left + column * wide, top + 10 + row * high, len(words) * wide
        if depth and words.strip():
            colour = DEPTHS[min(depth, len(DEPTHS)) - 1]
            parts.append(box(x, y - 16, width, 21, colour, 'fill-opacity="0.3"'))
            parts.append(line(x, y + 5, x + width, y + 5, colour))
        size = f'textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs" xml:space="preserve" '
        size += 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"'
        if words.strip():
            parts.append(text(x, y, escape(words), 14, SOFT if depth is None else INK, size))
        column += len(words)

    for words, depth in [(sample["prompt"], None), *sample["pieces"]]:
        for number, part in enumerate(words.split("\n")):
            if number:
                row, column = row + 1, 0.0
            if part and row <= rows:
                piece(part, depth)
    y = top + 10 + (rows + 1) * high + 16
    parts += [text(left, y, "drafted at depth", 13, SOFT)]
    for depth, colour in enumerate(DEPTHS, start=1):
        x = left + 88 + 26 * depth
        parts += [
            box(x, y - 15, 20, 20, colour, 'fill-opacity="0.3"'),
            middle(x + 10, y, str(depth), 13),
        ]
    parts += [text(left + 248, y, "and accepted; plain: the model’s own token", 13, SOFT)]
    parts += [text(left, y + 22, sample["said"], 13, SOFT)]
    save("text", 700, int(y + 42), "A text, coloured by who proposed each token", parts)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (tree, mask, round_, acceptance, written):
        draw()
