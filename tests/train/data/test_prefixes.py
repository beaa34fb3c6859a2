"""What the target continues: windows, beginnings, and prompts of different lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.data import documents
from headstart.train.data.distill import distill, summary
from headstart.train.data.documents import ChatTemplateError, Document, DroppedCallsError
from headstart.train.data.prefixes import (
    DistillError,
    Prompts,
    Windows,
    chat_renderer,
    encode,
    leave_out,
    make_prefixes,
)
from headstart.train.data.training_rows import Rows
from headstart.train.fit.target_with_drafter import TargetWithDrafter
from headstart.train.losses.comparisons import IGNORED
from headstart.train.recipe import Chat, Distill
from headstart.train.scratch_target import train_tokenizer
from tests.support.training import columns

ASK, ANSWER, MORE = "why is the sky blue?", "it scatters.", "and at night?"
CHAT = Document.chat("chats:1", [
    {"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": MORE}, {"role": "assistant", "content": "black."},
])  # fmt: skip
OPEN = Document.chat("chats:2", [{"role": "user", "content": MORE}])
PAIR = Document("code:1", "def one():\n", answer="    return 1\n")
TEXT = Document("text:1", "plain words")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([CHAT, PAIR, TEXT], 270, 256)


def tiny_target(context: int = 256) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=270, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=context, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def texts(tokenizer: PreTrainedTokenizerFast, prefixes: Prompts | Windows) -> list[str]:
    return [str(tokenizer.decode(prefixes[i])) for i in range(len(prefixes))]


SPEC = Distill(examples=9, prefix="prompt", prefix_tokens=100, new_tokens=9, batch_size=4, shards=2)
DOCUMENTS = [CHAT, OPEN, PAIR, TEXT]


def test_prompts_end_where_the_answer_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    found = texts(tokenizer, make_prefixes(SPEC, tokenizer, DOCUMENTS))
    first = f"User: {ASK}\n\nAssistant:"
    assert found == [
        first,
        f"{first} {ANSWER}\n\nUser: {MORE}\n\nAssistant:",
        f"User: {MORE}\n\nAssistant:",
        PAIR.text,
        TEXT.text,
    ]


def test_chats_go_through_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = encode(tokenizer, DOCUMENTS).tolist()
    tokenizer.chat_template = TEMPLATE
    spec = replace(SPEC, chat="template")
    assert texts(tokenizer, make_prefixes(spec, tokenizer, DOCUMENTS)) == [
        f"<user>{ASK}<assistant>",
        f"<user>{ASK}<assistant>{ANSWER}<user>{MORE}<assistant>",
        f"<user>{MORE}<assistant>",
        PAIR.text,
        TEXT.text,
    ]
    whole = [str(tokenizer.decode(row)) for row in encode(tokenizer, DOCUMENTS)]
    assert whole[0] == f"<user>{ASK}<assistant>{ANSWER}<user>{MORE}<assistant>black."
    assert whole[2] == PAIR.text + (PAIR.answer or "")
    assert encode(tokenizer, DOCUMENTS, "plain").tolist() == plain
    tokenizer.chat_template = None
    with pytest.raises(DistillError, match=r"distill\.chat is template, but the tokenizer has"):
        make_prefixes(spec, tokenizer, DOCUMENTS)


def test_a_template_that_refuses_names_the_row_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('no ' + messages[0].content) }}"
    with pytest.raises(DistillError, match="chats:1: the tokenizer's chat template") as error:
        make_prefixes(SPEC, tokenizer, DOCUMENTS)
    assert ASK not in str(error.value) and error.value.__suppress_context__


def test_what_does_not_help_is_not_advised(tokenizer: PreTrainedTokenizerFast) -> None:
    """Plain chats leave calls of tools out, too."""
    tokenizer.chat_template = TEMPLATE
    for how, error, remedy in (
        ("auto", DroppedCallsError(), "drop the row, or set chat.refused=skip."),
        ("plain", DroppedCallsError(), "drop the row, or set chat.refused=skip."),
        ("auto", ChatTemplateError("no"), "chat.refused=skip, or set distill.chat=plain."),
    ):
        with pytest.raises(DistillError) as refused:
            leave_out(chat_renderer(tokenizer, None, how), CHAT, error)
        assert str(refused.value).endswith(remedy)


def test_a_chat_that_the_template_refuses_gives_no_prompt_where_asked(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = (
        TEMPLATE + "{% if messages[1:] %}{{ raise_exception('no') }}{% endif %}"
    )
    skip = Chat(refused="skip")
    with pytest.raises(DistillError, match=r"roles user, assistant, user \(no\); drop"):
        make_prefixes(SPEC, tokenizer, DOCUMENTS)
    found = make_prefixes(SPEC, tokenizer, DOCUMENTS, skip)
    assert len(found) == len(DOCUMENTS) and found.skipped == 1  # the first chat's second prompt
    assert [len(row) > 0 for row in encode(tokenizer, DOCUMENTS, chat=skip)] == [False, *[True] * 3]
    # One that does not end is no matter of a chat.
    monkeypatch.setattr(documents, "_SECONDS", 0.2)
    loops = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    tokenizer.chat_template = loops + TEMPLATE
    with pytest.raises(DistillError, match="does not end"):
        make_prefixes(SPEC, tokenizer, DOCUMENTS, skip)


def test_a_time_limit_holds_for_several_chats(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = TEMPLATE
    alone = [encode(tokenizer, [document])[0].tolist() for document in DOCUMENTS]
    calls: list[Any] = []
    limit = documents.in_time
    monkeypatch.setattr(documents, "in_time", lambda call: calls.append(call) or limit(call))
    assert encode(tokenizer, 50 * DOCUMENTS).tolist() == 50 * alone
    # The two chats of each four documents stand together; texts need no limit.
    assert len(calls) == 50
    assert encode(tokenizer, 50 * [CHAT]).tolist() == 50 * alone[:1]
    assert len(calls) == 51


def test_the_start_token_comes_once(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers.processors import TemplateProcessing

    start = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    tokenizer.chat_template = "<|endoftext|>" + TEMPLATE
    for row in encode(tokenizer, DOCUMENTS):
        assert row[0] == start and start not in row[1:]
    spec = replace(SPEC, prefix="start", prefix_tokens=3)
    prefixes = make_prefixes(spec, tokenizer, DOCUMENTS)
    assert [prefixes[i].tolist() for i in range(4)] == [
        row[:3] for row in encode(tokenizer, DOCUMENTS).tolist()
    ]


def test_prompts_come_before_any_repeats(tokenizer: PreTrainedTokenizerFast) -> None:
    prefixes = make_prefixes(SPEC, tokenizer, DOCUMENTS)
    drawn = prefixes.draw(12, seed=0)
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list(range(5))
    assert drawn[:9] == prefixes.draw(9, seed=0) and drawn != prefixes.draw(12, seed=1)


def test_rows_of_ragged_prompts_are_what_generate_writes(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    target: Any = tiny_target().double()
    distill(SPEC, target, tokenizer, DOCUMENTS, tmp_path, progress=False)
    rows = columns(Rows.load(tmp_path))
    assert len(rows.lengths) == 4 and len(set(rows.prompt_lengths.tolist())) == 4
    prompts = encode(tokenizer, [d.prompts()[0] for d in DOCUMENTS]).tolist()
    for tokens, length, prefix in zip(rows.tokens, rows.lengths, rows.prompt_lengths, strict=True):
        ids = tokens[:prefix].tolist()
        assert ids in prompts
        alone = target.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)
        assert length == prefix + 9 and tokens[:length].tolist() == alone[0].tolist()
        assert not tokens[length:].any()
    item = Rows.load(tmp_path)[0]
    first, last = int(rows.prompt_lengths[0]), int(rows.lengths[0])
    assert item["supervised"].nonzero().flatten().tolist() == list(range(first, last))


def test_an_end_of_text_cuts_ragged_rows(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    target: Any = tiny_target().double()
    spec = replace(SPEC, turns="first")
    distill(spec, target, tokenizer, DOCUMENTS, tmp_path / "free", progress=False)
    free = columns(Rows.load(tmp_path / "free"))
    starts = free.prompt_lengths.long()
    end = int(free.tokens[torch.arange(4), starts + 3][0])
    target.generation_config.eos_token_id = end
    distill(spec, target, tokenizer, DOCUMENTS, tmp_path / "cut", progress=False)
    rows = columns(Rows.load(tmp_path / "cut"))
    assert (rows.lengths < free.lengths).any()
    for i, written in enumerate(rows.tokens):
        begin, length = int(rows.prompt_lengths[i]), int(rows.lengths[i])
        assert written[:length].tolist() == free.tokens[i, :length].tolist()
        assert end not in written[begin : length - 1]
        assert length == free.lengths[i] or written[length - 1] == end


def test_prompts_too_long_are_skipped_and_counted(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = len(tokenizer(TEXT.text)["input_ids"])
    spec = replace(SPEC, prefix_tokens=limit, examples=6, shards=1)
    documents = [*DOCUMENTS, Document("text:2", "")]
    distill(spec, tiny_target(), tokenizer, documents, tmp_path, progress=False)
    prefixes = make_prefixes(spec, tokenizer, documents)
    assert TEXT.text in texts(tokenizer, prefixes)
    assert summary(spec, tmp_path)["kept"] == len(prefixes)
    assert "sky" not in caplog.text
    with pytest.raises(DistillError, match="gives a prompt of at most so many") as error:
        make_prefixes(replace(spec, prefix_tokens=1), tokenizer, DOCUMENTS)
    assert "sky" not in str(error.value)


def test_short_documents_are_skipped_and_counted(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    documents = [TEXT, Document("text:2", "x"), Document("text:3", "")]
    for prefix in ("window", "start"):
        spec = replace(SPEC, prefix=prefix, prefix_tokens=2, examples=2, shards=1)
        distill(spec, tiny_target(), tokenizer, documents, tmp_path / prefix, progress=False)
        assert summary(spec, tmp_path / prefix)["skipped"] == 2
    assert not len(Windows(encode(tokenizer, []), 2))
    with pytest.raises(DistillError, match="none of the 0 training documents"):
        make_prefixes(SPEC, tokenizer, [])


def test_the_context_is_a_limit(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(DistillError, match="make 109 tokens, but the target's context is 64"):
        distill(SPEC, tiny_target(64), tokenizer, DOCUMENTS, tmp_path, progress=False)


def test_a_prompt_of_one_token(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    documents = [Document("one", "x"), TEXT]
    target: Any = tiny_target().double()
    distill(replace(SPEC, examples=2), target, tokenizer, documents, tmp_path, progress=False)
    rows = columns(Rows.load(tmp_path))
    row = int(rows.prompt_lengths.argmin())
    assert rows.prompt_lengths[row] == 1
    alone = target.generate(rows.tokens[row : row + 1, :1].long(), max_new_tokens=9)
    assert rows.tokens[row, :10].tolist() == alone[0].tolist()


def test_labels_that_nothing_predicts_cost_nothing_and_are_never_nan() -> None:
    # Nothing supervised at all, and one token, which only the target's own layer could predict.
    target = tiny_target()
    drafter = Medusa(MedusaConfig.for_target(target, heads=2)).bind(target)
    module = TargetWithDrafter(target, drafter, 0.8)
    for taught in ([], [0], [1]):
        supervised = torch.zeros(1, 8, dtype=torch.bool)
        supervised[:, taught] = True
        tokens = torch.arange(8)[None]
        assert (module.labels(tokens, supervised) == IGNORED).all()
        loss = module(torch.tensor([0]), tokens, supervised)["loss"]
        loss.backward()
        assert loss.item() == 0.0
        assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())
    module.release()
