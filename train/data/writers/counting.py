"""What will become of a corpus's texts, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ...recipe import Chat, Distill
from ..documents import ChatTemplateError, Document
from ..prefixes import DistillError, chat_renderer, leave_out
from ..rendering import ChatRenderer, after_prompt
from .given import given_rows
from .replay import Replay
from .units import Counts

LOOKED_AT = 512  # texts that are looked at before writing begins

_THOUGHT = "<think>\nHm.\n</think>\n\nYes."  # stands for an answer of a target that thinks


def count_prompts(
    spec: Distill,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    chat: Chat | None = None,
    context: int | None = None,
) -> Counts:
    """What becomes of documents: how many are kept, cut, left out, and how many tokens they have.

    For the writer `given` these are the counts of its rows. For others `tokens` are those of the
    prompts, and `cut` are chats that are too long as they stand in the corpus: what the target
    writes in place of their answers is not known yet. Text for windows is not counted here.

    Args:
        context: of the target, which bounds given rows where `distill.max_length` is null.

    Raises:
        DistillError: the template refuses a chat.
    """
    renderer = chat_renderer(tokenizer, chat, spec.chat)
    if spec.writer == "given":
        length, found = spec.max_length or context, Counts()
        for some in given_rows(renderer, documents, spec, length):
            for each in some:
                found += each.counts
        return found
    found = Counts()
    for at in range(len(documents)):
        found += _asked(spec, renderer, documents[at])
    return found


def _asked(spec: Distill, renderer: ChatRenderer, document: Document) -> Counts:
    replay = Replay(document, renderer, spec, set())
    first = replay.ask()
    if first is None:
        too_long, refused = replay.counts.too_long, replay.counts.refused
        return Counts(too_long=too_long, refused=refused, empty=1 - too_long - refused)
    questions = [at for at, m in enumerate(document.messages or ()) if m["role"] == "user"]
    tokens = len(first.tokens)
    if len(questions) > 1 and spec.turns == "all" and document.messages is not None:
        try:
            tokens = len(renderer.prompt(document.messages[: questions[-1] + 1], document.tools))
        except ChatTemplateError as error:  # after answers that it has here, and will not have
            leave_out(renderer, document, error)
    return Counts(kept=1, cut=int(tokens >= spec.row_tokens), tokens=tokens)


def look(
    spec: Distill,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    chat: Chat | None = None,
    context: int | None = None,
) -> Counts:
    """`count_prompts`; raises DistillError where none of the documents is kept."""
    found = count_prompts(spec, tokenizer, documents, chat, context)
    if not found.kept:
        length = spec.max_length or context
        wanted = "an answer" + (f", and at most {length} tokens" if length else "")
        if spec.writer != "given":
            wanted = f"a prompt of at most {min(spec.prefix_tokens, spec.row_tokens - 1)} tokens"
        raise DistillError(
            f"none of {len(documents)} training documents has {wanted} ({found.too_long} are "
            f"longer, {found.empty} have none, the chat template refuses {found.refused}); change "
            "distill.prefix_tokens or max_length, or the corpus."
        )
    return found


def per_document(
    spec: Distill,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    chat: Chat | None = None,
    context: int | None = None,
) -> tuple[float, float]:
    """How many training rows a document gives, and answers, in the mean of some documents.

    Of chats that are answered anew these are as many as there would be if everything fitted, and
    answers think where the chat template knows of thinking.
    """
    if spec.writer == "own" and spec.prefix != "prompt":
        return 1.0, 1.0
    if spec.writer == "given":
        counts = count_prompts(spec, tokenizer, documents, chat, context)
        found = [(counts.rows, counts.answers)]
    else:
        renderer = chat_renderer(tokenizer, chat, spec.chat)
        found = [_answered(spec, renderer, documents[at]) for at in range(len(documents))]
    rows, answers = (sum(each) / len(documents) for each in zip(*found, strict=True))
    return rows, answers


def _answered(spec: Distill, renderer: ChatRenderer, document: Document) -> tuple[int, int]:
    """Rows and answers of a document whose answers are written anew, see `Replay`."""
    if document.messages is None:
        return 1, 1
    thinks = not renderer.plain and "</think>" in str(renderer.tokenizer.chat_template)
    history, so_far, rows, answers = [], None, 0, 0
    for message in document.messages:
        if message["role"] == "tool" or (answers and spec.turns == "first"):
            break
        if message["role"] == "assistant" and answers:
            continue
        history.append(message)
        if message["role"] != "user":
            continue
        try:
            prompt = renderer.text(history, prompt=True, tools=document.tools)
        except ChatTemplateError as error:
            leave_out(renderer, document, error)
            break
        rows += so_far is None or not prompt.startswith(so_far)
        answers += 1
        said = (after_prompt(prompt, _THOUGHT) or _THOUGHT) if thinks else "Yes."
        history.append({"role": "assistant", "content": said})
        so_far = prompt + said
    return rows, answers
