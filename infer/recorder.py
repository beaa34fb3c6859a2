"""Requests and their answers, kept in a file, so that a drafter can be trained on them later."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headstart.heads import OptionError
from headstart.heads.artifacts.manifest import fingerprint
from headstart.heads.core import counted
from headstart.heads.core.files import append_line

from .decoding_method import DecodingMethod
from .generate_options import GenerateOptions
from .speculator import Speculator

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
"""A chat: each message with `role` and `content`."""

_SAMPLING = {"temperature": 1.0, "top_p": None, "top_k": 50, "min_p": None}
"""With the values by which `generate` samples where nobody gives any."""

_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""With the values that change nothing."""


class Recorder:
    """Decodes with a speculator, and appends each prompt with its answer to a file.

        recorder = headstart.Recorder("traffic.jsonl", speculator)
        output = recorder.generate(**inputs, max_new_tokens=128)

    A line is a JSON object that `corpus.source` and `headstart adapt` read: the text (`prompt` and
    `completion`, or the chat's `messages`), the tokens as they were decoded (`prompt_token_ids`,
    `token_ids`), the target's name and fingerprint (`model`, `target_fingerprint`), the settings
    (`sampling`, where temperature 0 is greedy, `grammar` says that there was one, and penalties are
    those that changed something; and `max_new_tokens`), `tau`, and the `time`.

    The file holds what users ask and are told, unencrypted. It is made readable for its owner
    alone, and only grows. Lines are written after a request has ended, each whole or not at all;
    threads and processes may append to the same file. A request that ends with an exception is not
    written. Where a line cannot be written, the answer is returned all the same, and a warning says
    so. While it records, call the speculator through it alone, since it reads `speculator.stats`.

    Args:
        speculator: or a `Batcher`; with its tokenizer, which gives the text.

    Raises:
        OptionError: the speculator has no tokenizer.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, speculator: DecodingMethod):
        self.path, self.speculator = Path(path), speculator
        if speculator.tokenizer is None:
            raise OptionError(
                "the speculator has no tokenizer, which a recorder needs for the text; pass "
                "tokenizer=… to Speculator or load."
            )
        self._tokenizer: Any = speculator.tokenizer
        self._model = {
            "model": str(getattr(speculator.model, "name_or_path", "")),
            "target_fingerprint": fingerprint(speculator.model),
        }
        # A speculator's `stats` are those of the last request, a batcher's those of the thread.
        alone = isinstance(speculator, Speculator)
        self._one: Any = threading.RLock() if alone else nullcontext()
        append_line(self.path, None)

    def __repr__(self) -> str:
        return f"Recorder({str(self.path)!r}, {self.speculator!r})"

    def generate(
        self,
        input_ids: Tensor | None = None,
        generation_config: Any = None,
        *,
        chats: Sequence[Messages] | None = None,
        **options: Any,
    ) -> Any:
        """What `speculator.generate` returns; then a line for each row is appended.

        Args:
            chats: for each prompt, the messages that it was rendered from. The turns of a chat are
                then known to belong together, and can be rendered again by another template.

        Raises:
            OptionError: another number of chats than prompts, or no prompts.
        """
        input_ids = options.pop("inputs", None) if input_ids is None else input_ids
        if input_ids is None:
            raise OptionError("a recorder needs the prompts' tokens, found none; pass input_ids.")
        if chats is not None and len(chats) != len(input_ids):
            raise OptionError(
                f"found {counted(len(chats), 'chat')} for {counted(len(input_ids), 'prompt')}; "
                "give the messages of each prompt, or no chats."
            )
        asked = GenerateOptions(
            {"generation_config": generation_config, **options},
            self.speculator.model.generation_config,  # type: ignore[arg-type]
        )
        with self._one:
            output = self.speculator.generate(input_ids, generation_config, **options)
            stats = self.speculator.stats
        text: Tensor = getattr(output, "sequences", output)
        masks = options.get("attention_mask")
        lengths = (stats.drafted.depths >= 0).sum(1)  # [rows]
        new = text[:, input_ids.shape[1] :].tolist()
        for row, ids in enumerate(new):
            at = row * len(input_ids) // len(new)
            prompt = input_ids[at] if masks is None else input_ids[at][masks[at].bool()]
            counts = np.array(stats.rounds_of(row)).reshape(-1, 2)[:, 0]
            tau = float(counts.mean()) if len(counts) else None
            chat = None if chats is None else chats[at]
            self.add(prompt.tolist(), ids[: int(lengths[row])], asked.get, tau, chat)
        return output

    def add(
        self,
        prompt: list[int],
        answer: list[int],
        setting: Callable[[str], Any],
        tau: float | None = None,
        chat: Messages | None = None,
    ) -> None:
        """Append a request that was decoded; one without any text is left out.

        Args:
            prompt, answer: token ids.
            setting: gives the value of an option of `generate` by its name, None where it has none.
            chat: the messages of the prompt.
        """
        # The start token is left out, which the tokenizer sets before any text.
        start = bool(prompt) and prompt[0] == self._tokenizer.bos_token_id
        asked = self._tokenizer.decode(prompt[start:])
        said = self._tokenizer.decode(answer, skip_special_tokens=True)
        if not (asked.strip() and said.strip()):
            return
        line: dict[str, Any] = {"prompt": asked, "completion": said}
        if chat is not None:
            line = {"messages": [*chat, {"role": "assistant", "content": said}]}
        settings = {n: v if (v := setting(n)) is not None else d for n, d in _SAMPLING.items()}
        settings = {name: value for name, value in settings.items() if value is not None}
        line |= {"prompt_token_ids": prompt, "token_ids": answer, **self._model}
        settings = settings if setting("do_sample") else {"temperature": 0}
        found = {name: setting(name) for name in _PENALTIES}
        settings |= {name: v for name, v in found.items() if v not in (None, _PENALTIES[name])}
        line["sampling"] = settings | ({"grammar": True} if setting("grammar") else {})
        line["max_new_tokens"] = setting("max_new_tokens")
        line["tau"] = tau and round(tau, 4)
        line["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            append_line(self.path, json.dumps(line, ensure_ascii=False))
        except OSError as error:
            logger.warning("%s: a request is not recorded (%s)", self.path, error.strerror)
