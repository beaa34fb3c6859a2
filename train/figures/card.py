"""The model card of a drafter that was trained here."""

from __future__ import annotations

from typing import Any

from headstart.heads import Manifest, family
from headstart.heads.artifacts.files import ACCEPTANCE, PLOT, REPORT_LINK
from headstart.heads.artifacts.saving import model_card
from headstart.heads.artifacts.training_table import training_table
from headstart.heads.families import with_article
from headstart.infer import StaticTree

from ..data.held_out import prompt_settings
from ..data.hub import hub_source
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
    parts = recipe.corpus.parts()
    sources = ", ".join(f"`{part.source}`" for part in parts)
    on_hub = (hub_source(part) for part in parts)
    chosen, other_text = "tree was", sources
    kind = family(manifest.family)
    if kind.trainable:
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
    if kind.collects:
        output += (
            "\n\n**It holds the texts that it was made of**: what the target wrote, and the last\n"
            "tokens of the prompts before. Anyone who has the drafter can read them."
        )
    if "machine" in measured:
        rows.append(("measured on", f"{measured['machine']}, {measured['dtype']}"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    body = f"""{output}

| measured on validation prompts | |
|---|---|
{table}

The {chosen} chosen by this τ, so expect slightly less on other text of the
same kind, and still less on text unlike {other_text}.{_taus(measured)}{training_table(manifest)}"""
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
        sorted({hub.name for hub in on_hub if hub is not None}),
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
