"""Texts of a given form: JSON of a schema, a regular expression, a choice, a context-free grammar.

After each token, a `Grammar` leaves the target only the tokens with which the text can still get
the form, and its probabilities are normalised over those. A logits processor does that, so drafting
is exact as with others: the text is that of plain decoding with the same processor, `FormsByRow`.
`llguidance` finds the tokens, by the method of Koo et al. 2024 (arXiv 2407.08103).
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart.heads import OptionError
from headstart.heads.core.errors import brief
from headstart.heads.core.forms import Form

logger = logging.getLogger(__name__)

_KNOWN = 256  # texts after which the allowed tokens are kept, V / 8 bytes each

_JSON: dict[str, Any] = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,40})?", "lenient": True}
"""How `llguidance` reads JSON schemas. Between two tokens stands some space; without a bound, small
models write nothing else. It says what it does not heed, of which `_HARMLESS` is accepted."""

_CONTROL = re.compile(r"\\u00[01]")  # in JSON text

_HARMLESS = "Unknown format"  # which JSON schema means as a note


def json_options(schema: str) -> dict[str, Any]:
    r"""How `llguidance` reads the JSON text of a schema.

    The name of a further property must not be that of a known one in other letters, such as
    `"\u0061"` for `"a"`, which would escape its schema. So there are no escapes by number, unless
    the schema itself has a control character that no other escape stands for.
    """
    return _JSON if _CONTROL.search(schema) else _JSON | {"json_allowed_escapes": 'nrbtf\\"'}


@dataclass(frozen=True)
class Grammar:
    """A form that generated text shall have; `generate` takes it as `grammar`.

        grammar = Grammar.json_schema({"type": "array", "items": {"type": "integer"}})
        output = speculator.generate(**inputs, max_new_tokens=200, grammar=grammar)

    A text may end where it has the form, and must where nothing can follow. One that is cut, by
    `max_new_tokens` say, may be just the beginning of such a text.

    Attributes:
        source: the form, as `llguidance` reads it.
        thoughts: the texts between which a model thinks before it answers, such as `<think>` and
            `</think>`. Thoughts may then come first, unless the prompt ends with them; the form is
            that of the text after them.
    """

    source: str
    thoughts: tuple[str, str] | None = None

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> Self:
        """JSON that a JSON schema describes.

        Args:
            schema: an object, or its JSON text.

        Raises:
            OptionError: it is no schema, or has keywords that `llguidance` does not know. A
                `format` that it does not know is a note to readers, as JSON schema has it.
        """
        name = "the JSON schema"
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(found, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"{name} is no JSON: {_said(error)}; correct it.") from error
        if not isinstance(found, dict):
            raise OptionError(f"{name} is {text[:40]}; expected an object.")
        return cls._read(name, "grammar_from_json_schema", text, json_options(text))

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that a regular expression matches from its beginning to its end.

        Args:
            pattern: as of Rust's `regex`: without look-around and back-references.

        Raises:
            OptionError: it is none.
        """
        return cls._read("the regular expression", "grammar_from_regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """One of some texts.

        Raises:
            OptionError: there are none, or one is empty.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(t, str) and t for t in texts):
            raise OptionError(f"the choice is {texts!r}; expected a list of texts, none empty.")
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls._read("the choice", "grammar_from_lark", f"start: {choices}")

    @classmethod
    def lark(cls, text: str) -> Self:
        """A context-free grammar, in the variant of Lark's notation that `llguidance` reads.

        Raises:
            OptionError: it is none.
        """
        return cls._read("the grammar", "grammar_from_lark", text)

    @classmethod
    def _read(cls, name: str, reader: str, *given: Any) -> Self:
        matcher, of_json = _library().LLMatcher, reader == "grammar_from_json_schema"
        try:
            source = getattr(matcher, reader)(*given)
        except ValueError as error:  # nested deeper than it reads
            raise OptionError(f"{name} cannot be used: {_said(error)}; simplify it.") from error
        failed, said = matcher.validate_grammar_with_warnings(source)
        if of_json:
            said = [each for each in said if failed or not each.startswith(_HARMLESS)]
        if said and (failed or of_json):
            raise OptionError(f"{name} cannot be used: {_said(said[0])}; correct it.")
        return cls(source)

    def after_thoughts(self, begin: str, end: str) -> Self:
        """The same form, of the text after a model's thoughts, see `thoughts`."""
        return replace(self, thoughts=(begin, end))


class GrammarTokens:
    """The tokens of a target's tokenizer, prepared for grammars.

    That takes up to a second for large vocabularies; it can be shared by requests and threads.

    Args:
        ends: the tokens that end a text.

    Raises:
        OptionError: there is no fast tokenizer, no end token, or no `llguidance`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, ends: Collection[int]):
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            found = "none" if tokenizer is None else type(tokenizer).__name__
            raise OptionError(
                f"a grammar needs the target's tokenizer, a fast one, found {found}; pass "
                "tokenizer=…."
            )
        self.tokenizer = tokenizer
        self.ends = sorted(token for token in ends if 0 <= token < len(tokenizer))
        if not self.ends:
            raise OptionError(
                "a grammar needs a token that ends the text, found none; set eos_token_id."
            )
        _library()
        try:
            adapter = importlib.import_module("llguidance.hf")
            self.prepared = adapter.from_tokenizer(tokenizer, eos_token=self.ends)
        except ValueError as error:
            raise OptionError(
                f"the tokenizer cannot be used with a grammar: {_said(error)}."
            ) from error

    def ids(self, text: str) -> np.ndarray:
        """The tokens of a text, without any that the tokenizer adds."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False))


class GrammarForm(Form):
    """The form of a grammar, of the text that follows a prompt.

    Args:
        begin: the column of the text at which the form begins, which is the prompt's width.

    Raises:
        OptionError: the grammar is too complex.
    """

    def __init__(self, grammar: Grammar, tokens: GrammarTokens, begin: int):
        self._tokens, self._begin = tokens, begin
        self._thoughts = grammar.thoughts and tuple(map(tokens.ids, grammar.thoughts))
        self._fresh = _library().LLMatcher(tokens.prepared, grammar.source, log_level=0)
        if error := self._fresh.get_error():
            raise OptionError(f"the grammar cannot be used: {_said(error)}; simplify it.")
        self._matcher, self._read = self._fresh.deep_copy(), list[int]()  # what it has read
        self._prompt: tuple[bytes, bool | None] = b"", None  # the last one, see `_thinks`
        self._known: dict[tuple[bytes, int], tuple[bool, np.ndarray]] = {}  # of texts, see `allow`

    def again(self) -> Self:
        """The same form, for another row."""
        found = copy.copy(self)
        found._matcher, found._read, found._known = self._fresh.deep_copy(), [], {}
        return found

    def allow(self, text: np.ndarray, bits: np.ndarray) -> bool:
        # Verification asks again what drafting has asked.
        key = text.tobytes(), len(bits)
        if key not in self._known:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            own = bits.copy()
            self._known[key] = self._allow(text, own), own
        found, bits[:] = self._known[key]
        return found

    def forced(self, text: np.ndarray) -> int:
        written, before = self._of_form(text)
        if self._ended(text) or before or written is None or not self._goes_on(written.tolist()):
            return -1
        if forced := self._matcher.compute_ff_tokens():
            return forced[0]
        ends = self._tokens.ends
        return ends[0] if self._matcher.is_stopped() else -1

    def _ended(self, text: np.ndarray) -> bool:
        written = text[self._begin :]
        return any((written == end).any() for end in self._tokens.ends)

    def _allow(self, text: np.ndarray, bits: np.ndarray) -> bool:
        if self._ended(text):
            return True  # what follows is padding
        written, before = self._of_form(text)
        if written is None:
            for token in self._tokens.ends:  # a text that ends here has not the form
                bits[token // 8] &= 255 - (1 << token % 8)
            return True
        bits.fill(0)
        mask = self._mask(written.tolist())
        if mask is not None:
            allowed = np.frombuffer(mask, dtype=np.uint8)[: len(bits)]
            bits[: len(allowed)] = allowed
        for token in before:
            bits[token // 8] |= 1 << token % 8
        return mask is not None or bool(before)

    def _of_form(self, text: np.ndarray) -> tuple[np.ndarray | None, list[int]]:
        """The tokens that the form is of, None during thoughts; and those thoughts may begin by."""
        prompt, written = text[: self._begin], text[self._begin :]
        if self._thoughts is None:
            return written, []
        begin, end = self._thoughts
        thinks = self._thinks(prompt)
        if thinks or (thinks is None and _starts(written, begin)):
            over = _places(written, end)
            return (written[over[0] + len(end) :] if over.size else None), []
        may = thinks is None and _starts(begin, written)
        return written, begin[len(written) :][:1].tolist() if may else []

    def _thinks(self, prompt: np.ndarray) -> bool | None:
        """Whether a prompt has begun thoughts, which go on; None where they may begin after it."""
        key = prompt.tobytes()
        if key != self._prompt[0]:
            assert self._thoughts is not None
            begin, end = self._thoughts
            begun, ended = _last(prompt, begin), _last(prompt, end)
            after = self._tokens.tokenizer.decode(prompt[max(ended, 0) + len(end) :])
            # Templates that are told not to think write empty thoughts at the prompt's end.
            over = ended > begun and not str(after).strip()
            self._prompt = key, True if begun > ended else False if over else None
        return self._prompt[1]

    def _mask(self, written: list[int]) -> bytes | None:
        """The bits of what may follow these tokens; None where no text of the form begins so."""
        for _ in range(2):
            mask = self._matcher.compute_bitmask() if self._goes_on(written) else None
            if not self._matcher.is_error():
                return mask
            # Perhaps only together with drafts, which it has read as well.
            self._matcher, self._read = self._fresh.deep_copy(), []
        logger.warning("a grammar became too complex to go on; simplify it.")  # not its own words,
        return None  # which may repeat the text

    def _goes_on(self, written: list[int]) -> bool:
        """Whether a text of the form begins with these tokens, which the matcher has then read."""
        read, same = self._read, len(self._read)
        if written[:same] != read:
            same = next(i for i in range(same) if read[i : i + 1] != written[i : i + 1])
            self._matcher.rollback(len(read) - same)
            del read[same:]
        read += written[same : same + self._matcher.try_consume_tokens(written[same:])]
        return len(read) == len(written)


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise OptionError(
            "a grammar needs the package llguidance, found none; pip install llguidance."
        ) from None


def _said(error: Exception | str) -> str:
    """What an error of `llguidance` says, without the grammar and the state that it repeats."""
    lines = str(error).splitlines() or [""]
    if lines[0].startswith("oneOf"):  # whose advice is an option of the library
        return "members of oneOf that may hold together are not supported, those of anyOf are"
    reasons = (line for line in lines if line.startswith("error: "))
    return brief(next(reasons, lines[0]).removeprefix("error: ")).rstrip(".")


def _starts(text: np.ndarray, part: np.ndarray) -> bool:
    return len(text) >= len(part) and bool((text[: len(part)] == part).all())


def _places(text: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Where in a text some tokens stand."""
    if len(text) < len(part):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(
        (np.lib.stride_tricks.sliding_window_view(text, len(part)) == part).all(1)
    )


def _last(text: np.ndarray, part: np.ndarray) -> int:
    return max(_places(text, part), default=-1)
