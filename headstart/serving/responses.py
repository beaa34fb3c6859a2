"""The handler of a request to /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.response import ResponseHandler, compute_usage

from .conversation import messages_of
from .events import Events
from .handlers import Handler, known
from .probabilities import Told
from .writing import log_failure, said_of

_SHARED = {"presence_penalty", "frequency_penalty", "logit_bias", "stop"}


class Responses(Handler, ResponseHandler):
    """Of /v1/responses, which takes settings that others take as well."""

    asked_in = "input"
    fields = (known(ResponseHandler) | _SHARED) - {"prompt"}
    each_answer = staticmethod(lambda body: [body])

    _normalize_input = staticmethod(messages_of)

    def _streaming(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        body: dict[str, Any],
        inputs: Any,
        gen_config: Any,
        gen_manager: Any,
        tools: Any = None,
    ) -> StreamingResponse:
        pieces, streamer = gen_manager.generate_streaming(
            model, processor, inputs, gen_config, request_id
        )
        events = Events(request_id, model_id, body, self._spelled)
        prompt = inputs["input_ids"].shape[-1]

        async def told() -> AsyncIterator[str]:
            yield events.begin()
            try:
                while (item := await pieces.get()) is not None:
                    yield events.add(item)
            except Exception as error:
                log_failure(error)
                yield events.fail(said_of(error)["message"])
            else:
                yield self._end(events, prompt, streamer.total_tokens)
            finally:
                streamer.cancel()

        return StreamingResponse(told(), media_type="text/event-stream")

    async def _non_streaming(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        body: dict[str, Any],
        inputs: Any,
        gen_config: Any,
        gen_manager: Any,
        tools: Any = None,
    ) -> JSONResponse:
        answer = await gen_manager.answer(model, processor, inputs, gen_config)
        events = Events(request_id, model_id, body, self._spelled)
        for item in answer.items:
            events.add(item)
        self._end(events, answer.prompt, answer.written)
        return JSONResponse(events.response)

    def _spelled(self, told: Sequence[Told]) -> list[Any]:
        state: Any = self.generation_state
        return state.manager.spelled(told, True)["content"] if told else []

    def _end(self, events: Events, prompt: int, written: int) -> str:
        usage, state = compute_usage(prompt, written), cast("Any", self.generation_state)
        usage.input_tokens_details.cached_tokens = state.manager.cached
        usage.output_tokens_details.reasoning_tokens = state.manager.thoughts
        return events.end(usage.model_dump(exclude_none=True), self._is_cut(written))
