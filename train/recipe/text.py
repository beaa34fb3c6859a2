"""What a recipe may say of text: its sources, how chats are rendered, and who writes the answers.

See `schema` for the other sections.
"""

from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.dataclasses import strict

from .fields import RecipeError, columns_field, date_field, number, one_of, positive, url_field


@strict
@dataclass
class Source:
    """One of the sources that a corpus is mixed from; the keys are those of `corpus`."""

    source: str  # any that `corpus.source` names, but target
    weight: float = positive(1.0)  # its share of the corpus's bytes is weight ÷ sum of the weights
    config: str | None = None  # as corpus.config
    split: str | None = None  # as corpus.split
    revision: str | None = None  # as corpus.revision
    # as corpus.columns
    columns: dict[str, str] | None = columns_field(default=None)  # noqa: RUF009


@strict
@dataclass
class Corpus:
    """Where the text comes from."""

    # "stdlib"; a file, a folder or a glob; "hub:NAME", a data set on the Hub; sharegpt, ultrachat
    # or perfectblend, which are such sets; or "target": what the target itself writes after its
    # start token, sampled at temperature 1
    source: str = "stdlib"
    sources: list[Source] = field(default_factory=list)  # instead of source: a mixture
    config: str | None = None  # of a Hub data set that has several
    split: str | None = None  # of a Hub data set: train when null
    revision: str | None = None  # of a Hub data set: a commit, a branch or a tag; null is main
    # what the source calls our columns, such as {prompt: instruction, response: output}
    columns: dict[str, str] | None = columns_field(default=None)  # noqa: RUF009
    dedup: bool = True  # of documents with the same content keep one
    max_bytes: int = positive(4_000_000)  # of the documents' text
    # share of the documents; those that begin with the same prompt are held out together
    held_out: float = number(0.05, ge=0, lt=1)
    on_error: str = one_of("raise", "skip")  # at a row that cannot be read
    opening_tokens: int = positive(64)  # source target: tokens of each text
    writer: str | None = None  # source target: the writer, NAME or NAME@REVISION; null: the target

    def __post_init__(self) -> None:
        if not self.sources:
            return
        if self.source != "stdlib":  # the default
            raise RecipeError(
                f"corpus.sources: found corpus.source {self.source!r} too; expected one of the two "
                "(corpus.source=stdlib takes the other one back)"
            )
        for key in ("config", "split", "revision", "columns"):
            if getattr(self, key) is not None:
                raise RecipeError(
                    f"corpus.{key}: found together with corpus.sources; give it to one of them"
                )
        if any(part.source == "target" for part in self.sources):
            raise RecipeError(
                "corpus.sources: found target, which writes a corpus of its own; expected texts"
            )

    def parts(self) -> list[Source]:
        """The sources that are mixed; mostly one."""
        alone = Source(self.source, 1.0, self.config, self.split, self.revision, self.columns)
        return self.sources or [alone]


@strict
@dataclass
class Chat:
    """How chats are rendered, and which of their turns are trained on."""

    supervise: str = one_of("all", "last")  # answers of a chat that are given
    # at a chat that the tokenizer's template refuses, such as one with a system prompt
    refused: str = one_of("raise", "skip")
    system: str | None = None  # the system prompt of chats that have none
    # arguments of the tokenizer's template, such as {enable_thinking: false}
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)  # JSON schemas, shown in every chat
    # the day that templates print which print today's: rows must not change over night
    date: str = date_field(default="2024-07-26")


@strict
@dataclass
class OpenAI:
    """A server that speaks the OpenAI protocol, which writes the answers in the target's place."""

    url: str = url_field(default="http://localhost:8000/v1")  # up to /v1
    model: str = ""  # as the server calls it; the target's name when empty
    api_key_env: str | None = None  # the environment variable that holds the key
    concurrency: int = number(16, ge=1, le=4096)  # requests at once, of each process
    retries: int = number(6, ge=0)  # of one request, with growing pauses
    timeout: float = positive(120.0)  # seconds without a byte from the server
    token_ids: bool = False  # ask for the ids that were written (vLLM's return_token_ids)
    extra: dict[str, Any] = field(default_factory=dict)  # further keys of each request


@strict
@dataclass
class Distill:
    """The text that the drafter is trained on: what the target writes, or given answers."""

    # own: the target continues prefixes of documents; openai: a server answers chats;
    # given: chats are trained on as they stand
    writer: str = one_of("own", "given", "openai")
    openai: OpenAI | None = None  # writer openai
    # documents or prefixes taken; where repeats would be equal, each document once at most
    examples: int = positive(1024)
    prefix: str = one_of("window", "start", "prompt")  # of a document; own
    prefix_tokens: int = positive(64)  # exactly; for `prompt`, at most
    chat: str = one_of("auto", "template", "plain")  # how chats are rendered, see `chat` too
    turns: str = one_of("all", "first")  # of a chat that are answered, one after the other
    new_tokens: int = positive(128)  # of each answer, at most
    max_length: int | None = positive(None)  # of a row; null: prefix_tokens + new_tokens
    too_long: str = one_of("leave_out", "truncate")  # given chats of which no answer fits
    batch_size: int = positive(64)  # texts that the target writes at once, in each process
    temperature: float = number(0.0, ge=0)  # of what the target or the server writes; 0 is greedy
    # writer own: what the target is sped up by, which leaves the text the same: a drafter's path or
    # Hub name, lookup, recycling or suffix
    drafter: str | None = None
    use_drafter: str = one_of("where_faster", "always")  # than plain decoding, in a short trial
    # writer own: between rounds, each of as many shards, a drafter learns from the rows so far, and
    # the next round is sped up by it; the text is the same
    rounds: int = number(1, ge=1, le=1000)
    round_steps: int | None = positive(None)  # null: train.max_steps (or epochs) ÷ rounds
    # files that the rows are written to; a killed run continues after the last complete one
    shards: int = number(8, ge=1, le=100_000)
    max_seconds: float | None = positive(None)  # of writing; it ends with a shard
    # the rows of another run (its folder `distill`), of which some are added, so that the drafter
    # does not forget them
    earlier: str | None = None
    earlier_share: float = number(0.2, ge=0, lt=1)  # of all supervised tokens, at most

    def __post_init__(self) -> None:
        if self.rounds > 1 and self.writer != "own":
            raise RecipeError(
                f"distill.rounds: found {self.rounds} with the writer {self.writer}, which no "
                "drafter speeds up; expected 1, or distill.writer=own"
            )
        if self.rounds > self.shards:
            raise RecipeError(
                f"distill.rounds: found {self.rounds} and {self.shards} shards; expected a shard a "
                "round at least: raise distill.shards"
            )
        exact = self.writer == "own" and self.prefix != "prompt"
        if exact and self.row_tokens <= self.prefix_tokens:
            raise RecipeError(
                f"distill.max_length: found {self.max_length}, which a {self.prefix} of "
                f"distill.prefix_tokens {self.prefix_tokens} fills alone; expected more"
            )
        if self.writer == "openai" and self.openai is None:
            raise RecipeError(
                "distill.openai: the writer is openai, and no server is named; set "
                "distill.openai.url=http://HOST:PORT/v1"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, at most; given rows without `max_length` may be longer."""
        return self.max_length or self.prefix_tokens + self.new_tokens
