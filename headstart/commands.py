"""What each command does with its options. Each returns an exit status.

Heavy imports stand inside the functions, so that parsing and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.inputs import (
    UsageError,
    blank,
    encode,
    load_speculator,
    quiet_stdout,
    read_chat,
    read_documents,
    read_prompt,
    templated,
)

if TYPE_CHECKING:
    from headstart.infer import Speculator, Stats


def quickstart(options: argparse.Namespace) -> int:
    """Run a recipe's whole road and print the measurement; with --drafter all, that of each family.

    The status is 1 where a family failed; what the others measured is printed all the same.
    """
    from headstart.train.recipe import load_recipe

    if options.drafter is not None:
        from headstart.compare import ALL, quickstart_of

        if options.drafter == ALL:
            return _compare(options)
        options.recipe = quickstart_of(options.drafter)
    recipe = load_recipe(options.recipe or "quickstart", options.overrides)
    from headstart.train import pipeline  # after the recipe was read: a typo answers at once

    with quiet_stdout():
        report = pipeline.run(recipe, fresh=options.fresh)
    _print_report(report, options.json, f"headstart quickstart: {recipe.name}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from headstart import compare

    recipes = compare.load_all(options.overrides)
    with quiet_stdout():
        reports = compare.run_all(recipes, options.fresh)
        plot = compare.draw_drafters(reports, next(iter(recipes.values())).folder)
    if options.json:
        from headstart.reports.tables import to_json

        print(to_json({"drafters": reports, "plot": plot and str(plot)}))
    else:
        compare.print_drafters(reports, plot, sys.stdout)
    return 1 if any("error" in report for report in reports.values()) else 0


def train(options: argparse.Namespace) -> int:
    """Train the drafter of a recipe."""
    from headstart.train.recipe import load_recipe

    load_recipe(options.recipe, options.overrides)
    from headstart import train as room

    fresh = ["--fresh"] if options.fresh else []
    with quiet_stdout():
        return room.main([options.recipe, *options.overrides, *fresh]) or 0


def generate(options: argparse.Namespace) -> int:
    """Continue a prompt, streamed to stdout; statistics go to stderr."""
    if options.temperature == 0 and (options.top_p or options.top_k):
        raise UsageError("--top-p and --top-k choose among samples; give --temperature as well")
    messages = read_chat(options) if options.chat else None
    prompt = "" if messages else read_prompt(options)
    speculator = load_speculator(options)
    from transformers import TextStreamer

    tokenizer = speculator.tokenizer
    assert tokenizer is not None  # loaded together with the target
    if messages:
        prompt = templated(tokenizer, messages)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not messages)
    if inputs.input_ids.shape[1] == 0:
        raise UsageError("the prompt has no token in this model's vocabulary; give another")
    inputs = inputs.to(speculator.device)
    sampling = {
        name: getattr(options, name)
        for name in ("temperature", "top_p", "top_k", "seed")
        if options.temperature > 0 and getattr(options, name) is not None
    }
    started = time.perf_counter()
    speculator.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature > 0,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    print(_stats_line(speculator.stats, time.perf_counter() - started), file=sys.stderr)
    return 0


def bench(options: argparse.Namespace) -> int:
    """Measure every tree with every rule on a file of prompts, and print one table."""
    if options.suite is not None:
        return _suite(options)
    for name in ("part", "family", "size", "output", "trained", "corpus", "fresh"):
        if getattr(options, name):
            raise UsageError(f"--{name} belongs to a suite; give --suite gpu with it")
    if options.prompts is None:
        raise UsageError("the following arguments are required: --prompts, or --suite")
    documents = read_documents(options)
    if options.temperature > 0 and "greedy" in (options.rule or ()):
        raise UsageError("--rule greedy with --temperature above 0; use match or coupled to sample")
    first = load_speculator(options)
    trees, rules = options.tree or [first.tree], options.rule or [None]
    from headstart.infer import Speculator
    from headstart.infer.measure.bench import bench as measure

    def speculators() -> Iterator[Speculator]:
        for tree, rule in itertools.product(trees, rules):
            yield Speculator(
                first.model,
                first.drafter,
                tree=tree,
                rule=rule,
                expansion=options.expansion,
                tokenizer=first.tokenizer,
            )

    for _ in speculators():  # a wrong tree or rule shows before the first is measured
        pass
    prompts = [encode(document, first, options.prefix_tokens) for document in documents]
    sampling = {"temperature": options.temperature, "seed": options.seed or 0}
    with quiet_stdout():
        reports = [
            measure(speculator, prompts, new_tokens=options.new_tokens, **sampling)
            for speculator in speculators()
        ]
    if len(reports) == 1:
        _print_report(reports[0], options.json, "headstart bench")
        return 0
    from headstart.reports.tables import print_comparison, to_json

    if options.json:
        print(to_json({"runs": reports}))
    else:
        print_comparison(reports, sys.stdout, "headstart bench")
    return 0


def _suite(options: argparse.Namespace) -> int:
    """Measure the parts of a suite; the status is 1 where an entry could not be measured."""
    from benchmarks.gpu.suite import make_job, run_suite

    given = (
        *("target", "drafter", "tree", "rule", "expansion", "dtype", "prompts", "limit"),
        *("prefix_tokens", "temperature", "seed", "allow_pickle", "max_memory", "offload_folder"),
    )
    for name in given:
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --suite; leave it out")
    job = make_job(
        options.suite,
        options.part,
        options.device,
        options.size,
        options.output,
        options.trained,
        options.family,
        options.corpus,
        options.fresh,
    )
    from benchmarks.gpu.report import print_suite
    from headstart.reports.tables import to_json

    with quiet_stdout():
        report, whole = run_suite(job)
    if options.json:
        print(to_json(report))
    else:
        print_suite(report, sys.stdout)
    return 0 if whole else 1


def plan(options: argparse.Namespace) -> int:
    """Choose a tree for this machine, write it into the artifact, and say what it is worth."""
    from headstart.reports.plans import check_plot, draw_plan, print_plan

    if options.plot is not None:
        check_plot(options.plot)
    documents = read_documents(options)
    from headstart.heads.artifacts.files import artifact_folder, is_artifact

    with quiet_stdout():
        if not is_artifact(options.drafter):
            raise UsageError(
                f"--drafter {options.drafter} is no artifact, and the plan belongs into one; make "
                "one of a checkpoint with headstart convert"
            )
        folder = artifact_folder(options.drafter)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} cannot be written, and the plan belongs there; copy it first")
    options.tree = "plain"  # the drafter is wanted, whatever an earlier plan says
    speculator = load_speculator(options)
    assert speculator.drafter is not None
    from headstart.heads.artifacts.plan import write_plan
    from headstart.infer.measure.planner import make_plan
    from headstart.reports.tables import to_json

    prompts = [encode(document, speculator, options.prefix_tokens) for document in documents]
    with quiet_stdout():
        found = make_plan(
            speculator.model,
            speculator.drafter,
            prompts,
            batch_size=options.batch_size,
            max_nodes=options.max_nodes,
            new_tokens=options.new_tokens,
            measure=options.measure,
            progress=True,
        )
        written = write_plan(folder, found)
        if options.plot is not None:
            draw_plan(found, options.plot)
    if options.json:
        print(to_json(dataclasses.asdict(found)))
        return 0
    print_plan(found, sys.stdout)
    print(f"\nThe plan is in {written}")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Test on the user's models that the text is the target's; the status is 1 where it is not."""
    documents = read_documents(options)
    speculator = load_speculator(options)
    from headstart.infer.measure.lossless_greedy import compare_greedy
    from headstart.infer.measure.lossless_sampled import compare_sampled
    from headstart.reports.tables import to_json
    from headstart.reports.verdict import print_verdict

    device = speculator.device
    prompts = [
        encode(document, speculator, options.prefix_tokens).to(device) for document in documents
    ]
    with quiet_stdout():
        greedy = compare_greedy(speculator, prompts, options.new_tokens, progress=True)
        sampled = compare_sampled(
            speculator,
            prompts,
            options.new_tokens,
            options.draws,
            temperature=options.temperature,
            seed=options.seed,
            progress=True,
        )
    if options.json:
        found = {"greedy": greedy, "sampled": sampled}
        print(to_json({k: {**dataclasses.asdict(v), "holds": v.holds} for k, v in found.items()}))
    else:
        print_verdict(greedy, sampled, sys.stdout)
    return 0 if greedy.holds and sampled.holds else 1


def convert(options: argparse.Namespace) -> int:
    """Make an artifact of somebody else's checkpoint; stdout holds its folder."""
    from headstart.heads.artifacts.conversion import convert as write

    target = load_speculator(argparse.Namespace(target=options.target, drafter=None))
    assert target.tokenizer is not None  # loaded together with the target
    with quiet_stdout():
        folder = write(
            options.checkpoint,
            target.model,
            target.tokenizer,
            options.folder,
            allow_pickle=options.allow_pickle,
        )
    print(folder)
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Show what an artifact is; the status is 1 where it is damaged or does not fit --target."""
    from headstart.reports.describe import describe, fits, print_description
    from headstart.reports.tables import to_json

    with quiet_stdout():
        found = describe(options.artifact)
        if options.target is not None:
            target = load_speculator(argparse.Namespace(target=options.target, drafter=None))
            misfit = fits(found, target.model, target.tokenizer)
            found |= {"fits": misfit is None, "misfit": misfit}
    text = blank(to_json(found))
    if options.json:
        print(text)
    else:
        print_description(json.loads(text), sys.stdout)
    return 0 if found["problem"] is None and found.get("fits", True) else 1


def push(options: argparse.Namespace) -> int:
    """Publish a clean copy of an artifact; stdout holds its address, or the dry run's listing."""
    from headstart.heads.artifacts.publish import clean_copy
    from headstart.heads.artifacts.publish import push as upload

    at = f"@{options.revision}" if options.revision else ""
    repository = options.repository + at
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        files = clean_copy(
            options.artifact, Path(folder), repository, options.target_name, options.license
        )
        if options.dry_run:
            print(f"{repository} would hold\n")
            for path in files:
                print(f"{path.stat().st_size:>14,}  {path.name}")
            print(f"\nREADME.md\n\n{files[-1].read_text(encoding='utf-8')}")
            return 0
        with quiet_stdout():
            address = upload(Path(folder), repository, options.private)
    print(address)
    return 0


def _stats_line(stats: Stats, seconds: float) -> str:
    if not stats.rounds:
        return f"no round was needed, {seconds:.2f} s"
    return (
        f"τ {stats.tau:.2f} tokens per round: {stats.tokens} tokens after the first, "
        f"{stats.rounds} rounds, {seconds:.2f} s with the prompt"
    )


def _print_report(report: Any, as_json: bool, title: str) -> None:
    from headstart.reports.tables import print_next_steps, print_table, to_json

    if as_json:
        print(to_json(report))
        return
    print_table(report, sys.stdout, title)
    print_next_steps(report, sys.stdout)
