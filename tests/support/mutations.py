"""Damage of files at random places, and what is expected of whatever reads them."""

import json
import random
from typing import Any

from safetensors import SafetensorError

from headstart.terminal import one_line

VALUES: list[Any] = [
    None, True, -1, 0, 10**9, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../../x",
    "\x1b[2J", [], [[]], [-1], ["a"], {}, {"a": {"b": [1]}}, [0] * 10_000,
]  # fmt: skip
REFUSED = (ValueError, OSError, SafetensorError)  # what the command line prints on one line


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return draw.choice([
        lambda: data[:at],
        lambda: data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + draw.randbytes(draw.randrange(1, 64)) + data[at:],
        lambda: data + data,
        lambda: b"",
        lambda: draw.randbytes(8) + data[8:],
        lambda: b"[" * 100_000,
        lambda: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ])()  # fmt: skip


def mutate_json(data: bytes, draw: random.Random) -> bytes:
    """One place in the document, at any depth, gets another value or goes."""
    document = json.loads(data)
    mutate(document, draw)
    return json.dumps(document).encode()


def alike(value: Any) -> list[Any]:
    """Values of the same kind, some of them far too large."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [1, 2, 3, value + 1, 1000 * value, 10**6, 10**9, 10**12, 2**62]
    if isinstance(value, float):
        return [0.0, 1.0, 2 * value, 1e9, 1e300, 1]
    return [value * 2, value[:1]] if isinstance(value, str | list) else VALUES


def mutate(document: Any, draw: random.Random) -> None:
    """Change one place of a JSON document, at any depth."""
    places: list[tuple[Any, Any]] = []
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            places += [(value, key) for key in keys]
            left += [value[key] for key in keys]
    holder, key = draw.choice(places)
    if draw.random() < 0.2:
        del holder[key]
    elif isinstance(holder, dict) and draw.random() < 0.1:
        holder[f"{key}_"] = holder.pop(key)
    else:
        holder[key] = draw.choice(alike(holder[key]) if draw.random() < 0.5 else VALUES)


def mutate_header(data: bytes, draw: random.Random) -> bytes:
    """One place in the header of a safetensors file, whose length is put right."""
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + size], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def tried(action: Any) -> Any:
    """What it returns; None where it was refused, and then on one line."""
    try:
        return action()
    except REFUSED as error:
        line = one_line(error)
        assert "\n" not in line and len(line) > 20, line
        return None
