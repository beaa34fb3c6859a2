"""Small runs on random targets with recurrent layers."""

from pathlib import Path
from typing import Any

import torch

from headstart.heads import FAMILIES
from headstart.train.data.documents import Document
from headstart.train.scratch_target import train_tokenizer
from tests.support.recipes import TINY
from tests.support.recurrent import RECURRENT

SIZES: dict[str, dict[str, Any]] = {
    "falcon-h1": {"lm_head_multiplier": 0.4, "embedding_multiplier": 1.5},
}


def save_target(folder: Path, name: str) -> Path:
    """A random target in float32, with a tokenizer."""
    words = " ".join(f"word{n} {n * n}" for n in range(400))
    torch.manual_seed(0)
    model = RECURRENT[name](vocab_size=300, **SIZES.get(name, {})).float()
    model.save_pretrained(folder)
    train_tokenizer([Document("words", words)], 300, 128).save_pretrained(folder)
    return folder


def recipe_of(
    root: Path,
    target: Path,
    family: str,
    /,
    drafter: dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """A recipe that trains for four steps on text in `root`.

    Args:
        drafter: its options, in place of the smallest ones.
        sections: settings of sections, added to those of the recipe, and whole other settings.
    """
    text = root / "text.txt"
    text.write_text("\n\n".join(f"word{n} {n * n} word{n + 7} " * 12 for n in range(60)))
    given: dict[str, Any] = TINY | {
        "name": f"{target.name}-{family}".replace(".", "-").replace(" ", "-"),
        "output": str(root / "runs"),
        "corpus": {"source": str(text), "held_out": 0.4},
        "target": {"model": str(target)},
        "drafter": {"family": family, **(drafter or FAMILIES[family].small)},
        "train": {"batch_size": 4, "max_steps": 4, "eval_every": 2, "loss": "forward_kl"},
        "decode": {**TINY["decode"], "tree": "chain:2"},
    }
    for name, value in sections.items():
        given[name] = {**given[name], **value} if isinstance(value, dict) else value
    return given
