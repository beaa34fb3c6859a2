"""The handlers of one request: those of transformers, with what they drop refused or done.

That of /v1/responses is in `responses.py`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from typing import Any

import torch
from fastapi import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import CompletionUsage
from transformers import BatchEncoding
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import BaseHandler

from headstart.train.data.tokenising import prompt_tokens
from headstart.train.data.tool_calls import with_objects
from headstart.train.figures.pieces import text_of

from .asked import check_asked, check_fields
from .calls import must_call
from .forms import answer_form
from .probabilities import Told, asked_probabilities
from .reading import Read
from .several import END, each_answer
from .shapes import Refused, biases_of, check_ids, stops_of, with_known_roles, without_nulls
from .writing import ASKED, Asked, log_failure, refusal, said_of

_PENALTIES = ("presence_penalty", "frequency_penalty")


def check_model(asked: Any, name: str | None) -> None:
    """Refuse a request for another model than the one that is served as `name`.

    Raises:
        HTTPException: 404, as the protocol has it.
    """
    if asked not in (None, name):
        said = f"no model {asked!r} is served here; ask for {name!r}"
        raise HTTPException(404, refusal(said, "model", "model_not_found"))


def known(handler: Any) -> frozenset[str]:
    """The fields that the protocol has for an endpoint."""
    return frozenset(handler._valid_params_class.__mutable_keys__)


class Handler(BaseHandler):
    """Reads a request as the protocol means it.

    A temperature above 0 samples; a seed is of its own request, whatever other requests do
    meanwhile; null is what was left out; and no answer is streamed unasked.

    Attributes:
        asked_in: the field that a request must have; fields: those that it may have.
        begins: what the id of an answer begins with.
        each_answer: makes requests for a single answer of one.
    """

    asked_in, begins = "messages", ""
    fields: Set[str] = frozenset()
    each_answer = staticmethod(each_answer)
    _config: Any = None  # of the request's generation
    _asked = Asked()
    _grammar: Any = None

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        model: Any = self.model_manager
        _, tokenizer = model.load_model_and_processor()
        template = getattr(tokenizer, "chat_template", None)
        body = {"stream": False, **with_known_roles(without_nulls(body), template)}
        if body.get("tool_choice") == "none":  # what a model is not told of it does not call
            body.pop("tools", None)
        return await super().handle_request(body, request_id)  # type: ignore[misc]

    def _validate_request(self, body: dict[str, Any]) -> None:
        model: Any = self.model_manager
        check_model(body.get("model"), model.force_model)
        check_fields(body, self.fields)
        if self.asked_in not in body:
            said = f"{self.asked_in} is missing; expected what is to be answered"
            raise Refused(said, self.asked_in, "missing_required_parameter")
        target, tokenizer = model.load_model_and_processor()
        check_asked(body, getattr(tokenizer, "chat_template", None), model.vocabulary)
        model.bounds.check_prompt(body)
        self._grammar = answer_form(body, tokenizer, target)

    def _build_generation_config(self, body: dict[str, Any], *given: Any, **options: Any) -> Any:
        chat = body.get("messages")
        plain = all(isinstance(message.get("content"), str) for message in chat or [{}])
        if not plain or body.get("tools") or body.get("chat_template_kwargs"):
            chat = None  # its messages alone would be another prompt: the prompt itself is kept
        ours = ("seed", "stop", "logit_bias", *_PENALTIES)
        theirs = {name: value for name, value in body.items() if name not in ours}
        config = super()._build_generation_config(theirs, *given, **options)
        if "temperature" in body:
            config.do_sample = config.temperature > 0
            config.temperature = config.temperature or 1.0  # greedy text has none
        for name in ("min_p", "repetition_penalty"):
            if name in body:
                setattr(config, name, float(body[name]))
        if "top_k" in body:
            config.top_k = max(body["top_k"], 0)  # 0 leaves no token out
        elif config.top_k is None:
            config.top_k = 0  # else `generate` would take the 50 most likely tokens
        own = config.stop_strings or []
        stops = stops_of(body) or ([own] if isinstance(own, str) else own)
        config.stop_strings = None
        if biases := biases_of(body):
            config.sequence_bias = {(int(token),): bias for token, bias in biases.items()}
        self._asked = Asked(
            seed=body.get("seed"),
            chat=chat,
            continues="prompt" in body,
            prompt=self.asked_in,
            stops=tuple(stops),
            logprobs=asked_probabilities(body),
            of_text="input" in body,
            grammar=self._grammar,
            tools=body.get("tools", ()),
            must_call=must_call(body),
            **{name: float(body.get(name, 0)) for name in _PENALTIES},
        )
        setattr(config, ASKED, self._asked)
        self._config = config
        return config

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Any) -> Any:
        """Messages as a chat template reads them, with all that they hold.

        Those of transformers are without the text beside calls of tools, thoughts and names.
        """
        texts = [{k: v for k, v in each.items() if k != "tool_calls"} for each in messages]
        found = BaseHandler.get_processor_inputs_from_messages(texts, modality)
        return [
            {**given, **read}
            | ({"tool_calls": with_objects(calls)} if (calls := given.get("tool_calls")) else {})
            for given, read in zip(messages, found, strict=True)
        ]

    def _is_cut(self, tokens: int) -> bool:
        """Whether an answer of so many tokens ended because it may have no more."""
        return tokens >= (self._config.max_new_tokens or tokens + 1)


class _Ended(Handler):
    """Ends a stream as the protocol does, which some clients wait for.

    Where a request asks for its usage (`stream_options`), a chunk without choices tells it.

    Attributes:
        streamed: what a part of a stream is called.
    """

    streamed = ""
    _usage_apart = False

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self._created = int(time.time())

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        options = body.get("stream_options")
        self._usage_apart = isinstance(options, dict) and bool(options.get("include_usage"))
        answer = await super().handle_request(body, request_id)
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _with_end(answer.body_iterator, self._before(request_id))
            return answer
        found = json.loads(bytes(answer.body))
        found["usage"] |= self._details()
        if self._asked.logprobs is not None:
            found["choices"][0]["logprobs"] = self._spelled(self._manager.told)
        return JSONResponse(found)

    @property
    def _manager(self) -> Any:
        state: Any = self.generation_state
        return state.manager

    def _details(self) -> dict[str, Any]:
        """What a usage tells of the tokens: how many were cached, and how many are of thoughts."""
        found = {"prompt_tokens_details": {"cached_tokens": self._manager.cached}}
        if self.asked_in == "messages":
            found["completion_tokens_details"] = {"reasoning_tokens": self._manager.thoughts}
        return found

    def _before(self, request_id: str) -> str:
        """What a stream begins with."""
        return ""

    def _spelled(self, told: Sequence[Told]) -> dict[str, Any]:
        return self._manager.spelled(told, self.asked_in == "messages")

    def _chunk(self, request_id: str, model: Any, usage: Any, choice: dict[str, Any]) -> str:
        """A part of a stream, as the protocol has it; all parts tell one time."""
        chunk = {"id": request_id, "object": self.streamed, "created": self._created}
        chunk |= {"model": model, "choices": [{"index": 0, **choice}]}
        if usage is None:
            return _event(chunk)
        told = {"usage": usage.model_dump(exclude_none=True) | self._details()}
        if self._usage_apart:
            return _event(chunk) + _event(chunk | {"choices": []} | told)
        return _event(chunk | told)

    def _probabilities(self, piece: Any) -> dict[str, Any] | None:
        """Those told with a piece of the answer."""
        told = getattr(piece, "told", ())
        return self._spelled(told) if told else None


def _event(told: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(told)}\n\n"


async def _with_end(parts: Any, before: str) -> AsyncIterator[Any]:
    async with contextlib.aclosing(parts):  # when the client leaves, the writer is told
        if before:
            yield before
        try:
            async for part in parts:
                yield part
        except Exception as error:
            log_failure(error)
            yield _event({"error": said_of(error)})
    yield END


class Chats(_Ended, ChatCompletionHandler):
    """Of /v1/chat/completions."""

    begins, streamed = "chatcmpl-", "chat.completion.chunk"
    fields = known(ChatCompletionHandler)

    def _build_chunk_sse(
        self,
        request_id: str = "",
        content: str | None = None,
        model: str | None = None,
        role: str | None = None,
        finish_reason: str | None = None,
        tool_calls: list[Any] | None = None,
        usage: Any = None,
        reasoning_content: str | None = None,
    ) -> str:
        said = {"role": role, "content": content, "reasoning_content": reasoning_content}
        delta: dict[str, Any] = {name: text for name, text in said.items() if text is not None}
        if tool_calls:
            delta["tool_calls"] = [call.model_dump(exclude_none=True) for call in tool_calls]
        piece = content if reasoning_content is None else reasoning_content
        choice = {"delta": delta, "logprobs": self._probabilities(piece)}
        return self._chunk(request_id, model, usage, choice | {"finish_reason": finish_reason})

    async def _non_streaming(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        inputs: Any,
        gen_config: Any,
        gen_manager: Any,
        tools: Any = None,
    ) -> JSONResponse:
        answer = await gen_manager.answer(model, processor, inputs, gen_config)
        read = Read.of(answer.items)
        calls: Any = [
            {
                "id": f"{request_id}_tool_call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(read.calls)
        ]
        reason = "length" if self._is_cut(answer.written) else "stop"
        found = self._build_completion(
            request_id,
            read.text,
            model_id,
            finish_reason="tool_calls" if calls else reason,
            usage=CompletionUsage(
                prompt_tokens=answer.prompt,
                completion_tokens=answer.written,
                total_tokens=answer.prompt + answer.written,
            ),
            tool_calls=calls or None,
            reasoning_content=read.thoughts or None,
        )
        return JSONResponse(found)


class Completions(_Ended, CompletionHandler):
    """Of /v1/completions: its prompt may be token ids, and stand before the answer (`echo`)."""

    asked_in, begins, streamed = "prompt", "cmpl-", "text_completion"
    fields = known(CompletionHandler)
    _ids: list[int] | None = None
    _echoed = ""  # the prompt's text, where it is to stand before the answer

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        model: Any = self.model_manager
        prompt, echo = body.get("prompt"), body.get("echo")
        if isinstance(prompt, list):
            check_ids("prompt", prompt, model.vocabulary)
            self._ids, body = prompt, {**body, "prompt": ""}
        if echo is True:
            _, tokenizer = model.load_model_and_processor()
            self._echoed = prompt if isinstance(prompt, str) else text_of(tokenizer, prompt or ())
        answer = await super().handle_request(body, request_id)
        if self._echoed and not isinstance(answer, StreamingResponse):
            found = json.loads(bytes(answer.body))
            found["choices"][0]["text"] = self._echoed + found["choices"][0]["text"]
            return JSONResponse(found)
        return answer

    def _build_chunk_sse(
        self,
        request_id: str,
        model_id: str,
        text: str = "",
        finish_reason: str | None = None,
        usage: Any = None,
    ) -> str:
        choice = {"text": text, "logprobs": self._probabilities(text)}
        return self._chunk(request_id, model_id, usage, choice | {"finish_reason": finish_reason})

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        name, model, tokenizer = super()._resolve_model(body)
        return name, model, _OfPrompt(tokenizer, self._ids)

    def _before(self, request_id: str) -> str:
        model: Any = self.model_manager
        if not self._echoed:
            return ""
        return self._build_chunk_sse(request_id, model.force_model, text=self._echoed)


class _OfPrompt:
    """A tokenizer that adds nothing behind a prompt, and does all else as another one.

    Args:
        ids: the prompt, if it is not given as a text.
    """

    def __init__(self, tokenizer: Any, ids: list[int] | None):
        self._own, self._ids = tokenizer, ids

    def __call__(self, text: str, **options: Any) -> BatchEncoding:
        if self._ids is None:
            return prompt_tokens(self._own, text, special=True)
        ids = torch.tensor([self._ids])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
