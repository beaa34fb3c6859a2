"""The files of an artifact, the folder or Hub repository that holds a trained drafter.

| file | content |
|---|---|
| `config.json` | family and shapes |
| `model.safetensors` | weights |
| `headstart.json` | manifest: where the drafter came from |
| `tree.json` | rank paths of the tree that it was measured with |
| `plan.json` | trees chosen by the planner, one for each kind of machine |
| `README.md` | model card |
| `metrics.jsonl`, `metrics.png` | figures of the training, a JSON object a line, and their plot |
| `acceptance.png` | acceptance by depth |
| `adapter/` | LoRA adapter, where the target was trained too |
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..core import ArtifactError, brief
from ..core.errors import MALFORMED as MALFORMED
from ..core.unsafe_settings import unsafe_settings
from ..declared.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS

CONFIG, WEIGHTS, MANIFEST = "config.json", "model.safetensors", "headstart.json"
TREE, PLAN, CARD = "tree.json", "plan.json", "README.md"
METRICS, PLOT, ACCEPTANCE = "metrics.jsonl", "metrics.png", "acceptance.png"
REPORT = "report.html"
"""Beside the artifact's files, and not one of them: it quotes held-out text, and is not pushed."""

REPORT_LINK = f"[Report of the training]({REPORT}), with pictures and coloured text."
"""The card's line about it, which a pushed card has not."""

COPIED = (METRICS, PLOT, ACCEPTANCE)
"""Figures and images, which are neither checked nor read again."""

FILES = (CONFIG, WEIGHTS, MANIFEST, TREE, PLAN, ADAPTER_CONFIG, ADAPTER_WEIGHTS, *COPIED, CARD)
"""All that an artifact may hold, the card last; nothing else is downloaded or pushed."""

PICKLE = "pytorch_model.bin"
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}

_NAMED = ("medusa_lm_head", "hydra_lm_head")
HEADS = (*(f"{name}.{kind}" for kind in ("safetensors", "pt") for name in _NAMED), WEIGHTS, PICKLE)
"""The files of weights that another trainer's drafter may have; the first that is there is read."""

PARALLEL_FEATURES = "warp_model.bin"
"""Beside a PARD-2 drafter's weights, in its authors' format: the projection of features."""

MASK_EMBEDDING = "mask_embedding.pt"
"""Beside the weights of some block drafters: a trained embedding of the mask token."""

INDEX = f"{WEIGHTS}.index.json"
"""Which file holds which tensor, for a model whose weights are in several files."""

_MOST_BYTES = 2**25
"""Of a JSON file; the index of the largest models' tensors is a third of it."""

_MOST_TENSORS = 2**16
"""Of a file; models of experts have a few thousand in each of theirs."""

MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""What transformers reads of a language model and its tokenizer, beside the weights."""

_SHARDS = "model-*.safetensors"
HERE = '"PATH OF THIS FOLDER"'  # in the example of a card that was not pushed
TARGET_HERE = '"PATH OF THE TARGET"'  # in one whose target has no place on the Hub


def load_call(target: str) -> str:
    """How the line of a card's example begins that loads a target and its drafter.

    >>> load_call("ORG/MODEL")
    'headstart.load("ORG/MODEL",'
    """
    return f"headstart.load({json.dumps(target, ensure_ascii=False)},"


def card_example(target: str, then: str = "") -> str:
    """The part of a card that says how a drafter is installed and loaded, and `then` used."""
    return f"""```bash
pip install .    # in a checkout of headstart, which runs this drafter
```

```python
import headstart

speculator = {load_call(target)} {HERE})
{then}```
"""


def read_json(path: Path) -> Any:
    """A list for the tree, a dict for others; an ArtifactError for a missing or damaged file."""
    if not path.is_file():
        raise ArtifactError(
            f"{path.parent} holds no {path.name}; expected a folder that headstart saved: restore "
            "the file or download the drafter again."
        )
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES // 2**20} MiB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise unreadable(path, error) from error
    if not isinstance(data, list if path.name == TREE else dict):
        raise unreadable(path, f"it holds a {type(data).__name__}")
    return data


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a config as those of models are written, with a line for each key."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_settings(folder: Path, config: Any, allowed: Sequence[str] = ()) -> None:
    """An ArtifactError where a drafter's config, at any depth, can load other code or files.

    An `adapter_config.json` beside it can do so too: peft imports a module that it names.
    """
    unsafe = (key for name, key, _ in unsafe_settings(config) if name not in allowed)
    found = next((f"sets {key}" for key in unsafe), "")
    if (beside := folder / Path(ADAPTER_CONFIG).name).is_file():
        found = f"stands beside {beside.name}"
    if found:
        raise ArtifactError(
            f"{folder / CONFIG} {found}, which can load other code or files; a drafter needs none: "
            "do not use it, or remove that."
        )


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """`shape` and `dtype` of each tensor in a safetensors file; ArtifactError where it is none."""
    try:
        with safe_open(path, "np") as file:  # for shapes alone, and without torch
            if (count := len(file.keys())) > _MOST_TENSORS:
                raise ValueError(f"it has {count:,} tensors, expected at most {_MOST_TENSORS:,}")
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {k: {"shape": s.get_shape(), "dtype": s.get_dtype()} for k, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, reason: object) -> ArtifactError:
    """The error for a damaged file."""
    text = brief(reason)
    return ArtifactError(f"{path} cannot be read ({text}); restore the file or train again.")


def single_weights(names: Sequence[str]) -> list[str]:
    """The one file of weights among a checkpoint's files; none where they are in several files."""
    found = [name for name in HEADS if name in names][:1]
    return [] if INDEX in names and found == [PICKLE] else found


def files_to_download(names: Sequence[str], allow_pickle: bool) -> list[str]:
    """The files to download of all that a repository has; any that may be where none is known."""
    if not names:
        chosen = [*FILES, *HEADS]
    elif MANIFEST in names:
        chosen = [*FILES, PICKLE]
    else:
        weights = single_weights(names) or [_SHARDS]
        patterns = (*MODEL_FILES, *weights, PARALLEL_FEATURES, CARD)
        at_top = [name for name in names if "/" not in name]
        chosen = [name for name in at_top if any(fnmatch(name, each) for each in patterns)]
    return chosen if allow_pickle else [name for name in chosen if not pickled([name])]


def pickled(names: Iterable[str]) -> list[str]:
    """Those of some file names that are a pickle's, sorted."""
    return sorted(name for name in names if Path(name).suffix in _PICKLE_SUFFIXES)


def retired_folder(folder: Path) -> Path:
    """Where the old folder stands while a save replaces it: hidden, beside its own place."""
    return folder.with_name(f".{folder.name}.retired")


def check_is_free(folder: Path) -> None:
    """An ArtifactError where something stands in a folder that is to be written, or none can be."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} is not empty; choose a new or an empty folder.")
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there.is_dir() else "is a file"
        raise ArtifactError(f"{folder} cannot be made: {there} {what}; choose another folder.")
