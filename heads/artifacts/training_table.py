"""The part of a model card that says what a drafter was trained with."""

from __future__ import annotations

from typing import Any

from ..core import FINAL
from .manifest import Manifest


def training_table(manifest: Manifest) -> str:
    """What a drafter was trained on and reads, in Markdown after an empty line.

    It is empty where nobody noted it.
    """
    found, chat = manifest.trained, manifest.trained.get("chat") or {}
    if not found:
        return ""
    rows = [("target's revision", manifest.target_revision)]
    if chat.get("how") == "template":
        thinking = {None: "as the template has it", True: "on", False: "off"}[chat["thinking"]]
        rows += [
            ("chat template", f"sha256 `{chat['template_hash'][:12]}` with its settings"),
            ("thinking", thinking), ("system prompt", chat["system"] or "each chat's own"),
        ]  # fmt: skip
    else:
        rows.append(("chats", {"plain": "as plain text", "text": "none"}[chat.get("how", "text")]))
    rows += _layers(found["drafter"]["layers"])
    if data := found.get("data"):
        told, loss = found["rows"], data["target_loss"]
        counts = f"{told['rows']:,} rows, {told['supervised']:,} tokens supervised"
        rows += [
            ("rows", f"{counts}, the longest of {told['longest']:,} tokens"),
            ("answers", _answers(told)),
            ("sources", ", ".join(f"`{source}`" for source in data["sources"])),
            ("written by", "the target" if data["writer"] == "own" else data["writer"]),
            ("target's loss on them", f"{loss['nats']:.3f} nats per token" if loss else ""),
        ]  # fmt: skip
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows if value]
    return "\n\n| trained with | |\n|---|---|\n" + "\n".join(lines)


def _cell(text: str) -> str:
    """A text, such as a system prompt, as one line of a table's cell."""
    return " ".join(text.split()).replace("|", r"\|")


def _layers(layers: dict[str, list[int]]) -> list[tuple[str, str]]:
    """The layers of the target that a drafter reads, in both conventions."""
    read = layers["by_input"]
    if not read:
        return []
    if all(layer == FINAL for layer in read):
        return [("reads", "the target's state after its last norm")]
    return [
        (name, ", ".join("after the last norm" if of == FINAL else str(i) for i, of in each))
        for name, each in (
            ("layers read, by their input", zip(read, read, strict=True)),
            ("the same by their output", zip(layers["by_output"], read, strict=True)),
        )
    ]


def _answers(rows: dict[str, Any]) -> str:
    """How many answers there are, and whether what they begin with is taught."""
    answers, openings = rows.get("answers") or 0, rows.get("openings") or 0
    taught = "all" if openings == answers else f"{openings / answers:.1%} of them"
    return f"{answers:,}, {taught} from their first token on" if answers else ""
