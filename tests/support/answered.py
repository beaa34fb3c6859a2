"""Chats whose turns a target answers anew, and rows of its answers."""

from headstart.train.data.documents import Document
from headstart.train.data.training_rows import Row
from headstart.train.recipe import Distill

END = "<|im_end|>"
WORDS = "the tea is in the pot and the cat sat on a mat"


def chat(id: str, *turns: str, answer: str = "yes it is") -> Document:
    messages = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return Document.chat(id, messages)


CHATS = [
    chat(f"chats:{n}", *(WORDS[n : n + 4 + 3 * k] for k in range(1 + n % 3))) for n in range(9)
]

SPEC = Distill(
    examples=99, prefix="prompt", prefix_tokens=60, new_tokens=24, max_length=200, batch_size=4,
    shards=2,
)  # fmt: skip


def same(rows: list[Row], others: list[Row]) -> bool:
    def key(row: Row) -> tuple[str, int, bytes, bytes]:
        return row.id, len(row.tokens), row.tokens.tobytes(), row.supervised.tobytes()

    return sorted(map(key, rows)) == sorted(map(key, others))
