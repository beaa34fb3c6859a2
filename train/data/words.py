"""Text tokenised word by word, where that gives the ids of the whole text; each word but once.

Byte-level tokenizers cut a text into words by a pattern, and merge the bytes of each word apart
from the others. In all patterns of `_PATTERNS` a word ends before a space that follows a character
which is no white space, so a text may be cut there beforehand:

    "It is  so.\\nIt is"        "It", " is", "  so.\\nIt", " is"

Most words of a corpus are frequent ones, whose ids are then looked up instead of found again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_WORD = re.compile(r"\s?\S+(?:[^\S ]\s*\S*)*|\s+\S*(?:[^\S ]\s*\S*)*")
_UNCUT = re.compile(r" (?<!\S )")  # a space before which a text is not cut
_KEPT = 1 << 26  # bytes of words and their ids, more or less, before they are found anew
_EACH = 160  # bytes that a word takes beside its characters

_SUFFIX = "'s|'t|'re|'ve|'m|'ll|'d"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_FIRST = r"[^\r\n\p{L}\p{N}]?"

_PATTERNS = {
    # GPT-2; what `ByteLevel` does by itself
    rf"{_SUFFIX}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    # Llama 3, Qwen 2 and 3
    *(rf"(?i:{_SUFFIX})|{_FIRST}\p{{L}}+|\p{{N}}{{1,3}}|" + _OTHERS % "",
      rf"(?i:{_SUFFIX})|{_FIRST}\p{{L}}+|\p{{N}}|" + _OTHERS % ""),
    # Qwen 3.5
    rf"(?i:{_SUFFIX})|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # GPT-4o, Mistral's Tekken
    *(rf"{_FIRST}[{_UPPER}]*[{_LOWER}]+{end}|{_FIRST}[{_UPPER}]+[{_LOWER}]*{end}|{digits}|"
      + _OTHERS % "/"
      for end in ("", f"(?i:{_SUFFIX})?") for digits in (r"\p{N}", r"\p{N}{1,3}")),
}  # fmt: skip


class Words:
    """The ids of texts by a tokenizer of the `tokenizers` library that `are_apart` holds for.

    Args:
        encode: the ids of many texts at once, as bytes of int32, without special tokens added.
    """

    def __init__(self, encode: Callable[[list[str]], Sequence[bytes]]):
        self.encode = encode
        self.kept: dict[str, bytes] = {}  # a word's ids, as int32
        self.room = _KEPT

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, as bytes of int32."""
        kept = self.kept
        found: list[bytes] = []
        unknown: dict[int, list[str]] = {}  # the words of texts that hold a new one
        for number, text in enumerate(texts):
            words = _words(text)
            try:
                found.append(b"".join(map(kept.__getitem__, words)))
            except KeyError:
                found.append(b"")
                unknown[number] = words
        new = list(set().union(*unknown.values()).difference(kept))
        kept.update(zip(new, self.encode(new), strict=True))
        for number, words in unknown.items():
            found[number] = b"".join(map(kept.__getitem__, words))
        self.room -= sum(_EACH + len(word) + len(kept[word]) for word in new)
        if self.room < 0:  # not emptied: another thread may read it
            self.kept, self.room = {}, _KEPT
        return found


def _words(text: str) -> list[str]:
    """The words of a text; an empty one of an empty text.

    >>> _words("It is.\\nIt is"), _words("It is  so.\\n It is")
    (['It', ' is.\\nIt', ' is'], ['It', ' is', '  so.\\n It', ' is'])
    """
    if "\0" in text or _UNCUT.search(text):
        return _WORD.findall(text)
    return text.replace(" ", "\0 ").split("\0")  # the same, in half the time


def are_apart(backend: Any) -> bool:
    """Whether the ids of a text are those of its words, each alone; False where not known.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> tokenizer = Tokenizer(models.BPE())
    >>> tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    >>> are_apart(tokenizer)
    True
    >>> tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    >>> are_apart(tokenizer)
    False
    """
    told = json.loads(backend.to_str())
    model, whole = told["model"], told["added_tokens"]
    steps = told["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        # NFC joins no space with what stands before it.
        and (told["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and not any(token["rstrip"] or " " in token["content"] for token in whole)
        and any(map(_cuts_words, steps))
        and all(_cuts_words(step) or _keeps_words(step) for step in steps)
    )


def _cuts_words(step: dict[str, Any]) -> bool:
    """Whether it cuts by one of the patterns, each word apart."""
    if step.get("type") == "Split":
        how = step["behavior"], step["invert"]
        return step["pattern"].get("Regex") in _PATTERNS and how in (
            ("Isolated", False), ("Removed", True),
        )  # fmt: skip
    return _is_bytes(step) and step["use_regex"]


def _keeps_words(step: dict[str, Any]) -> bool:
    """Whether it cuts nothing, or digits from what is none."""
    return step.get("type") == "Digits" or _is_bytes(step)


def _is_bytes(step: dict[str, Any]) -> bool:
    return step.get("type") == "ByteLevel" and not step["add_prefix_space"]
