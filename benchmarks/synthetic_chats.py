"""Writes chats of random English words, as large as asked, to measure preparation with.

    python -m benchmarks.synthetic_chats 50 chats.jsonl

writes 50 MB. The words are those of Python's own documentation, drawn as often as they occur there;
the file is the same for the same size and seed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from pydoc_data.topics import topics

SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer in plain words."}


def write_chats(path: Path, size: int, seed: int = 0) -> int:
    """Write at least `size` bytes of JSON Lines with `messages`; returns the number of chats.

    A chat has one to four exchanges, 5 to 60 words a question and 40 to 300 an answer; every tenth
    has a system message.
    """
    draw = random.Random(seed)
    words = [word for _, text in sorted(topics.items()) for word in text.split()]
    count = written = 0

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))

    with open(path, "w", encoding="utf-8") as lines:
        while written < size:
            messages = [SYSTEM] if draw.random() < 0.1 else []
            for _ in range(draw.randint(1, 4)):
                messages.append({"role": "user", "content": text(5, 60)})
                messages.append({"role": "assistant", "content": text(40, 300)})
            written += lines.write(json.dumps({"messages": messages}) + "\n")
            count += 1
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("megabytes", type=int)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(write_chats(asked.path, asked.megabytes * 1_000_000, asked.seed), "chats")
