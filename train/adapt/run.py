"""Adaptation: the drafter is measured, trained further, measured again, and kept if it is better.

corpus, target, distill    as in every run; the rows are the recorded answers
before                     τ of the drafter as it is, on held-out requests
train                      from its weights; the checkpoint is chosen by other held-out requests
after                      τ of the best checkpoint on those of `before`
heads                      the artifact, only where τ is higher beyond noise
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headstart.heads import Drafter, fingerprint, load_drafter
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core.files import write_atomically
from headstart.infer import RULES, parse_static
from headstart.infer.measure.noise import paired_gain
from headstart.infer.trees.texts import sparse_nodes

from ..data.corpus import load_documents
from ..data.held_out import HeldOutError, HeldOutPrompt, recipe_prompts
from ..data.training_rows import Rows, context_of
from ..drafter_stage import choose, evaluation_settings, sampling_of
from ..fit.validate import decode_prompts, ratio
from ..pipeline import Run
from ..provenance import surprise
from ..recipe import Recipe
from ..stages.store import Stage
from .earlier import Earlier
from .traffic import AdaptError, Traffic

ERRORS = 2.0
"""Standard errors by which τ has to rise for the new drafter to be kept."""

_SURPRISE = 0.5  # nats a token by which a target is surprised by no text of its own
_COUNTS = "counts.json"  # tokens and rounds of each prompt, in the folder of a measurement


def adapt(
    recipe: Recipe, source: DrafterSource, traffic: Traffic, earlier: Earlier, fresh: bool = False
) -> dict[str, Any]:
    """Run an adaptation; an interrupted one goes on where it was.

    Returns:
        What the manifest of the new artifact says under `adapted`: `kept`; `from` and
        `from_sha256`, the drafter and the hash of its weights; `requests`, `rows` and `supervised`
        tokens; `prompts`, `sampling`; `tau`, `gain` and `earlier`, see `_compared`; and `artifact`,
        its folder, None where the drafter was not kept, and `stage_seconds`.

    Raises:
        AdaptError: another model has answered the requests.
        ValueError: as for any run.
    """
    with _Adaptation(recipe, source, traffic, earlier, fresh) as this:
        return this.adapt()


class _Adaptation(Run):
    def __init__(
        self, recipe: Recipe, source: DrafterSource, traffic: Traffic, earlier: Earlier, fresh: bool
    ):
        super().__init__(recipe, fresh, ("validation", "bench"))
        self.source, self.traffic, self.earlier = source, traffic, earlier
        self.prompts: dict[str, list[HeldOutPrompt]] = {}

    def adapt(self) -> dict[str, Any]:
        corpus, target = self._begin(True)
        rows = self._distill(corpus, target)
        before = self._before(corpus, target, rows)
        trained = self._train(corpus, target, rows)
        after = self._after(corpus, target, trained, before)
        kept = after.info["kept"]
        heads = self._heads(corpus, target, rows, trained, after) if kept else None
        artifact = {"artifact": None if heads is None else str(heads.plain)}
        return after.info | artifact | {"stage_seconds": self.store.seconds()}

    def _before(self, corpus: Stage, target: Stage, rows: Stage) -> Stage:
        def work(folder: Path) -> dict[str, Any]:
            model, tokenizer = self.target.load(target), self.target.tokenizer(target)
            self._check_writer(model, Rows.load(rows.folder))
            drafter = load_drafter(self.source, model, tokenizer, other_target=True).float()
            tree = self.recipe.decode.tree
            loaded = self._judged(corpus, target)
            if sparse_nodes(tree):  # each drafter has the tree that suits it
                tree = loaded.validation(self.recipe)(drafter)["tree"]
            return self._measured(corpus, target, drafter, tree, folder)

        settings = self._settings(
            decode=evaluation_settings(self.recipe), prompts=self.recipe.decode.prompts,
            drafter=self._content(str(self.source.folder)),
        )  # fmt: skip
        return self.store.run("before", settings, work, [corpus, target, rows], resumable=True)

    def _after(self, corpus: Stage, target: Stage, trained: Stage, before: Stage) -> Stage:
        def work(folder: Path) -> dict[str, Any]:
            loaded = self._judged(corpus, target)
            found = trained.folder, trained.info
            drafter, measured = choose(self.recipe, loaded, self._drafter, *found)
            self._measured(corpus, target, drafter.eval(), measured["tree"], folder)
            compared = _compared(*(_read(each) for each in (before.folder, folder)))
            rows = self.store.finished["distill"].info
            return {
                **compared,
                "from": self.source.origin, "from_sha256": self.source.manifest.weights_sha256,
                "requests": self.traffic.requests, "rows": rows["rows"],
                "supervised": rows["supervised"], "earlier_rows": rows.get("earlier_rows", 0),
                "sampling": self._sampling(),
            }  # fmt: skip

        settings = self._settings("decode")
        reads = [corpus, target, trained, before]
        return self.store.run("after", settings, work, reads, resumable=True)

    def _sampling(self) -> dict[str, Any]:
        decode = self.recipe.decode
        return sampling_of(decode) if RULES[decode.rule].samples else {"temperature": 0}

    def _check_writer(self, model: Any, rows: Rows) -> None:
        """Raise AdaptError where the rows are not the target's own text."""
        if self.recipe.distill.writer != "given":
            return
        name = str(self.recipe.target.model)
        self.traffic.check_writer(fingerprint(model), name)
        new = sum(info["rows"] for info in rows.info if not info.get("earlier"))  # they are first
        found = surprise(model, rows, new, self._sampling()["temperature"])
        if found["nats"] > max(_SURPRISE, 4 * found["se"]):
            raise AdaptError(
                f"{self.traffic.source}: the answers are not {name}'s own text: they "
                f"surprise it by {found['nats']:.2f} nats a token more than it expects (standard "
                f"error {found['se']:.2f}, limit {_SURPRISE}); let it answer anew (--rewrite)"
            )

    def _measured(
        self, corpus: Stage, target: Stage, drafter: Drafter, tree: Any, folder: Path
    ) -> dict[str, Any]:
        """Decode held-out prompts of the traffic, and of the text that the drafter learnt from.

        Writes for each the tokens and rounds of every prompt, and its group: prompts that begin
        alike are not independent of each other.
        """
        model, tokenizer = self.target.load(target), self.target.tokenizer(target)
        found = {}
        documents = {"traffic": load_documents(corpus.folder, "held_out")}
        recipes = {"traffic": self.recipe}
        if self.earlier.corpus is not None and self.earlier.recipe is not None:
            documents["earlier"] = load_documents(self.earlier.corpus, "held_out")
            recipes["earlier"] = self.earlier.recipe
        for name, held_out in documents.items():
            recipe = recipes[name]
            context = context_of(model.config)
            try:
                prompts = recipe_prompts(recipe, tokenizer, held_out, "bench", context)
            except HeldOutError:
                if name == "traffic":
                    raise
                continue
            decode, shape = recipe.decode, parse_static(tree)
            counts, _ = decode_prompts(
                model, drafter, shape, decode.rule, prompts, decode.new_tokens,
                seed=recipe.seed, sampling=sampling_of(decode),
            )  # fmt: skip
            first = {document.id: document.first_prompt() for document in held_out}
            numbers: dict[str, int] = {}
            groups = [numbers.setdefault(first[p.document], len(numbers)) for p in prompts]
            found[name] = {"counts": counts.tolist(), "groups": groups}
        write_atomically(folder / _COUNTS, json.dumps(found))
        return {name: {"tau": ratio(np.array(each["counts"]))} for name, each in found.items()}


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / _COUNTS).read_text(encoding="utf-8"))


def _compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """τ before and after, and what is gained, paired over groups of prompts.

    Returns:
        `kept`, whether τ of the traffic rises by more than ERRORS standard errors; `prompts`;
        `tau`, before and after; `gain`, its `tau` and `se`; and `earlier`, the same of the text
        that the drafter had learnt from, None where that is not there.
    """
    found: dict[str, Any] = {"earlier": None}
    for name, old in before.items():
        sums = []
        for counts in (old["counts"], after[name]["counts"]):
            grouped = np.zeros((max(old["groups"]) + 1, 2))
            np.add.at(grouped, old["groups"], np.array(counts))
            sums.append(grouped)
        gain = paired_gain(*sums)
        told = {
            "prompts": len(old["counts"]),
            "tau": [ratio(each) for each in sums],
            "gain": {"tau": gain.tau, "se": gain.se if np.isfinite(gain.se) else None},
        }
        if name == "traffic":
            found = found | told | {"kept": gain.beyond(ERRORS)}
        else:
            found["earlier"] = told
    return found
