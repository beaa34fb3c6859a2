"""The events of a streamed answer of /v1/responses, and the whole answer that they end with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

from .probabilities import Told

_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "temperature", "text", "top_logprobs"),
    "top_p",
)
_CUT = {"reason": "max_output_tokens"}


class Events:
    """Tells an answer item by item: thoughts, messages and calls, each in a place of its own.

    Each method returns what is sent to the client.

    Args:
        body: the request, whose settings are told with the answer.
        spell: how the probabilities of tokens are told.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        body: Mapping[str, Any],
        spell: Callable[[Sequence[Told]], list[Any]],
    ):
        self._id, self._count, self._output = request_id, 0, list[dict[str, Any]]()
        self._open = False  # whether the last item goes on
        self._text, self._spell = "", spell
        self._told = list[Any]()  # probabilities of the last item, as its text
        self._response: dict[str, Any] = {
            "id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()),
            "model": model, "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice", "auto"),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            **{name: body[name] for name in _ECHOED if name in body},
        }  # fmt: skip

    def begin(self) -> str:
        """What a stream begins with."""
        return self._of_response("created", "in_progress") + self._of_response("in_progress")

    def add(self, item: Any) -> str:
        """Go on with a piece of the text or of the thoughts, or with a call."""
        if isinstance(item, ToolCall):
            return self._close() + self._call(item)
        kind = "reasoning" if isinstance(item, ReasoningText) else "message"
        if not item and not self._open:  # probabilities of a text that nothing was left of
            return ""
        before = ""
        if not self._open or self._output[-1]["type"] != kind:
            before = self._close() + self._begin(kind)
        self._text += item
        told = self._spell(getattr(item, "told", ()))
        self._told += told
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        extra = {} if kind == "reasoning" else {"logprobs": told}
        return before + self._in_item(f"{name}.delta", delta=item, **extra)

    def end(self, usage: Mapping[str, Any], cut: bool) -> str:
        """End the answer, which was cut where it might have no more tokens."""
        said = "" if self._output else self._begin("message")
        status = "incomplete" if cut else "completed"
        said += self._close(status)
        more = {"incomplete_details": _CUT} if cut else {}
        return said + self._of_response(status, status, usage=usage, **more)

    def fail(self, message: str) -> str:
        """End the answer with an error."""
        error = {"code": "server_error", "message": message}
        said = self._event("error", **error, param=None)
        return said + self._of_response("failed", "failed", error=error)

    @property
    def response(self) -> dict[str, Any]:
        """The answer so far, as it is when it is not streamed."""
        return self._response | {"output": self._output}

    def _begin(self, kind: str) -> str:
        number = sum(item["type"] == kind for item in self._output)
        name = f"{'rs' if kind == 'reasoning' else 'msg'}_{self._id}" + (
            f"_{number}" * (number > 0)
        )
        item = {"id": name, "type": kind, "status": "in_progress", "content": []}
        item |= {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        self._output.append(item)
        self._open, self._text, self._told = True, "", []
        said = self._of_item("added")
        if kind == "message":
            said += self._in_item("content_part.added", part=_part("", []))
        return said

    def _close(self, status: str = "completed") -> str:
        """End the item that goes on, if one does."""
        if not self._open:
            return ""
        self._open, item = False, self._output[-1]
        if item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": self._text}]
            said = self._in_item("reasoning_text.done", text=self._text)
        else:
            item["content"] = [part := _part(self._text, self._told)]
            said = self._in_item("output_text.done", text=self._text, logprobs=self._told)
            said += self._in_item("content_part.done", part=part)
        item["status"] = status
        return said + self._of_item("done")

    def _call(self, call: ToolCall) -> str:
        number = sum(item["type"] == "function_call" for item in self._output)
        name = f"{self._id}_tool_call_{number}"
        item = {"id": name, "call_id": name, "type": "function_call", "name": call.name}
        self._output.append(item | {"arguments": "", "status": "in_progress"})
        said, at = self._of_item("added"), {"item_id": name, "output_index": len(self._output) - 1}
        kind = "response.function_call_arguments"
        said += self._event(f"{kind}.delta", **at, delta=call.arguments)
        self._output[-1] |= {"arguments": call.arguments, "status": "completed"}
        said += self._event(f"{kind}.done", **at, name=call.name, arguments=call.arguments)
        return said + self._of_item("done")

    def _of_response(self, kind: str, status: str = "in_progress", **more: Any) -> str:
        self._response |= {"status": status, **more}
        return self._event(f"response.{kind}", response=self.response)

    def _of_item(self, kind: str) -> str:
        place = len(self._output) - 1
        return self._event(
            f"response.output_item.{kind}", output_index=place, item=self._output[-1]
        )

    def _in_item(self, kind: str, **more: Any) -> str:
        at = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(f"response.{kind}", **at, content_index=0, **more)

    def _event(self, kind: str, **told: Any) -> str:
        event = {"type": kind, "sequence_number": self._count, **told}
        self._count += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"


def _part(text: str, told: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}
