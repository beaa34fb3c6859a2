"""Causes that lie in the text: how prompts are rendered, what was taught, who wrote it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from headstart.heads.artifacts.manifest import tokenizer_hash

from .pairs import Pair
from .scene import Difference, Scene


def chat(scene: Scene) -> list[Difference]:
    """Template, thinking mode and system prompt; each alone is undone."""
    there, rendering = scene.trained("chat"), scene.pair.rendering
    if not there:
        return []
    found: list[Difference] = []
    tokenizer: Any = scene.pair.tokenizer
    own = rendering.template or (tokenizer.chat_template and tokenizer.get_chat_template())
    template = there.get("template")
    if there["how"] == "template" and own != template:
        found.append(Difference(
            "chat template", f"trained with template {_short(template)}, here {_short(own)}",
            "Render prompts with the template of training: it is in headstart.json under "
            "trained.chat.template.",
            {"training's template": lambda pair: pair.rendered(template=template, how="auto")},
        ))  # fmt: skip
    if there["how"] == "plain" and own and rendering.how != "plain":
        found.append(Difference(
            "chat template", "trained on chats as plain text, here rendered by a template",
            "Train with distill.chat=template: prompts will come through the template.",
            {"plain text": lambda pair: pair.rendered(how="plain")},
        ))  # fmt: skip
    if there["how"] == "template":
        kwargs, here = there.get("template_kwargs") or {}, dict(rendering.template_kwargs)
        if kwargs != here:
            found.append(Difference(
                "thinking mode" if {"enable_thinking"} & (kwargs.keys() | here.keys())
                else "template settings",
                f"trained with template settings {kwargs or 'none'}, here {here or 'none'}",
                "Render prompts with the settings of training (chat_template_kwargs of a server), "
                "or train on both modes.",
                {"training's settings": lambda pair: pair.rendered(template_kwargs=kwargs)},
            ))  # fmt: skip
        if there.get("system") != rendering.system:
            found.append(Difference(
                "system prompt",
                f"trained with {_quoted(there.get('system'))}, here {_quoted(rendering.system)}",
                "Give the system prompt of training, or train with yours (chat.system).",
                {"training's": lambda pair: pair.rendered(system=there.get("system"))},
            ))  # fmt: skip
    return found


def texts_not_chats(scene: Scene) -> list[Difference]:
    """Prompts that are texts, to a drafter that was trained on chats."""
    if scene.chats or scene.trained("chat").get("how") != "template":
        return []
    return [
        Difference(
            "chat template", "trained on chats through the template, and the prompts are texts",
            "Send prompts as messages (JSON Lines with messages), not as plain text.",
            {"as a user's message": lambda pair: pair.rendered(as_chats=True)},
        )
    ]  # fmt: skip


def tokens(scene: Scene) -> list[Difference]:
    there = scene.manifest.tokenizer_hash if scene.manifest else ""
    if not there or there == tokenizer_hash(scene.pair.tokenizer):
        return []
    return [
        Difference(
            "tokenizer", "the tokenizer has other tokens than that of training",
            "Load the tokenizer that the drafter was trained with, or train for this one.",
        )
    ]  # fmt: skip


def length(scene: Scene) -> list[Difference]:
    """Positions that no training row had."""
    longest = scene.trained("rows").get("longest")
    if longest is None or scene.longest <= longest:
        return []
    context = scene.target["context"]
    of = f", of a context of {context}" if context else ""
    last = max(longest - scene.new_tokens, longest // 4, 1)

    def cut(pair: Pair) -> Pair:
        return pair.rendered(last=last)

    return [
        Difference(
            "context length",
            f"trained on rows of at most {longest} tokens, texts here have up to "
            f"{scene.longest}{of}",
            f"Train on rows of {scene.longest} tokens (distill.max_length, distill.prefix_tokens).",
            {f"the last {last} tokens of each prompt": cut},
        )
    ]  # fmt: skip


def openings(scene: Scene) -> list[Difference]:
    """Answers whose first tokens were not taught: every first round of an answer starts there."""
    rows = scene.trained("rows")
    answers, taught = rows.get("answers") or 0, rows.get("openings") or 0
    if answers == taught:
        return []
    round_ = f", where τ is {scene.first_round:.2f}" if scene.first_round is not None else ""
    return [
        Difference(
            "first answer token",
            f"of {answers:,} answers in training {answers - taught:,} have a first or second token "
            f"that is not supervised, and every answer here has a first round{round_}",
            "Begin {% generation %} of the training's chat template right where the prompt ends, "
            "or remove the mark, and distill again.",
        )
    ]  # fmt: skip


def writer(scene: Scene) -> list[Difference]:
    """Text that the target did not write: it is unlikely to the target, its own is not."""
    data, own = scene.trained("data"), scene.own_loss
    taught = data.get("target_loss")
    if not data or not taught or own is None:
        return []
    other = data.get("written_by") not in (
        None,
        scene.manifest and scene.manifest.target_fingerprint,
    )
    if data["writer"] == "own" and not other:
        return []
    apart = taught["nats"] - own["nats"]
    if apart <= 3 * float(np.hypot(taught["se"], own["se"])):
        return []
    return [
        Difference(
            "text of another writer",
            f"the training text costs the target {taught['nats']:.2f} nats per token, its own "
            f"at temperature 1 {own['nats']:.2f} (distill.writer {data['writer']})",
            "Distill again with the target as the writer (distill.writer=own or openai).",
        )
    ]  # fmt: skip


def _quoted(text: str | None) -> str:
    return f"{text[:40]!r}" if text else "none"


def _short(template: str | None) -> str:
    return hashlib.sha256(template.encode()).hexdigest()[:12] if template else "none"
