"""The artifact: a folder (or Hub repository) that holds a trained drafter and where it came from.

`config.json` (family and shapes), `model.safetensors`, `headstart.json` (manifest), `tree.json`
(the rank paths it was measured with), `plan.json` where planned and `README.md` (model card); with
`adapter/` where the target was trained too. Nothing is pickled. The folder appears whole or not at
all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter
from .core import ArtifactError, output_layer
from .drafter import Drafter, family
from .hub import download, file_names, is_hub_name, split_revision

CONFIG, WEIGHTS, MANIFEST = "config.json", "model.safetensors", "headstart.json"
TREE, PLAN, CARD = "tree.json", "plan.json", "README.md"
FILES = (CONFIG, WEIGHTS, MANIFEST, TREE, PLAN, CARD, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""All that an artifact may hold; nothing else is downloaded or pushed."""

LOOKUP = "lookup"
"""The drafter that has no artifact, and is loaded by this name."""

_STUDENTS = "draft_model"  # the family whose config.json is an ordinary model's own

PICKLE = "pytorch_model.bin"
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
# Settings with which a config.json makes transformers run other code or read other files than ours.
_FOREIGN = ("auto_map", "transformers_weights", "quantization_config", "attn_implementation")


@dataclass
class Manifest:
    """Where a drafter came from and what it was measured to do.

    Attributes:
        family: the drafter's family.
        target: name or path of the target, as the training run was given it.
        target_fingerprint: see `fingerprint`.
        tokenizer_hash: sha256 of the target's token map; empty when unknown.
        weights_sha256: of `model.safetensors`, filled in by `save_drafter`.
        adapter_sha256: of the adapter's weights, likewise; empty without adapter. The drafter then
            drafts for the target with that adapter, and the target named here is its base.
        adapter_base: see `Adapter.digest`, likewise.
        recipe: the recipe that trained it, as plain data.
        metrics: measured figures, such as tau.
        versions: library versions of the training run.
    """

    family: str
    target: str
    target_fingerprint: str
    tokenizer_hash: str = ""
    weights_sha256: str = ""
    adapter_sha256: str = ""
    adapter_base: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )


def fingerprint(target: PreTrainedModel) -> str:
    """sha256 of a target's embedding and norm tensors, rounded to bfloat16.

    The rounding makes it the same whether the target is loaded in float64, float32 or bfloat16.
    """
    digest = hashlib.sha256()
    tensors = {"embedding": cast(Tensor, target.get_input_embeddings().weight)}
    for name, module in target.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter):
            tensors[name] = weight
    for name in sorted(tensors):
        values = tensors[name].detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the token map (every token and its id)."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def save_drafter(drafter: Drafter, folder: str | Path, manifest: Manifest, card: str = "") -> Path:
    """Write an artifact folder; an older one in its place goes only when the new is complete.

    Args:
        card: the model card, Markdown.

    Returns:
        The folder.

    Raises:
        ArtifactError: the folder holds something else than an artifact, or the drafter's adapter is
            in no target.
        OSError: it cannot be written; an older artifact is still there.
    """
    folder = Path(folder)
    if drafter.adapter is not None and not drafter.adapter.attached:
        raise ArtifactError(
            f"a {manifest.family} drafter is saved with its adapter, which is not in its target "
            "now, or merged already; save it when it was trained, or copy the artifact's folder."
        )
    if folder.exists() and not _replaceable(folder):
        raise ArtifactError(
            f"{folder} exists and is no artifact of headstart (it has no {MANIFEST}); choose "
            "another folder, or empty this one."
        )
    staging, retired = _beside(folder, "partial"), _beside(folder, "retired")
    try:
        if retired.is_dir():  # an earlier save was killed half way
            _discard(retired, staging) if folder.exists() else retired.rename(folder)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        drafter.save_pretrained(staging)
        manifest = replace(manifest, weights_sha256=sha256(staging / WEIGHTS))
        if drafter.adapter is not None:
            digests = sha256(staging / ADAPTER_WEIGHTS), drafter.adapter.digest()
            manifest = replace(manifest, adapter_sha256=digests[0], adapter_base=digests[1])
        text = json.dumps(asdict(manifest), indent=2) + "\n"
        (staging / MANIFEST).write_text(text, encoding="utf-8")
        if card:
            (staging / CARD).write_text(card, encoding="utf-8")
        for path in (*staging.rglob("*"), staging):
            _sync(path)
        # A folder cannot be swapped in one step everywhere. Between these two renames only the
        # retired one stands, and `artifact_folder` finds it.
        if folder.exists():
            folder.rename(retired)
        staging.rename(folder)
        _sync(folder.parent)
        if retired.is_dir():
            _discard(retired, staging)
    except (OSError, SafetensorError) as error:
        if retired.is_dir() and not folder.exists():
            retired.rename(folder)
        shutil.rmtree(staging, ignore_errors=True)
        reason = " ".join(str(error).split())
        raise OSError(
            f"the drafter cannot be saved in {folder} ({reason}); what stood there is untouched: "
            "make room, or choose a folder that can be written to."
        ) from error
    return folder


def artifact_folder(name: str | Path, allow_pickle: bool = False) -> Path:
    """The local folder of an artifact: a path as it is, or a Hub repository once downloaded.

    Args:
        name: a folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hub.
        allow_pickle: fetch `pytorch_model.bin` as well.

    Raises:
        ArtifactError: neither.
    """
    folder = Path(name)
    for found in (folder, _beside(folder, "retired") if folder.name else folder):
        if found.is_dir():
            return found
    if not is_hub_name(split_revision(str(name))[0]):
        raise ArtifactError(
            f"no drafter at {str(name)!r}: neither a folder nor the name of a Hub repository; "
            "check the name."
        )
    found = download(str(name), [*FILES, PICKLE] if allow_pickle else FILES)
    if not (found / WEIGHTS).is_file() and not allow_pickle:
        _refuse_pickles(str(name), file_names(str(name)))
    if not found.is_dir():
        raise ArtifactError(
            f"{name} holds no {MANIFEST}; expected a repository that headstart pushed."
        )
    return found


def read_manifest(name: str | Path) -> Manifest:
    """The manifest of an artifact.

    Raises:
        ArtifactError: there is none, or it cannot be read.
    """
    path = artifact_folder(name) / MANIFEST
    data = read_json(path)
    try:
        manifest = Manifest(**data)
    except TypeError as error:
        raise ArtifactError(_unreadable(path, error)) from error
    for each in fields(Manifest):
        kind = str if each.type == "str" else dict
        if not isinstance(getattr(manifest, each.name), kind):
            raise ArtifactError(_unreadable(path, f"{each.name} is not a {kind.__name__}"))
    return manifest


def read_tree(name: str | Path) -> list[list[int]] | None:
    """The rank paths that an artifact was measured with; None where it has none."""
    behind = _beyond_lookup(name)
    if behind is None or _model_alone(behind):
        return None
    path = artifact_folder(behind) / TREE
    return read_json(path) if path.is_file() else None


def is_artifact(name: str | Path) -> bool:
    """Whether a drafter's name is an artifact's, not `lookup` or a plain language model's."""
    return _beyond_lookup(name) == name and not _model_alone(name)


def load_drafter(
    name: str | Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    allow_pickle: bool = False,
    **options: Any,
) -> Drafter:
    """Load a drafter and bind it to its target, on the target's device.

    A drafter that was trained with its target (Medusa-2) changes the target that is passed: its
    adapter is merged into the weights, in place, and decoding has the adapted target's output.

    Args:
        name: an artifact's folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hub; or those of any
            smaller causal language model with the target's tokenizer; or `lookup`, which has no
            weights; or `lookup+NAME`, which overrides a drafter while a match is long.
        target: the causal language model that the drafter was trained for.
        tokenizer: checked against the one the drafter was trained with, where given; for a language
            model that headstart did not save, the target's own is loaded where it is not given.
        allow_pickle: read `pytorch_model.bin` where there is no `model.safetensors`; tensors alone
            are unpickled.
        options: passed to `from_pretrained`, such as `dtype`; the default is the target's.

    Raises:
        ArtifactError: damaged files, or not the target or tokenizer that it was trained for.
    """
    device = output_layer(target).weight.device
    if (behind := _beyond_lookup(name)) is None:
        cls = family(LOOKUP)
        return cls(cls.config_class.for_target(target)).eval().bind(target)  # type: ignore[arg-type]
    if behind != name:
        from .lookup import WithLookup  # a drafter may read an artifact

        drafter = load_drafter(behind, target, tokenizer, allow_pickle=allow_pickle, **options)
        return WithLookup(drafter).eval().bind(target)
    options = {"dtype": target.dtype, **options}
    if _model_alone(name):
        return _load_model(str(name), target, tokenizer, options).to(device).eval().bind(target)  # type: ignore[arg-type]
    folder = artifact_folder(name, allow_pickle)
    manifest = read_manifest(folder)
    check_target(manifest, target, tokenizer, folder)
    weights = check_files(folder, manifest, allow_pickle)
    cls = family(manifest.family)
    try:
        loaded: Any = cls.from_pretrained(
            folder,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=weights.name == WEIGHTS,
            weights_only=True,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except UnpicklingError as error:
        raise ArtifactError(
            f"{weights} holds more than tensors, or is damaged, and is not read; ask for "
            "safetensors."
        ) from error
    except (RuntimeError, ValueError, StrictDataclassError) as error:
        # The weights are those that were saved, so it is the config that does not fit them.
        reason = " ".join(str(error).split())[:160]
        raise ArtifactError(
            f"{weights} cannot be read as {folder / CONFIG} describes it ({reason}); restore both "
            "files or train again."
        ) from error
    drafter, report = loaded
    if wrong := [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]:
        raise ArtifactError(
            f"{weights} does not fit {folder / CONFIG}: {wrong[0]} is missing, unknown or "
            "of another shape; restore both files."
        )
    drafter = drafter.to(device).eval().bind(target)  # type: ignore[arg-type]
    if drafter.adapter is not None:
        _adapt(drafter.adapter, target, manifest, folder)
    return drafter


def _adapt(adapter: Adapter, target: PreTrainedModel, manifest: Manifest, folder: Path) -> None:
    """Merge an artifact's adapter into the target, or leave the target as it was.

    Raises:
        ArtifactError: the target is adapted already, or the adapter is not the one for it.
    """
    adapter.attach(target)
    try:
        found, expected = adapter.digest(), manifest.adapter_base
        if found and expected and found != expected:
            raise ArtifactError(
                f"{folder} adapts {manifest.target}, and this target's layers have fingerprint "
                f"{found[:12]}, expected {expected[:12]}: it was adapted or trained further; load "
                "the target anew."
            )
        adapter.load(folder)
    except ArtifactError:
        adapter.detach()
        raise
    adapter.merge()


def _beyond_lookup(name: str | Path) -> str | Path | None:
    """The drafter behind `lookup+`; None for `lookup` itself, any other name as it is."""
    first, plus, behind = str(name).partition("+")
    if first != LOOKUP or Path(name).exists():
        return name
    return behind if plus else None


def _model_alone(name: str | Path) -> bool:
    """Whether a name is that of a language model without our manifest."""
    folder = Path(name)
    if not folder.is_dir():
        repository, _ = split_revision(str(name))
        if folder.exists() or not is_hub_name(repository) or _beside(folder, "retired").is_dir():
            return False
        folder = download(str(name), [CONFIG, MANIFEST])
    if (folder / MANIFEST).is_file() or not (folder / CONFIG).is_file():
        return False
    kind = str(read_json(folder / CONFIG).get("model_type", "headstart_"))
    return not kind.startswith("headstart_")


def _load_model(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> Drafter:
    """A causal language model that somebody else saved, as the draft model of a target."""
    repository, revision = (name, None) if Path(name).is_dir() else split_revision(name)
    place = {} if revision is None else {"revision": revision}
    try:
        own = AutoTokenizer.from_pretrained(repository, **place)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{name} holds no tokenizer that can be loaded, so nobody knows whether its ids are "
            "the target's; save the tokenizer beside the model."
        ) from error
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(target.name_or_path)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{name} is compared with the target by their tokenizers, and the target's was "
                "not found; pass tokenizer=…."
            ) from error
    assert own is not None and tokenizer is not None
    if tokenizer_hash(own) != tokenizer_hash(tokenizer):
        raise ArtifactError(
            f"{name} has another tokenizer than the target ({len(own)} tokens, expected those of "
            f"the target's {len(tokenizer)}); use a smaller model of the target's own family."
        )
    try:
        return family(_STUDENTS).from_pretrained(
            repository, use_safetensors=True, **place, **options
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ArtifactError(
            f"{name} cannot be loaded as a causal language model ({reason}); expected one with "
            "weights in safetensors."
        ) from error


def check_target(
    manifest: Manifest,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
) -> None:
    """Refuse a target, or a tokenizer where one is given, that the drafter was not trained for.

    Raises:
        ArtifactError: its fingerprint is another.
    """
    pairs = [("target", manifest.target_fingerprint, fingerprint(target))]
    if tokenizer is not None and manifest.tokenizer_hash:
        pairs.append(("tokenizer", manifest.tokenizer_hash, tokenizer_hash(tokenizer)))
    for what, expected, found in pairs:
        if expected != found:
            raise ArtifactError(
                f"{folder} was trained for another {what}: expected fingerprint {expected[:12]} "
                f"({manifest.target}), found {found[:12]}; load the {what} it was trained for, or "
                "train a drafter for this one."
            )


def check_files(folder: Path, manifest: Manifest, allow_pickle: bool = False) -> Path:
    """Check that an artifact's files are whole and ask for no foreign code.

    Returns:
        The file of weights.

    Raises:
        ArtifactError: a file is missing, damaged, pickled, or names code or files to load.
    """
    config = read_json(folder / CONFIG)
    found, wanted = config.get("model_type"), f"headstart_{manifest.family}"
    if manifest.family == _STUDENTS:
        wanted = found if found in CONFIG_MAPPING else "one of transformers' own"
    if found != wanted:
        raise ArtifactError(
            f"{folder / CONFIG} is of model type {found!r}, expected {wanted!r} as {MANIFEST} "
            "says; restore both files."
        )
    if foreign := [key for key in _FOREIGN if key in config]:
        raise ArtifactError(
            f"{folder / CONFIG} sets {foreign[0]}, which can load other code or files; a drafter "
            "needs none: do not use it, or remove the entry."
        )
    weights = folder / WEIGHTS
    if not weights.is_file():
        if allow_pickle and (folder / PICKLE).is_file():
            weights = folder / PICKLE
        else:
            _refuse_pickles(str(folder), sorted(path.name for path in folder.iterdir()))
    if not weights.is_file() or sha256(weights) != manifest.weights_sha256:
        raise ArtifactError(
            f"{weights} is missing or not the file that was saved (its sha256 differs from the "
            "manifest's); restore it or download the drafter again."
        )
    adapter = folder / ADAPTER_WEIGHTS
    whole = sha256(adapter) if adapter.is_file() else ""
    if whole != manifest.adapter_sha256:
        raise ArtifactError(
            f"{adapter} is missing or not the adapter that was saved (its sha256 differs from the "
            "manifest's); restore it or download the drafter again."
        )
    return weights


def sha256(path: Path) -> str:
    """The sha256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, text: str) -> None:
    """Write a file of a finished artifact: a reader sees the old text or all of the new.

    Raises:
        OSError: it cannot be written; the old text is still there.
    """
    staging = path.with_name(f".{path.name}.partial")
    try:
        staging.write_text(text, encoding="utf-8")
        _sync(staging)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    _sync(path.parent)


def read_json(path: Path) -> Any:
    """A JSON file of an artifact: a dict, but a list for the tree.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    if not path.is_file():
        raise ArtifactError(
            f"{path.parent} holds no {path.name}; expected a folder that headstart saved: restore "
            "the file or download the drafter again."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(_unreadable(path, error)) from error
    if not isinstance(data, list if path.name == TREE else dict):
        raise ArtifactError(_unreadable(path, f"it holds a {type(data).__name__}"))
    return data


def _unreadable(path: Path, why: object) -> str:
    reason = " ".join(str(why).split())
    return f"{path} cannot be read ({reason}); restore the file or train again."


def _refuse_pickles(where: str, names: list[str]) -> None:
    if pickles := [name for name in names if Path(name).suffix in _PICKLED]:
        raise ArtifactError(
            f"{where} holds no {WEIGHTS} but {pickles[0]}, a pickle, which can run any code; ask "
            f"for safetensors, or trust a {PICKLE} with load_drafter(…, allow_pickle=True)."
        )


def _beside(folder: Path, state: str) -> Path:
    return folder.with_name(f".{folder.name}.{state}")


def _replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir()))


def _discard(retired: Path, staging: Path) -> None:
    """Delete a retired folder under a name that is never read: it may be half gone for a while."""
    shutil.rmtree(staging, ignore_errors=True)
    retired.rename(staging)
    shutil.rmtree(staging)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
