"""The bytes of tokens, of byte-level tokenizers and of those like SentencePiece's."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from headstart.heads.core.spelling import spell
from tests.support.chats import chat_tokenizer


def test_byte_level_tokens() -> None:
    tokenizer: Any = chat_tokenizer(None)
    ids = tokenizer.encode("\n\n a é", add_special_tokens=False)
    end = tokenizer.eos_token_id
    assert spell(tokenizer, [*ids, end]) == [b"\n\n", b" a", b" ", b"\xc3", b"\xa9", b"</s>"]


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama-2's: a space before the text, and bytes for characters that it does not know."""
    pieces = ["<unk>", "<0x20>", "<0xC3>", "<0xA9>", "▁", "a", "▁a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_tokens_with_bytes_for_what_is_not_known() -> None:
    found = spell(sentencepiece(), range(1, 7))
    assert found == [b" ", b"\xc3", b"\xa9", b" ", b"a", b" a"]
