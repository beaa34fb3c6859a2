"""Make a trained drafter propose only the most frequent tokens, which takes less time.

headstart trim runs/my-model/heads runs/trimmed --text prompts.jsonl
headstart trim ORG/NAME runs/trimmed --target ORG/MODEL --text prompts.jsonl --tokens 16000
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

from headstart.inputs import check_name, drafter_sources, load_target
from headstart.terminal import UsageError, quiet_stdout

from . import options as shared

_MOST = 32_000
_TEXT = (
    "text like what the model writes, whose tokens are counted: a file or folder of texts, prompts "
    "or chats, best with answers, or a folder of rows that headstart distill wrote"
)
_TOKENS = (
    f"propose N tokens (default: a quarter of the vocabulary, at most {_MOST:,}; 1/K of that for K "
    "heads that share the target's output layer)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drafter", metavar="ARTIFACT", help=f"{shared.ARTIFACT}; or a drafter of another project")
    add("folder", metavar="FOLDER", type=Path, help="a new folder to write to")
    add("--text", metavar="PATH", type=Path, required=True, help=_TEXT)
    add("--tokens", metavar="N", type=shared.positive, help=_TOKENS)
    add("--target", metavar="MODEL", help=shared.TARGET)
    add("--trust-remote-code", action="store_true", help=shared.TRUST)
    add("--allow-pickle", action="store_true", help=shared.PICKLE)


def run(options: argparse.Namespace) -> int:
    """Print the folder, and how much of a text is covered by tokens that the rest of it chooses."""
    check_name(options.drafter)
    from headstart.heads.artifacts.files import check_is_free

    if not options.text.exists():
        raise UsageError(f"--text {options.text} is not there; name a file or folder of text")
    check_is_free(options.folder)
    (source,) = drafter_sources(options)
    from headstart.heads import load_drafter
    from headstart.heads.artifacts.trimming import check_can_be_trimmed, save_trimmed
    from headstart.heads.core import end_tokens
    from headstart.train.data.token_counts import count_tokens

    target = load_target(options)
    model, tokenizer = target.model, target.tokenizer
    assert tokenizer is not None  # loaded together with the target
    with quiet_stdout():
        drafter: Any = load_drafter(source, model, tokenizer, dtype="auto")
    known = drafter.draft_vocabulary
    whole = drafter.config.vocab_size if known is None else len(known)
    size = options.tokens or _default_size(drafter, whole)
    check_can_be_trimmed(drafter, size)
    vocabulary = drafter.config.vocab_size
    ends = end_tokens(model)
    counts = count_tokens(options.text, tokenizer, vocabulary, known=known, ends=ends)
    ids = counts.chosen(size)
    with quiet_stdout():
        folder = save_trimmed(drafter, source, tokenizer, ids, options.folder)
    print(folder)
    covered = counts.coverage(size)
    print(f"It proposes {size:,} of {whole:,} tokens.")
    if covered is not None:
        print(f"As many, chosen by nine tenths of the text, cover {covered:.2%} of the rest.")
    print(
        "What that costs in acceptance, and whether it pays: headstart plan "
        f"--drafter {shlex.quote(str(folder))} --prompts FILE"
    )
    return 0


def _default_size(drafter: Any, whole: int) -> int:
    """How many of so many tokens are kept: heads that share a layer each get rows of their own."""
    shared = getattr(drafter.config, "output", None) == "shared"
    return max(1, min(_MOST, whole // 4) // (drafter.own_rows(1) if shared else 1))
