"""Find out why acceptance is low.

headstart doctor --drafter runs/my-model/heads --prompts prompts.jsonl
headstart doctor --target ORG/MODEL --drafter ORG/NAME --prompts prompts.jsonl --json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headstart.doctor import LEAST_PROMPTS
from headstart.heads.core import counted
from headstart.inputs import drafter_sources, load_speculator, read_documents
from headstart.terminal import UsageError, quiet_stdout

from . import options as shared

_NEW = "generate N tokens after each prompt (default: 64)"
_KWARGS = (
    "settings of the chat template that your prompts are rendered with, as JSON, e.g. "
    "'{\"enable_thinking\": false}' (default: none)"
)
_DRAFTER = f"{shared.ARTIFACT}; or a drafter of another project"
_PROMPTS = f"{shared.PROMPTS}; rows with a category are also reported by category"
_ORIGINAL = "do not load the target of training to compare with, if it is not the one that decodes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", metavar="ARTIFACT", required=True, help=_DRAFTER)
    add("--target", metavar="MODEL", help=shared.TARGET)
    add("--prompts", metavar="FILE", type=Path, required=True, help=_PROMPTS)
    add(
        "--limit",
        metavar="N",
        type=shared.positive,
        default=32,
        help="use only N prompts (default: 32)",
    )
    add("--new-tokens", metavar="N", type=shared.at_least_two, default=64, help=_NEW)
    add(
        "--depth",
        metavar="K",
        type=shared.positive,
        default=4,
        help="depth of the chain that is drafted (default: 4)",
    )
    add("--template-kwargs", metavar="JSON", type=_settings, default={}, help=_KWARGS)
    system = "the system prompt of your chats (default: none)"
    add("--system", metavar="TEXT", type=shared.text, help=system)
    add("--no-original", action="store_true", help=_ORIGINAL)
    shared.add_json_argument(parser)
    shared.add_loading_arguments(parser, decodes=False)


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis; the status is 1 where there is a cause."""
    documents = read_documents(options)
    if (found := len(documents)) < LEAST_PROMPTS:
        raise UsageError(
            f"found {counted(found, 'prompt')} with --limit {options.limit}; standard errors need "
            f"at least {LEAST_PROMPTS}, and are small from about 16"
        )
    from headstart.doctor.diagnosis import diagnose
    from headstart.doctor.pairs import Pair, Rendering
    from headstart.heads import TrainableDrafter, family, load_drafter
    from headstart.heads.artifacts.source import SourceKind
    from headstart.reports.diagnosis import print_diagnosis
    from headstart.reports.tables import to_json

    with quiet_stdout():
        (source,) = drafter_sources(options)
        weightless = source.kind is SourceKind.WEIGHTLESS
        manifest = source.manifest if source.kind is SourceKind.ARTIFACT else None
        untrained = UsageError(f"--drafter {source} has learnt nothing that could be compared")
        if weightless or (manifest and family(manifest.family).weightless):
            raise untrained
        plain = argparse.Namespace(**vars(options) | {"drafter": None})
        speculator = load_speculator(plain)
        tokenizer: Any = speculator.tokenizer
        drafter = load_drafter(source, speculator.model, tokenizer, other_target=True)
        if isinstance(drafter, TrainableDrafter) and not drafter.has_weights:
            raise untrained  # an early exit without layers of its own
        rendering = Rendering(template_kwargs=options.template_kwargs, system=options.system)
        found = diagnose(
            Pair(speculator.model, drafter, tokenizer, rendering),
            documents,
            manifest,
            None if manifest is None or options.no_original else _original(options, source),
            options.new_tokens,
            options.depth,
        )
    if options.json:
        print(to_json(found.to_dict()))
    else:
        print_diagnosis(found, sys.stdout, f"headstart doctor: {source}")
    return 1 if found.causes else 0


def _original(options: argparse.Namespace, source: Any) -> Any:
    """What loads the target that the manifest names, in the type of training."""
    from headstart.heads import ArtifactError

    try:
        name = source.own_target
    except ArtifactError:
        return None
    dtype = (source.manifest.trained.get("target") or {}).get("dtype")
    told = vars(options) | {"target": name, "drafter": None, "dtype": dtype or options.dtype}
    # Code that comes with a model is trusted for the one that --target names alone.
    told["trust_remote_code"] = options.trust_remote_code and name == options.target
    return lambda: load_speculator(argparse.Namespace(**told)).model


def _settings(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a JSON object")
    return found
