"""What somebody else's drafter is, from its files alone: as a document and as a table of `inspect`.

It has no manifest, so the document says what can be told: the format, the family, what is special
about it, its tensors, and what it needs of a target.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TextIO

from rich.filesize import decimal

from headstart.heads.artifacts.files import CONFIG, read_header, read_json
from headstart.heads.artifacts.foreign_checkpoints import check_model
from headstart.heads.artifacts.foreign_files import INSIDE, format_of, recognise
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core import FINAL, ArtifactError, HeadstartError
from headstart.heads.pard import PARALLEL

from .tables import grid, print_apart, titled

_OF_TARGET = (
    *("hidden_size", "vocab_size", "feature_layers", "layer"),
    *("head_dims", "rope_parameters"),  # of Gemma 4's assistants
)
_UNNAMED = {"eagle3": "2, L/2 and L - 3", "dflash": "2 … L - 2, evenly spread"}
"""Which layers a drafter reads whose config names none; a block drafter of one layer, L/2 + 1."""

_NAMED = ("base_model_name_or_path", "target_model_name_or_path")


def describe_foreign(source: DrafterSource) -> dict[str, Any]:
    """A document of a checkpoint that headstart did not save; no target is loaded.

    `problem` is the error that loading would give with any target, `needs` what the target must be.
    """
    config = read_json(source.folder / CONFIG)
    found: dict[str, Any] = {
        "artifact": source.name, "folder": str(source.folder), "problem": None, "format": None,
        "family": None, "target": _target(config),
    }  # fmt: skip
    try:
        files, known = recognise(source, config)
        if known is None:
            check_model(source, config, files)
            found |= _language_model(config)
        else:
            kind, fields, tensors = known
            config_class: Any = kind.config_class
            stored = _stored(files) or {n: _tensor(t) for n, t in tensors.items()}
            found |= {
                "format": format_of(config, stored),
                "family": config_class.family_name(),
                "options": {n: v for n, v in fields.items() if n not in _OF_TARGET},
                "layer": fields.get("layer"),
                "feature_layers": list(fields.get("feature_layers", config_class.feature_layers)),
                "tensors": dict(sorted(stored.items())),
                "parameters": sum(t.numel() for t in tensors.values() if t.is_floating_point()),
                "needs": _needs(fields, config_class.family_name()),
            }  # fmt: skip
    except ArtifactError as error:
        found["problem"] = str(error)
    paths = sorted(path for path in source.folder.iterdir() if path.is_file())
    sizes = [{"name": path.name, "bytes": path.stat().st_size} for path in paths]
    return found | {"files": sizes}


def _stored(files: list[Path]) -> dict[str, Any]:
    """Shapes and dtypes by the file's own names; of a whole model, its heads'; none of a pickle."""
    if any(file.suffix != ".safetensors" for file in files):
        return {}
    stored = {name: each for file in files for name, each in read_header(file).items()}
    heads = {name: each for name, each in stored.items() if name.startswith(INSIDE)}
    chosen = heads or stored
    return {n: {"shape": t["shape"], "dtype": t["dtype"]} for n, t in chosen.items()}


def _target(config: dict[str, Any]) -> str | None:
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    names = (*(config.get(name) for name in _NAMED), verifier.get("name_or_path"))
    return next((name for name in names if isinstance(name, str) and name), None)


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    parallel = PARALLEL in config
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
    drafts = (PARALLEL, "para_num", "pard2_target_layers")
    return {
        "format": "a language model of transformers",
        "family": "pard" if parallel else "draft_model",
        "options": {n: config[n] for n in ("model_type", *sizes, *drafts) if n in config},
        "needs": ["a target with the same tokenizer"] if parallel else [],
    }  # fmt: skip


def _tensor(tensor: Any) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype}


def _needs(fields: dict[str, Any], family: str) -> list[str]:
    """What a target must be, and have, for this drafter: a line each."""
    sizes = [
        f"{what} {fields[name]:,}"
        for name, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"))
        if name in fields
    ]
    needs = [f"a target of {' and '.join(sizes)}"] if sizes else []
    if layers := fields.get("feature_layers"):
        outputs = ", ".join(str(layer - 1) for layer in layers)
        inputs = ", ".join(map(str, layers))
        needs.append(f"the inputs of its layers {inputs} (the outputs of {outputs})")
    elif unnamed := _UNNAMED.get(family):
        needs.append(f"the inputs of its layers {unnamed}, of L: the config names none")
    for kind in sorted(sizes := fields.get("head_dims", {})):
        needs.append(f"a Gemma 4 with keys and values of size {sizes[kind]} in its {kind}")
    if fields.get("embedding") == "own":
        needs.append("nothing of its embeddings, unless those in the file are the same")
    return needs


def print_foreign(found: dict[str, Any], out: TextIO) -> None:
    """Print the table to `out`: colours on a terminal, plain text anywhere else."""
    width = min(shutil.get_terminal_size().columns, 100)
    console = titled(out, f"headstart inspect: {found['artifact']}", width)
    options = "  ".join(f"{k} {v}" for k, v in found.get("options", {}).items())
    layers = ["final" if each == FINAL else str(each) for each in found.get("feature_layers", [])]
    rows = [
        ("format", found["format"]), ("family", found["family"]), ("target", found["target"]),
        ("options", options), ("feature layers", ", ".join(layers)),
        *(("needs", need) for need in found.get("needs", [])),
        ("fits --target", "" if "fits" not in found else "yes" if found["fits"] else "NO"),
    ]  # fmt: skip
    layer = found.get("layer") or {}
    shapes = [(f"  {name}", f"{each['shape']} {each['dtype']}")
              for name, each in found.get("tensors", {}).items()]  # fmt: skip
    counted = [("parameters", f"{found['parameters']:,}")] if "parameters" in found else []
    files = [(file["name"], f"{decimal(file['bytes']):>9}") for file in found["files"]]
    inner = [(f"layer: {name}", str(value)) for name, value in layer.items() if value is not None]
    print_apart(console, *map(grid, (rows, inner, counted + shapes, files)))
    print_apart(console, *filter(None, (found["problem"], found.get("misfit"))), style="bold red")


def fits_foreign(source: DrafterSource, target: Any, tokenizer: Any) -> str | None:
    """None where it loads for this target, else why it does not."""
    from headstart.heads import load_drafter

    try:
        load_drafter(source, target, tokenizer)
    except HeadstartError as error:
        return " ".join(str(error).split())
    return None
