"""The model card of a drafter that was trained here."""

from __future__ import annotations

from typing import Any

from headstart.heads import Manifest, family
from headstart.heads.artifacts.files import PLOT, REPORT_LINK
from headstart.heads.artifacts.saving import model_card
from headstart.infer import StaticTree

from ..data.prefixes import prompt_settings
from ..recipe import Recipe


def training_card(recipe: Recipe, manifest: Manifest, plotted: bool = False) -> str:
    """The README.md of the artifact that `recipe` made, from the measurements in its manifest.

    Args:
        plotted: whether the plot of the training stands beside it.
    """
    measured, decode = manifest.metrics, recipe.decode
    tree = StaticTree(measured["tree"])
    shares = " ".join("–" if s is None else f"{s:.2f}" for s in measured["acceptance_by_depth"])
    rows = [
        ("tokens per round, τ", _tau(measured)),
        *((f"τ of {name}", _tau(of)) for name, of in measured.get("tau_by_source", {}).items()),
        ("acceptance at depth 1, 2, …", shares),
        ("tree", f"{tree}, {tree.nodes} nodes with the root"),
        ("rule", decode.rule),
        ("prompts", f"{decode.validation_prompts} {_kind(recipe)}"),
        ("new tokens a prompt", str(decode.new_tokens)),
    ]
    sources = ", ".join(f"`{part.source}`" for part in recipe.corpus.parts())
    chosen, other_text = "tree was", sources
    if family(manifest.family).trainable:
        rows.append(("training", f"{measured['steps']} steps, {measured['seconds']:.0f} s"))
        chosen = "checkpoint and the tree were"
        other_text += ", which it was trained on"
    output = "The output is the\ntarget's own."
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
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    body = f"""{output}

| measured on validation prompts | |
|---|---|
{table}

The {chosen} chosen by this τ, so expect slightly less on other text of the
same kind, and less on text unlike {other_text}."""
    if plotted:
        body += f"\n\n![Loss, tokens a round and acceptance over the steps]({PLOT})"
    body += f"\n\n{REPORT_LINK}"
    return model_card(
        manifest,
        f"{recipe.name}: a {manifest.family} drafter for `{manifest.target}`",
        body,
        "How it was trained is in `headstart.json`, the tree\nin `tree.json`.",
    )


def _tau(measured: dict[str, Any]) -> str:
    error = measured.get("tau_se")
    return f"{measured['tau']:.2f}" + (f" (standard error {error:.2f})" if error else "")


def _kind(recipe: Recipe) -> str:
    """What the prompts of validation are, in words."""
    kind = prompt_settings(recipe)
    if kind["prefix"] == "prompt":
        return f"that end where an answer begins, of at most {kind['tokens']} tokens"
    where = "from anywhere" if kind["prefix"] == "window" else "from the start"
    return f"of {kind['tokens']} tokens, {where} in a text"
