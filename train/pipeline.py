"""Runs a recipe: corpus, target, distill, train, heads, and the benchmark, each a stage on disk.

Under `accelerate launch` every process runs this file: all share the work of distillation and
training, process 0 alone does the rest and writes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import transformers

from headstart.heads import Drafter, OptionError, family
from headstart.heads.artifacts.files import METRICS
from headstart.heads.artifacts.hub import folder_or_repository
from headstart.heads.artifacts.manifest import sha256
from headstart.heads.core import loaded_whole
from headstart.infer import RULES, Speculator, load

from .checks.early import check_prompts, check_run
from .data.corpus import build_corpus, cut_short, load_documents
from .data.distill import Pace, distill, write_manifest
from .data.earlier import add_earlier
from .data.fingerprints import source_fingerprint
from .data.held_out import Part, prompt_settings
from .data.training_rows import Rows, context_of
from .drafter_stage import (
    Loaded,
    choose,
    evaluation_settings,
    make_drafter,
    train_drafter,
    write_drafter,
)
from .fit.arguments import training_arguments
from .fit.feature_files import FeatureFolder
from .processes.agreement import (
    from_process_0,
    in_parallel,
    is_process_0,
    on_process_0,
    wait_for_all,
)
from .processes.engine import join_deepspeed, weights_are_sharded
from .processes.launched import check_engine, check_same, check_shared
from .processes.lifetime import watch_processes
from .recipe import Distill, Recipe
from .rounds import write_in_rounds
from .scratch_target import train_target
from .stages.fingerprints import FileHashes, deciding, model_fingerprint
from .stages.kept import (
    CHECKPOINTS,
    check_can_go_on,
    continue_from,
    earlier_training,
    schedule,
)
from .stages.store import Stage, StageStore
from .target_stage import RunTarget

logger = logging.getLogger(__name__)


def train(recipe: Recipe, fresh: bool = False) -> Path:
    """Run the stages up to the trained drafter; returns its folder. `fresh` reuses none."""
    with Run(recipe, fresh) as this:
        return this.train().plain


def write_text(recipe: Recipe, fresh: bool = False) -> Stage:
    """Run the stages up to the text that a drafter is trained on; returns the last of them."""
    with Run(recipe, fresh, parts=()) as this:
        return this.write_text()


def run(recipe: Recipe, fresh: bool = False) -> dict[str, Any]:
    """Train, then measure on held-out prompts; returns the benchmark's report.

    The report is that of `headstart.infer.measure.bench`, with `stage_seconds` and `artifact`
    added, and `held_out`, the file that the prompts came from.
    """
    with Run(recipe, fresh, ("validation", "bench")) as this:
        artifact = this.train()
        scratch, target = recipe.target.scratch, this.store.finished["target"].info
        return this.bench(artifact).info | {
            "target_loss": target.get("train_loss"),
            "target_seconds": target.get("seconds"),
            "target_parameters": target.get("parameters"),
            "expected_loss": scratch and scratch.expected_loss,
            "stage_seconds": this.store.seconds(),
            "artifact": str(artifact.plain),
            "held_out": str(this.store.finished["corpus"].plain / "held_out.jsonl"),
        }


class Run:
    """One recipe being run by this process.

    Args:
        parts: the held-out prompts that it will decode.
    """

    def __init__(self, recipe: Recipe, fresh: bool, parts: Sequence[Part] = ("validation",)):
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.recipe, self.parts = recipe, parts
        # Before anything asks for the processes: these arguments set them up. The folder of the
        # checkpoints is set when the stage that writes them begins.
        self.together = recipe.target.tp_plan is not None
        self.args = training_arguments(
            recipe.train, recipe.folder / CHECKPOINTS, recipe.seed, self.together
        )
        join_deepspeed(self.args)
        watch_processes()
        self.engine = check_engine(self.args, os.environ, self.together)
        other = recipe.folder.with_name(recipe.shares) if recipe.shares else None
        self.store = StageStore(recipe.folder, fresh, other)
        self.hashes = FileHashes(recipe.folder / "hashes.json")
        self.target = RunTarget(recipe.target, self.args)
        self._drafter: Drafter | None = None  # as this process has trained it

    def __enter__(self) -> Self:
        self.store.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.store.__exit__(*error)

    def train(self) -> Stage:
        kind = family(self.recipe.drafter.family)
        corpus, target = self._begin(kind.learns())
        rows = self._distill(corpus, target) if kind.learns() else None
        trained = self._train(corpus, target, rows) if rows and kind.trainable else None
        return self._heads(corpus, target, rows, trained)

    def write_text(self) -> Stage:
        """Run the stages up to the rows."""
        return self._distill(*self._begin(True))

    def _begin(self, learns: bool) -> tuple[Stage, Stage]:
        """The corpus and the target, once all was checked that can be before more is done."""
        counted = self._check()
        corpus = self._corpus(quiet=counted)
        target = self._target(corpus)
        if not counted:
            context = context_of(self.target.config(target))
            given = self.recipe, self.target.tokenizer(target), corpus.folder, self.parts
            on_process_0(lambda: check_prompts(*given, learns, context))
        return corpus, target

    def _check(self) -> bool:
        """What can be told before the first stage; returns whether prompts were counted."""
        world = self.args.world_size
        if in_parallel():
            check_same(self.recipe.to_dict())
        sharded = weights_are_sharded()
        with loaded_whole():
            how = world, self.parts, sharded
            counted = on_process_0(lambda: check_run(self.recipe, *how).counted)
        trains = family(self.recipe.drafter.family).trainable and bool(self.parts)
        if self.recipe.train.extend and trains:
            on_process_0(partial(earlier_training, self.store.root, self._train_settings()))
        if in_parallel():
            check_shared(self.recipe.folder)
        return counted

    def _settings(self, *sections: str, **more: Any) -> dict[str, Any]:
        """What decides a stage's result: the seed, sections of the recipe, and more."""
        return deciding(self.recipe.to_dict(), (*sections, "seed")) | more

    def _content(self, model: str | None, revision: str | None = None) -> Any:
        """What stands for the present content of a model, if there is one; see `fingerprints`."""

        def found() -> Any:
            content = model_fingerprint(model, self.hashes, revision) if model else None
            self.hashes.save()
            return content

        return on_process_0(found)

    def _corpus(self, quiet: bool = False) -> Stage:
        spec, seed = self.recipe.corpus, self.recipe.seed
        content = on_process_0(lambda: source_fingerprint(spec))
        writer = self._content(*folder_or_repository(spec.writer)) if spec.writer else None

        def work(folder: Path) -> dict[str, Any]:
            counts = build_corpus(spec, folder, seed, quiet=quiet)
            if said := cut_short(spec, counts):
                logger.warning("corpus: %s", said)
            return counts

        settings = self._settings("corpus", content=content, writer=writer)
        return self.store.run("corpus", settings, work, shared=True)

    def _target(self, corpus: Stage) -> Stage:
        spec, seed = self.recipe.target, self.recipe.seed

        def work(folder: Path) -> dict[str, Any]:
            if spec.scratch is None:
                return {"model": spec.model}
            with loaded_whole():
                return {"model": str(folder)} | train_target(
                    spec.scratch, corpus.folder, folder, seed
                )

        settings = self._settings("target", content=self._content(spec.model, spec.revision))
        reads = [corpus] if spec.scratch else []
        return self.store.run("target", settings, work, reads, shared=True)

    def _distill(self, corpus: Stage, target: Stage) -> Stage:
        spec, seed, chat = self.recipe.distill, self.recipe.seed, self.recipe.chat
        name, settings = self.target.name(target), self._settings("distill", "chat")
        if spec.earlier is not None:
            settings["earlier"] = self._earlier(Path(spec.earlier)), spec.earlier_share

        def work(folder: Path) -> dict[str, int]:
            if spec.writer == "own" and weights_are_sharded():
                raise OptionError(
                    "the target's text is not written yet, and under DeepSpeed ZeRO-3, where each "
                    "process holds a part of the target, they cannot write texts of their own; run "
                    "the recipe first with another launch file, up to the distill stage "
                    "(--until distill)."
                )
            tokenizer = self.target.tokenizer(target)
            texts = load_documents(corpus.folder, "train")
            together = self.together and spec.writer == "own"
            share = (0, 1) if together else (self.args.process_index, self.args.world_size)

            def write(
                spec: Distill, shards: range | None = None, choice: Path | None = None
            ) -> Pace:
                # Processes that write the same rows keep those of process 0.
                with TemporaryDirectory(prefix="headstart-") as copy:
                    own = Path(copy) if together and not is_process_0() else folder
                    return distill(
                        spec, lambda: self.target.load(target), tokenizer, texts, own, seed, *share,
                        is_process_0(), chat, name, shards, choice or own,
                        from_process_0 if together else lambda value: value,
                    )  # fmt: skip

            if spec.rounds > 1:
                judged = partial(self._judged, corpus, target)
                pace = write_in_rounds(self.recipe, self.args, judged, write, folder)
            else:
                pace = write(spec)
            wait_for_all()
            model = self.target.model  # None where a server has written
            if not is_process_0():
                return {}
            counts = write_manifest(spec, folder, tokenizer, model, name, pace, chat)
            return counts | add_earlier(spec, folder, tokenizer, seed)

        return self.store.run(
            "distill", settings, work, [corpus, target], resumable=True, shared=True,
            layout={"shards": spec.shards},
        )  # fmt: skip

    def _earlier(self, folder: Path) -> dict[str, str]:
        """What stands for rows of another run: the hashes of what describes its shards."""
        return on_process_0(lambda: {p.name: sha256(p) for p in sorted(folder.glob("*.json"))})

    def _train(self, corpus: Stage, target: Stage, rows: Stage) -> Stage:
        spec, reads = self.recipe.train, [corpus, target, rows]
        settings, earlier = self._train_settings(), None
        if spec.extend:
            ids = {stage.name: stage.id for stage in reads}
            earlier = on_process_0(lambda: earlier_training(self.store.root, settings, ids))
            settings["extends"] = (earlier.record or {})["id"]

        def work(folder: Path) -> dict[str, Any]:
            before = []
            if earlier is not None:
                check_can_go_on(earlier, spec)
                places = earlier.path / CHECKPOINTS, folder / CHECKPOINTS
                on_process_0(lambda: continue_from(*places))
                before = (earlier.record or {})["info"]["schedules"]
            data = Rows.load(rows.folder)
            loaded = self._judged(corpus, target)
            features, limit = None, 1e9 * spec.feature_disk_gb
            if limit:  # beside the rows, for all that are trained on them
                features = FeatureFolder(rows.folder.parent / "features", limit, target.id)
            self._drafter, report = train_drafter(
                self.recipe, self.args, loaded, data, folder, features
            )
            return report | {"schedules": [*before, schedule(spec, report["steps"])]}

        return self.store.run("train", settings, work, reads, resumable=True)

    def _train_settings(self) -> dict[str, Any]:
        """With the content of the model or the head that the drafter is made from, if it is."""
        named, start = self.recipe.drafter.options.get("model"), self.recipe.train.from_
        content = self._content(named if isinstance(named, str) else None)
        if start is not None:
            content = {"model": content, "from": self._content(*folder_or_repository(start))}
        return self._settings("drafter", "train", content=content)

    def _heads(
        self, corpus: Stage, target: Stage, rows: Stage | None, trained: Stage | None,
        adapted: Stage | None = None,
    ) -> Stage:  # fmt: skip
        def work(folder: Path) -> dict[str, Any]:
            if weights_are_sharded() and self._drafter is None:
                raise OptionError(
                    "under DeepSpeed ZeRO-3 the target runs only while a drafter is trained, and "
                    "this one is trained already; run the recipe with one process or another "
                    "launch file, which writes the artifact."
                )
            loaded = self._judged(corpus, target)
            if trained is None:
                drafter = make_drafter(self.recipe, loaded.target, rows and Rows.load(rows.folder))
                measured = {"steps": 0, "seconds": 0.0, **loaded.validation(self.recipe)(drafter)}
            else:
                found = trained.folder, trained.info
                drafter, measured = choose(self.recipe, loaded, self._drafter, *found)
            if adapted is not None:
                measured = measured | {"adapted": adapted.info}
            metrics = trained.folder / METRICS if trained else None
            given = measured, folder, metrics, rows.folder if rows else None
            return write_drafter(self.recipe, loaded, drafter, *given)

        settings = self._settings("drafter", decode=evaluation_settings(self.recipe))
        reads = [corpus, target, *filter(None, (trained or rows, adapted))]
        return self.store.run("heads", settings, work, reads, resumable=True)

    def bench(self, artifact: Stage) -> Stage:
        from headstart.infer.measure.bench import bench

        decode = self.recipe.decode
        corpus, target = self.store.finished["corpus"], self.store.finished["target"]

        def work(folder: Path) -> dict[str, Any]:
            model, tokenizer = self.target.load(target), self.target.tokenizer(target)
            speculator = load(
                model, artifact.folder, tokenizer=tokenizer, rule=decode.rule, compile="auto"
            )
            prompts = self._judged(corpus, target).prompts(self.recipe, "bench")
            tokens = [prompt.tokens.to(model.device) for prompt in prompts]
            temperature = (decode.temperature or 1.0) if RULES[decode.rule].samples else 0.0
            report = bench(speculator, tokens, decode.new_tokens, temperature=temperature)
            if decode.sampled is not None:
                trees, faster = speculator.trees, speculator.target.compile
                again = Speculator(model, speculator.drafter, tree=trees, compile=faster)
                report["sampled"] = bench(
                    again, tokens, decode.new_tokens, repeats=1, temperature=decode.sampled,
                    generate=False,
                )  # fmt: skip
            # JSON has neither NaN nor infinity.
            return json.loads(json.dumps(report), parse_constant=lambda _: None)

        settings = self._settings("decode", prompts=prompt_settings(self.recipe))
        return self.store.run("bench", settings, work, [corpus, artifact])

    def _judged(self, corpus: Stage, target: Stage) -> Loaded:
        documents = load_documents(corpus.folder, "held_out")
        given = self.target.load(target), self.target.tokenizer(target), self.target.name(target)
        return Loaded(*given, documents)
