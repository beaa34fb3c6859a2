"""One row of a data set, in whatever form it came, as a Document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .documents import CorpusError, Document, Message, opening
from .tool_calls import with_objects

_ROLES = {  # as data sets write them, ShareGPT's `from` included
    **{"system": "system", "developer": "system"},
    **{"user": "user", "human": "user"},
    **{"assistant": "assistant", "gpt": "assistant", "model": "assistant"},
    **{"chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
    **{"tool": "tool", "function": "tool", "observation": "tool"},
}
_ANSWERS = {  # the keys of a prompt, and those of its answer
    "prompt": ("completion", "canonical_solution", "answer", "response"),
    "question": ("answer", "response"),
    "instruction": ("output", "response", "answer"),
    "text": ("answer",),  # as `build_corpus` writes its own rows
}
_KEYS = ("messages", "conversations", "turns", *_ANSWERS)
_OF_TOOLS = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # kept in messages
_MAY_LACK = {"system", "tools", "input"}  # columns that many rows leave out
IDS = ("prompt_token_ids", "token_ids")
"""The tokens of a prompt and of its answer, as vLLM calls them."""
OPENINGS = "answers_without_question"  # in the counts: turns of an assistant that open a chat
OF_IDS = "rows_of_ids_alone"  # in the counts: rows of known tokens whose text cannot be read
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""The types of a message's parts that are text, in the protocols of OpenAI."""


class _PartError(CorpusError):
    """A message holds more than text."""


def parse_row(
    row: Any,
    id: str,
    source: str = "",
    columns: Mapping[str, str] | None = None,
    counts: Counter[str] | None = None,
    ids_alone: bool = False,
) -> Document:
    """One row of JSON as a Document. Raises CorpusError, without the place.

    | keys | becomes |
    |---|---|
    | `messages`, or `conversations` with `from` and `value`; also `system`, `tools` | a chat |
    | `turns` | a chat of the first, since the later ones answer replies never written |
    | `question` (and `answer`) | a chat of one turn and its answer |
    | `instruction` (and `input`; and `output` or `response`) | the same, `input` a paragraph more |
    | `prompt` and `response` | the same |
    | `prompt` (and `completion`, `canonical_solution` or `answer`) | a prompt and its answer |
    | `text` | a text |

    A chat that opens with turns of the assistant loses them, since what they answer is not known:
    most templates refuse them. `counts` counts these turns. The text parts of a message are joined
    by line ends, as vLLM joins them.

    A row with an answer may also have `prompt_token_ids` and `token_ids`, the tokens of the prompt
    and of the last answer as they were decoded: text that is tokenised again may have others.

    Args:
        columns: our names, and what the row calls them; its other columns are then not read.
        ids_alone: a row with these tokens whose messages cannot be read, for instance since their
            roles do not take turns, is a document without text. `counts` counts these rows.
    """
    if columns and isinstance(row, dict):
        row = _renamed(row, columns)
    ids = _ids(row) if isinstance(row, dict) else None
    try:
        return replace(_document(row, id, source, counts), ids=ids)
    except _PartError:  # what a picture shows is not in its tokens
        raise
    except CorpusError:
        if ids is None or not ids_alone:
            raise
    if counts is not None:
        counts[OF_IDS] += 1
    return Document(id, "", source=source, ids=ids, opening=_opening(row))


def _opening(row: Mapping[str, Any]) -> str:
    """What messages that are no chat say before the first answer, whatever they are; or nothing."""
    messages = row.get(text_key(row) or "")
    found: list[Message] = []
    for each in messages if isinstance(messages, list) else ():
        message = each if isinstance(each, dict) else {}
        role = _ROLES.get(str(message.get("role", message.get("from"))), "")
        if role == "assistant":
            break
        content = json.dumps(message.get("content", message.get("value")))
        found.append({"role": role, "content": content})
    return opening(found)


def _document(row: Any, id: str, source: str, counts: Counter[str] | None) -> Document:
    key = text_key(row) if isinstance(row, dict) else None
    if key is None:
        raise CorpusError(f"expected an object with one of the keys {', '.join(_KEYS)}")
    value = row[key]
    first = value[0] if key == "turns" and isinstance(value, list) and value else None
    if key in ("messages", "conversations") or isinstance(first, dict):
        messages = _with_system(row, _messages(value, key))
        return Document.chat(id, _from_the_user(messages, counts), source, _tools(row))
    text = _text(first, "turns[0]") if key == "turns" else _text(value, key)
    names = [name for name in _ANSWERS.get(key, ()) if row.get(name) is not None]
    name = next((name for name in names if row[name]), names[0] if names else None)
    answer = _text(row[name], "the answer") if name and row[name] else ""
    if key == "text" and name is None:
        return Document(id, text, source=source)
    if key == "text" or (key == "prompt" and name != "response"):
        return Document(id, text, answer=answer, source=source)
    if row.get("input"):
        text += "\n\n" + _text(row["input"], "input")
    messages = _with_system(row, [{"role": "user", "content": text}])
    messages += [{"role": "assistant", "content": answer}] if answer else []
    return Document.chat(id, messages, source, _tools(row))


def text_key(row: Mapping[str, Any]) -> str | None:
    """The key that says what a row is; None where it has none that is known."""
    return next((key for key in _KEYS if row.get(key) is not None), None)


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    missing = [f"{ours}: {theirs}" for ours, theirs in columns.items()
               if ours not in _MAY_LACK and row.get(theirs) is None]  # fmt: skip
    if missing:
        raise CorpusError(f"no value in the column that corpus.columns names ({missing[0]})")
    return {ours: row.get(theirs) for ours, theirs in columns.items()}


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise CorpusError(f"{key} is not a list of messages, or is empty")
    messages = []
    for number, item in enumerate(value, start=1):
        found = item if isinstance(item, dict) else {}
        role = found.get("role", found.get("from"))
        if not isinstance(role, str) or role not in _ROLES:
            raise CorpusError(
                f"{key}: the role of message {number} is missing or unknown; expected system, "
                "user, assistant or tool"
            )
        role = _ROLES[role]
        content = _joined(found.get("content", found.get("value")), f"{key}: message {number}")
        extra = {name: found[name] for name in _OF_TOOLS if found.get(name)}
        if "tool_calls" in extra:
            extra["tool_calls"] = with_objects(extra["tool_calls"])
        if extra:
            _check_json(extra, f"{key}: message {number}")
        if not content and role == "system":
            continue  # many data sets have a place for one and leave it empty
        if not content and role == "tool" and isinstance(content, str):
            pass  # a tool may return nothing
        elif not content and extra.get("tool_calls"):
            content = ""
        else:
            content = _text(content, f"{key}: message {number}")
        messages.append({"role": role, "content": content, **extra})
    return messages


def _joined(content: Any, what: str) -> Any:
    """What a message says: the text of its parts, where it has some."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            found = f"of the type {kind[:40]}" if isinstance(kind, str) else "without a type"
            raise _PartError(
                f"{what} has a part {found}; expected a string, or parts of text alone"
            )
    return "\n".join(part["text"] for part in content)


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages behind the row's own `system`, if it has one and they have none."""
    if not row.get("system") or (messages[:1] and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": _text(row["system"], "system")}, *messages]


def _from_the_user(messages: list[Message], counts: Counter[str] | None) -> list[Message]:
    """The messages without the assistant's turns that stand before the first of the user."""
    system = bool(messages) and messages[0]["role"] == "system"
    start: int = system
    while start < len(messages) and messages[start]["role"] == "assistant":
        start += 1
    if start == system:
        return messages
    if counts is not None and start < len(messages):
        counts[OPENINGS] += start - system
    return messages[:system] + messages[start:]


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The `tools` of a row: a list, or a string that holds it as JSON."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise CorpusError("tools is not valid JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise CorpusError("tools is not a list")
    _check_json(tools, "tools")
    return tools


def _ids(row: Mapping[str, Any]) -> list[list[int]] | None:
    """The tokens of a row's prompt and answer; None unless it has both."""
    found = [row.get(name) for name in IDS]
    if None in found:
        return None
    for name, ids in zip(IDS, found, strict=True):
        if not isinstance(ids, list) or not ids or not all(map(_is_id, ids)):
            raise CorpusError(f"{name} is not a list of token ids, or is empty")
    return found  # type: ignore[return-value]


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise CorpusError(f"{what} is not a string")
    if not value or value.isspace():
        raise CorpusError(f"{what} is empty; fill or drop the row")
    try:
        value.encode()
    except UnicodeEncodeError:  # holds the text: not to be chained
        # JSON allows "\ud800" alone, but it has no UTF-8 form and no tokens.
        said = f"{what} holds half a surrogate pair; write the whole character"
        raise CorpusError(said) from None
    return value


def _check_json(value: Any, what: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise CorpusError(f"{what}: what is said of tools is not JSON in UTF-8") from None
