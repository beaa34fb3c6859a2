"""The model card of a drafter that was trained here."""

from __future__ import annotations

from typing import Any

from headstart.heads import Manifest, family
from headstart.heads.artifacts.files import ACCEPTANCE, PLOT, REPORT_LINK
from headstart.heads.artifacts.saving import model_card
from headstart.heads.core import FINAL
from headstart.heads.families import with_article
from headstart.infer import StaticTree

from ..data.prefixes import prompt_settings
from ..recipe import Recipe


def training_card(
    recipe: Recipe, manifest: Manifest, plotted: bool = False, pictured: bool = False
) -> str:
    """The README.md of the artifact that `recipe` made, from the measurements in its manifest.

    Args:
        plotted: whether the plot of the training stands beside it.
        pictured: whether the picture of acceptance by depth does.
    """
    measured, decode = manifest.metrics, recipe.decode
    tree = StaticTree(measured["tree"])
    shares = " ".join("–" if s is None else f"{s:.2f}" for s in measured["acceptance_by_depth"])
    rows = [
        ("tokens per round, τ", _tau(measured)),
        *((f"τ of {name}", _tau(of)) for name, of in measured.get("tau_by_source", {}).items()),
        ("acceptance at depth 1, 2, …", shares),
        ("tree", f"{tree.label}, {tree.nodes} nodes including the root"),
        ("rule", decode.rule),
        ("prompts", f"{decode.validation_prompts} {_kind(recipe)}"),
        ("new tokens per prompt", str(decode.new_tokens)),
    ]
    sources = ", ".join(f"`{part.source}`" for part in recipe.corpus.parts())
    chosen, other_text = "tree was", sources
    if family(manifest.family).trainable:
        rows.append(("training", f"{measured['steps']} steps, {measured['seconds']:.0f} s"))
        chosen = "checkpoint and the tree were"
        other_text += ", which it was trained on"
    output = "The output is the\ntarget's own."
    if adapted := measured.get("adapted"):
        rows += _adapted(adapted)
    if loss := measured.get("held_out_loss"):
        output = (
            f"The output is that of\nthe adapted target: `{manifest.target}` with the LoRA adapter "
            "in `adapter/`, which was\ntrained with the drafter. Loading merges it into the target."
        )
        change = f"{loss['adapted'] / loss['base'] - 1:+.2%}"
        rows.append((
            f"target's loss on {loss['tokens']} held-out tokens, base to adapted",
            f"{loss['base']:.4f} to {loss['adapted']:.4f} ({change})",
        ))  # fmt: skip
    if "machine" in measured:
        rows.append(("measured on", f"{measured['machine']}, {measured['dtype']}"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    body = f"""{output}

| measured on validation prompts | |
|---|---|
{table}

The {chosen} chosen by this τ, so expect slightly less on other text of the
same kind, and still less on text unlike {other_text}.{_taus(measured)}{_trained(manifest)}"""
    if pictured:
        body += f"\n\n![Acceptance by depth]({ACCEPTANCE})"
    if plotted:
        body += f"\n\n![Loss, tokens per round and acceptance over the steps]({PLOT})"
    body += f"\n\n{REPORT_LINK}"
    return model_card(
        manifest,
        f"{recipe.name}: {with_article(manifest.family)} drafter for `{manifest.target}`",
        body,
        "How it was trained is in `headstart.json`, the tree\nin `tree.json`.",
    )


def _adapted(told: dict[str, Any]) -> list[tuple[str, str]]:
    """The drafter that this one was trained further from, and what that gained."""
    origin = f"`{told['from']}`, weights sha256 `{told['from_sha256'][:12]}`"
    taus = [("τ on held-out requests", told), ("τ on the text it had learnt from", told["earlier"])]
    return [
        ("adapted from", origin),
        ("adapted on", f"{told['requests']:,} requests, {told['supervised']:,} tokens of answers"),
        *(
            (f"{name}, before and after", "{:.2f} and {:.2f}".format(*of["tau"]))
            for name, of in taus
            if of is not None
        ),
    ]


def _taus(measured: dict[str, Any]) -> str:
    """τ by tree and temperature, as a table."""
    found = measured.get("taus") or []
    cells = {(each["tree"], each["temperature"]): _tau(each) for each in found}
    warm = sorted({temperature for _, temperature in cells})
    if not cells:
        return ""
    lines = [f"| τ by tree | {' | '.join(f'temperature {t}' for t in warm)} |"]
    lines.append("|---|" + "---|" * len(warm))
    for tree in dict.fromkeys(tree for tree, _ in cells):
        lines.append(f"| {tree} | {' | '.join(cells.get((tree, t), '') for t in warm)} |")
    return "\n\n" + "\n".join(lines)


def _trained(manifest: Manifest) -> str:
    """What the drafter was trained on and reads, as a table."""
    found, chat = manifest.trained, manifest.trained.get("chat") or {}
    if not found:
        return ""
    rows = [("target's revision", manifest.target_revision)]
    if chat.get("how") == "template":
        thinking = {None: "as the template has it", True: "on", False: "off"}[chat["thinking"]]
        rows += [
            ("chat template", f"sha256 `{chat['template_hash'][:12]}` with its settings"),
            ("thinking", thinking), ("system prompt", chat["system"] or "none"),
        ]  # fmt: skip
    else:
        rows.append(("chats", {"plain": "as plain text", "text": "none"}[chat.get("how", "text")]))
    rows += _layers(found["drafter"]["layers"])
    if data := found.get("data"):
        told, loss = found["rows"], data["target_loss"]
        counts = f"{told['rows']:,} rows, {told['supervised']:,} tokens supervised"
        rows += [
            ("rows", f"{counts}, the longest of {told['longest']:,} tokens"),
            ("answers", _answers(told)),
            ("sources", ", ".join(f"`{source}`" for source in data["sources"])),
            ("written by", "the target" if data["writer"] == "own" else data["writer"]),
            ("target's loss on them", f"{loss['nats']:.3f} nats per token" if loss else ""),
        ]  # fmt: skip
    lines = [f"| {name} | {value} |" for name, value in rows if value]
    return "\n\n| trained with | |\n|---|---|\n" + "\n".join(lines)


def _layers(layers: dict[str, list[int]]) -> list[tuple[str, str]]:
    """The layers of the target that a drafter reads, in both conventions."""
    read = layers["by_input"]
    if not read:
        return []
    if all(layer == FINAL for layer in read):
        return [("reads", "the target's state after its last norm")]
    return [
        (name, ", ".join("after the last norm" if of == FINAL else str(i) for i, of in each))
        for name, each in (
            ("layers read, by their input", zip(read, read, strict=True)),
            ("the same by their output", zip(layers["by_output"], read, strict=True)),
        )
    ]


def _answers(rows: dict[str, Any]) -> str:
    """How many answers there are, and whether what they begin with is taught."""
    answers, openings = rows.get("answers") or 0, rows.get("openings") or 0
    taught = "all" if openings == answers else f"{openings / answers:.1%} of them"
    return f"{answers:,}, {taught} from their first token on" if answers else ""


def _tau(measured: dict[str, Any]) -> str:
    error = measured.get("tau_se")
    return f"{measured['tau']:.2f}" + (f" (standard error {error:.2f})" if error else "")


def _kind(recipe: Recipe) -> str:
    """What the prompts of validation are, in words."""
    kind = prompt_settings(recipe)
    if kind["prefix"] == "prompt":
        most = "" if kind["tokens"] is None else f", of at most {kind['tokens']} tokens"
        return f"that end where an answer begins{most}"
    where = "from anywhere" if kind["prefix"] == "window" else "from the start"
    return f"of {kind['tokens']} tokens, {where} in a text"
