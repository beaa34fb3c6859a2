"""The report of a training: what was learnt, what it accepts, and how its text is written."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headstart.heads import Manifest
from headstart.heads.families import with_article

from ...recipe import Recipe
from .. import plot
from . import drawings
from .page import Page, Picture, Sample, save_png, write_page
from .parts import NOTES, environment


def training_pictures(metrics: Path | None, measured: dict[str, Any]) -> list[Picture]:
    """Loss, accuracy, τ and acceptance by step, acceptance by depth, the tree, and τ by prompt.

    Args:
        metrics: the figures by step, where there are any.
        measured: what validation measured of the checkpoint that was kept.
    """
    trained, validated = plot.read_metrics(metrics) if metrics else ([], [])
    found = []
    if trained:
        said = "Mean training loss of the steps since the previous point."
        found.append(Picture("loss", "Loss by step", said, partial(plot.draw_loss, lines=trained)))
    if any("accuracy_by_depth" in line for line in trained):
        said = "Share of the training text's tokens that were the drafter's most likely ones."
        draw = partial(plot.draw_by_depth, lines=trained, name="accuracy")
        found.append(Picture("accuracy", "Accuracy by step", said, draw))
    if len(validated) > 1:
        said = "Decoded from held-out prompts, with the standard error over documents."
        draw = partial(plot.draw_tau, lines=validated, best=measured.get("best_step"))
        found.append(Picture("tau", "Tokens per round, τ, by step", said, draw))
        said = "Share of the drafted tokens whose parent was accepted, by the depth of the token."
        draw = partial(plot.draw_by_depth, lines=validated, name="acceptance")
        found.append(Picture("acceptance_by_step", "Acceptance by step", said, draw))
    if any(measured.get("acceptance_by_depth") or ()):
        draw = partial(drawings.acceptance_by_depth, shares={"": measured["acceptance_by_depth"]})
        said = "Of the checkpoint that was kept. The colours are those of the text below."
        found.append(Picture("acceptance", "Acceptance by depth", said, draw))
    if measured.get("tree"):
        found.append(tree_picture(measured["tree"], measured.get("tree_shares")))
    if len(measured.get("tau_by_prompt") or ()) > 2:
        draw = partial(
            drawings.by_prompt, each={"": measured["tau_by_prompt"]}, label="tokens per round, τ"
        )
        said = "A point is a held-out prompt of the validation: how much τ varies around the mean."
        found.append(Picture("tau_by_prompt", "Tokens per round, τ, by prompt", said, draw))
    return found


def draw_acceptance(measured: dict[str, Any], image: Path) -> bool:
    """Draw acceptance by depth for the model card; False without matplotlib, or with no figures.

    Where τ was measured with several trees (`taus`), these are the longest chain and the artifact's
    tree, at both temperatures, if there were enough rounds; else what validation measured.
    """
    taus = measured.get("taus") or []
    chains = [each["tree"] for each in taus if each["tree"].startswith("chain:")]
    names = {*chains[-1:], *(each["tree"] for each in taus[-1:])}
    enough = [each for each in taus if each["rounds"] >= drawings.TRIED]
    chosen = [each for each in enough if each["tree"] in names]
    shares = measured.get("acceptance_by_depth") or []
    known = any(share is not None for share in shares)
    if not (known or chosen) or importlib.util.find_spec("matplotlib") is None:
        return False
    draw = partial(drawings.acceptance_by_depth, shares={"": shares})
    if chosen:
        draw = partial(drawings.acceptance_of_trees, found=chosen)
    title = "Drafted tokens that were accepted, by depth"
    save_png(Picture("acceptance", title, "", draw, rows=8 if chosen else 0), image)
    return True


def tree_picture(paths: Sequence[Sequence[int]], shares: Sequence[float] | None) -> Picture:
    """The tree with each node's probability, where it is known."""
    leaves = {tuple(path) for path in paths} - {tuple(path[:-1]) for path in paths}
    said = "A node is a drafted token; siblings are in the drafter's order, the best on top."
    if shares:
        said += " A percentage is the share of positions where the target wrote exactly this path."
    draw = partial(drawings.token_tree, paths=paths, shares=shares)
    return Picture("tree", "The token tree", said, draw, rows=min(len(leaves), 26))


def write_training_report(
    recipe: Recipe,
    manifest: Manifest,
    metrics: Path | None,
    samples: Sequence[Sample],
    device: str,
    dtype: str,
    path: Path,
) -> Path:
    """Write the page of a training from the measurements in its manifest."""
    measured = manifest.metrics
    error = measured.get("tau_se")
    facts = [
        ("tokens per round, τ", f"{measured['tau']:.2f}" + (f" ± {error:.2f}" if error else "")),
        ("family", manifest.family),
        ("steps", f"{measured.get('steps', 0):,}"),
        ("training", f"{measured.get('seconds', 0):.0f} s"),
        ("tree, nodes", str(1 + len(measured["tree"]))),
        ("rule", recipe.decode.rule),
    ]
    prompts = recipe.decode.validation_prompts
    sources = ", ".join(part.source for part in recipe.corpus.parts())
    drafter = f"{with_article(manifest.family)} drafter"
    page = Page(
        title=f"{recipe.name}: {drafter} for {Path(manifest.target).name}",
        said=f"On {prompts} held-out prompts of {sources} the target with this drafter writes "
        f"{measured['tau']:.2f} tokens per round, where plain decoding writes one.",
        facts=facts,
        pictures=training_pictures(metrics, measured),
        samples=list(samples),
        environment=[*environment(device, dtype), ("recipe", recipe.name)],
        notes=[
            "The checkpoint and the tree were chosen by this τ, so expect slightly less on other "
            "text of the same kind, and still less on text of another kind.",
            *NOTES[:1],
            "Training measures no speedup; headstart bench does.",
        ],
    )  # fmt: skip
    return write_page(page, path)
