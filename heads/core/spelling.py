"""The bytes of text that a tokenizer's tokens stand for."""

import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no character yet
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def spell(tokenizer: Any, tokens: Sequence[int]) -> list[bytes]:
    """The bytes of each token, as it stands in the middle of a text.

    Args:
        tokenizer: of transformers.
    """
    # Decoders of SentencePiece leave out the space that a text begins with.
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    texts = tokenizer.batch_decode(
        [before, *([*before, token] for token in tokens)], clean_up_tokenization_spaces=False
    )
    pieces = tokenizer.convert_ids_to_tokens(list(tokens))
    first = len(texts[0])
    return [_bytes(text[first:], piece) for text, piece in zip(texts[1:], pieces, strict=True)]


def _bytes(text: str, piece: str) -> bytes:
    if _UNFINISHED in text:
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        if all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
    return text.encode()
