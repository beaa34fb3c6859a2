"""What each command does with its options. Each returns an exit status.

Heavy imports stand inside the functions, so that parsing and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from headstart.infer import Speculator, Stats


class UsageError(ValueError):
    """The command line cannot be used as it was given."""


def one_line(error: BaseException) -> str:
    """An error's message on one line, with access tokens and passwords in addresses blanked.

    >>> one_line(OSError("no such model\\n  at https://me:pw@host/x with hf_abcdefghijkl"))
    'no such model at https://…@host/x with hf_…'
    """
    return _blank(" ".join(str(error).split()) or type(error).__name__)


def _blank(text: str) -> str:
    text = re.sub(r"hf_[A-Za-z0-9]{8,}", "hf_…", text)
    return re.sub(r"://[^/@\s]+@", "://…@", text)


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

    with _quiet_stdout():
        report = pipeline.run(recipe, fresh=options.fresh)
    _print_report(report, options.json, f"headstart quickstart: {recipe.name}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from headstart import compare

    recipes = compare.load_all(options.overrides)
    with _quiet_stdout():
        reports = compare.run_all(recipes, options.fresh)
        plot = compare.draw_drafters(reports, next(iter(recipes.values())).folder)
    if options.json:
        from headstart.report import to_json

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
    with _quiet_stdout():
        return room.main([options.recipe, *options.overrides, *fresh]) or 0


def generate(options: argparse.Namespace) -> int:
    """Continue a prompt, streamed to stdout; statistics go to stderr."""
    if options.temperature == 0 and (options.top_p or options.top_k):
        raise UsageError("--top-p and --top-k choose among samples; give --temperature as well")
    messages = _read_chat(options) if options.chat else None
    prompt = "" if messages else _read_prompt(options)
    speculator = _load(options)
    from transformers import TextStreamer

    tokenizer = speculator.tokenizer
    assert tokenizer is not None  # loaded together with the target
    if messages:
        prompt = _templated(tokenizer, messages)
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
    documents = _documents(options)
    if options.temperature > 0 and "greedy" in (options.rule or ()):
        raise UsageError("--rule greedy with --temperature above 0; use match or coupled to sample")
    first = _load(options)
    trees, rules = options.tree or [first.tree], options.rule or [None]
    from headstart.infer import Speculator
    from headstart.infer.bench import bench as measure

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
    prompts = [_encode(document, first, options.prefix_tokens) for document in documents]
    sampling = {"temperature": options.temperature, "seed": options.seed or 0}
    with _quiet_stdout():
        reports = [
            measure(speculator, prompts, new_tokens=options.new_tokens, **sampling)
            for speculator in speculators()
        ]
    if len(reports) == 1:
        _print_report(reports[0], options.json, "headstart bench")
        return 0
    from headstart.report import print_comparison, to_json

    if options.json:
        print(to_json({"runs": reports}))
    else:
        print_comparison(reports, sys.stdout, "headstart bench")
    return 0


def _suite(options: argparse.Namespace) -> int:
    """Measure the parts of a suite; the status is 1 where an entry could not be measured."""
    from headstart.suite import make_job, run_suite

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
    from headstart.report import to_json
    from headstart.suite_report import print_suite

    with _quiet_stdout():
        report, whole = run_suite(job)
    if options.json:
        print(to_json(report))
    else:
        print_suite(report, sys.stdout)
    return 0 if whole else 1


def plan(options: argparse.Namespace) -> int:
    """Choose a tree for this machine, write it into the artifact, and say what it is worth."""
    from headstart.plans import check_plot, draw_plan, print_plan

    if options.plot is not None:
        check_plot(options.plot)
    documents = _documents(options)
    from headstart.heads.artifact import artifact_folder, is_artifact

    with _quiet_stdout():
        if not is_artifact(options.drafter):
            raise UsageError(
                f"--drafter {options.drafter} is no artifact, and the plan belongs into one; make "
                "one of a checkpoint with headstart convert"
            )
        folder = artifact_folder(options.drafter)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} cannot be written, and the plan belongs there; copy it first")
    options.tree = "plain"  # the drafter is wanted, whatever an earlier plan says
    speculator = _load(options)
    assert speculator.drafter is not None
    from headstart.infer.plan import write_plan
    from headstart.infer.planner import make_plan
    from headstart.report import to_json

    prompts = [_encode(document, speculator, options.prefix_tokens) for document in documents]
    with _quiet_stdout():
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
    documents = _documents(options)
    speculator = _load(options)
    from headstart.infer.lossless import compare_greedy, compare_sampled
    from headstart.report import to_json
    from headstart.verdict import print_verdict

    device = speculator.device
    prompts = [
        _encode(document, speculator, options.prefix_tokens).to(device) for document in documents
    ]
    with _quiet_stdout():
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
    from headstart.heads.conversion import convert as write

    target = _load(argparse.Namespace(target=options.target, drafter=None))
    assert target.tokenizer is not None  # loaded together with the target
    with _quiet_stdout():
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
    from headstart.describe import describe, fits, print_description
    from headstart.report import to_json

    with _quiet_stdout():
        found = describe(options.artifact)
        if options.target is not None:
            target = _load(argparse.Namespace(target=options.target, drafter=None))
            misfit = fits(found, target.model, target.tokenizer)
            found |= {"fits": misfit is None, "misfit": misfit}
    text = _blank(to_json(found))
    if options.json:
        print(text)
    else:
        print_description(json.loads(text), sys.stdout)
    return 0 if found["problem"] is None and found.get("fits", True) else 1


def push(options: argparse.Namespace) -> int:
    """Publish a clean copy of an artifact; stdout holds its address, or the dry run's listing."""
    from headstart.heads.publish import clean_copy
    from headstart.heads.publish import push as upload

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
        with _quiet_stdout():
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


def _load(options: argparse.Namespace) -> Speculator:
    """The Speculator for --target, --drafter, --tree, --rule, --dtype and where it is placed.

    Without --tree it takes the one that the artifact was measured with. Where trees or rules are
    lists, they are left to the caller.
    """
    given = {
        name: getattr(options, name)
        for name in ("tree", "rule", "expansion", "dtype")
        if isinstance(getattr(options, name, None), str)
    }
    if getattr(options, "allow_pickle", False):
        given["allow_pickle"] = True
    if isinstance(getattr(options, "tree", None), list):
        given["tree"] = "plain"  # the drafter is wanted, whatever its plan says
    with _quiet_stdout():
        drafters = _drafters(options)
        if not drafters and options.target is None:
            raise UsageError("neither --target nor --drafter given; name at least one")
        import headstart

        given |= _placing(options)
        try:
            return headstart.load(options.target, drafters, **given)
        except OSError as error:  # transformers' message may not even name the model
            raise UsageError(
                f"--target {options.target} cannot be loaded; expected a folder or the name of a "
                f"model that can be downloaded ({one_line(error)[:200]})"
            ) from error


def _drafters(options: argparse.Namespace) -> list[str]:
    """What --drafter names, artifacts by their folders; fills in --target where one knows it."""
    from headstart.heads.artifact import artifact_folder, is_artifact

    named = options.drafter or []
    named = [named] if isinstance(named, str) else named
    found = [str(artifact_folder(name)) if is_artifact(name) else name for name in named]
    for name, folder in zip(named, found, strict=True):
        if options.target is None and is_artifact(name):
            options.target = own_target(folder, name)
    if named and options.target is None:
        raise UsageError(
            f"--drafter {' --drafter '.join(named)} belongs to no target; name one with --target"
        )
    return found


def _placing(options: argparse.Namespace) -> dict[str, Any]:
    """What --device, --max-memory and --offload-folder are to `from_pretrained`."""
    name, memory = getattr(options, "device", None), getattr(options, "max_memory", None)
    folder = getattr(options, "offload_folder", None)
    if memory is None:
        if folder is not None:
            raise UsageError("--offload-folder without --max-memory, and nothing is offloaded")
        device = find_device(name)
        return {} if device.type == "cpu" else {"device_map": {"": device}}
    if name is not None:
        raise UsageError("--max-memory names the devices itself; leave --device out")
    import torch

    gpus = torch.cuda.device_count()
    if missing := [device for device in memory if device not in ("cpu", *range(gpus))]:
        raise UsageError(
            f"--max-memory names GPU {missing[0]}, and torch {torch.__version__} finds {gpus} GPUs "
            "here; name those that are, or cpu alone"
        )
    return {"device_map": "auto", "max_memory": memory, "offload_folder": folder}


def find_device(name: str | None) -> torch.device:
    """The device of --device; a GPU where there is one, when it was not given.

    Raises:
        UsageError: no such device, or none here.
    """
    import torch

    gpus = torch.cuda.device_count()
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device is {name!r}; expected cpu, cuda, cuda:1, …") from error
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UsageError(
            f"--device {name}, and torch {torch.__version__} finds {gpus} GPUs here; use --device "
            "cpu, or another GPU"
        )
    return device


def own_target(folder: str, drafter: str) -> str:
    """The target that an artifact was trained for: its folder on this machine, or its Hub name."""
    from headstart.heads.artifact import read_manifest
    from headstart.heads.hub import is_hub_name

    name = read_manifest(folder).target
    target = Path(name)
    # A relative path holds where the training ran; a run's folder that was moved keeps its parts,
    # and runs that share a target may have moved together.
    run = Path(folder).parent
    for found in (target, run / target.name, run.parent / target.parent.name / target.name):
        if found.is_dir():
            return str(found)
    if is_hub_name(name):
        return name
    raise UsageError(f"the target of {drafter} is not on this machine; pass --target {target}")


def _read_prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        source, text = "--prompt", options.prompt
    elif options.file is not None:
        source, text = str(options.file), _read_text(options.file)
    elif sys.stdin.isatty():
        raise UsageError("no prompt; give --prompt or --file, or pipe the text in")
    else:
        source = "stdin"
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError:
            text = "\udcff"  # reported below
    if not text.strip():
        raise UsageError(f"{source}: the prompt is empty; give at least one word")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{source}: not valid UTF-8 text; convert it first")
    return text


def _read_chat(options: argparse.Namespace) -> list[dict[str, str]]:
    """The conversation in a .jsonl file, or any other prompt as a user's message."""
    if options.file is None or options.file.suffix != ".jsonl":
        return [{"role": "user", "content": _read_prompt(options).strip()}]
    from headstart.train.corpus import read_documents

    documents = read_documents(options.file)
    if len(documents) != 1:
        raise UsageError(f"{options.file}: found {len(documents)} conversations, expected one")
    return documents[0].messages or [{"role": "user", "content": documents[0].text}]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not valid UTF-8 text; convert it first") from None


def _documents(options: argparse.Namespace) -> list[Any]:
    """The prompts that --prompts and --limit name."""
    from headstart.train.corpus import read_documents

    documents = read_documents(options.prompts)[: options.limit]
    if not documents:
        raise UsageError(f"{options.prompts}: no prompts found")
    return documents


def _encode(document: Any, speculator: Speculator, limit: int | None) -> Any:
    """Token ids [1, T] of a prompt; a chat goes through the tokenizer's template, if it has one."""
    tokenizer = speculator.tokenizer
    assert tokenizer is not None  # loaded together with the target
    text, templated = document.text, bool(document.messages and tokenizer.chat_template)
    if templated:
        text = _templated(tokenizer, document.messages)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not templated).input_ids
    if ids.shape[1] == 0:
        raise UsageError(f"{document.id}: the prompt has no token in this model's vocabulary")
    return ids[:, :limit]


def _templated(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """A conversation as the text that the model was trained on, ready for the answer."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UsageError("the target's tokenizer has no chat template; leave out --chat")
    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(
            f"the target's chat template refuses the roles {roles[:80]} ({one_line(error)[:120]})"
        ) from error


def _print_report(report: Any, as_json: bool, title: str) -> None:
    from headstart.report import print_next_steps, print_table, to_json

    if as_json:
        print(to_json(report))
        return
    print_table(report, sys.stdout, title)
    print_next_steps(report, sys.stdout)


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send what libraries print to stderr: stdout holds the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
