"""Where a drafter comes from: what a user's name for it stands for, found once and passed on."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import ArtifactError
from ..declared.adapter import ADAPTER_WEIGHTS
from ..families import FAMILIES, KNOWN, PUBLISHED, family, is_language_model
from .files import (
    CONFIG,
    MANIFEST,
    PICKLE,
    TREE,
    WEIGHTS,
    check_settings,
    files_to_download,
    pickled,
    read_header,
    read_json,
    retired_folder,
)
from .hub import download, file_names, is_hub_name, split_revision
from .manifest import Manifest, fingerprint, read_manifest, sha256, tokenizer_hash
from .plan import Plan, find_plans

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafter import Drafter


class SourceKind(StrEnum):
    """What a drafter's name stands for."""

    WEIGHTLESS = "weightless"  # a family without weights, by its own name, such as `lookup`
    IN_TARGET = "in its target's files"  # by the family's own name, `mtp` or `early_exit`
    ARTIFACT = "artifact"  # what headstart saved
    CHECKPOINT = "checkpoint"  # another trainer's drafter, or a language model


class DrafterSource:
    """Where a drafter comes from.

    Each attribute is found when it is first read, and then kept. A repository on the Hub is
    downloaded by one call, and only the files that are needed. Reading an attribute raises
    ArtifactError where there is no such drafter, or the attribute's file is damaged.

    Args:
        name: a folder, `ORG/NAME` or `ORG/NAME@REVISION` on the Hub, or a family that its name
            alone loads: one without weights, `mtp`, or `early_exit`, perhaps with the number of
            layers (`early_exit:8`).
        allow_pickle: whether weights may be read from a pickle where there are no safetensors;
            tensors alone are unpickled.
    """

    def __init__(self, name: str | Path, allow_pickle: bool = False):
        self.name, self.allow_pickle = str(name), allow_pickle

    @classmethod
    def of(cls, drafter: str | Path | DrafterSource, allow_pickle: bool = False) -> DrafterSource:
        """The source of a name; a source is returned as it is, with its own `allow_pickle`."""
        return drafter if isinstance(drafter, DrafterSource) else cls(drafter, allow_pickle)

    def __str__(self) -> str:
        return self.name

    @cached_property
    def folder(self) -> Path:
        """The local folder of the files; those on the Hub are downloaded."""
        if self._local is not None:
            return self._local
        named = self.name.partition(":")[0]
        if named in FAMILIES and family(named).weightless:
            raise ArtifactError(
                f"{self.name!r} drafts without weights, so there are no files of it; give the "
                "folder of a trained drafter, or its name on the Hub."
            )
        if named in FAMILIES:
            raise ArtifactError(
                f"{self.name!r} is a family of drafters, and not a trained one; give the folder of "
                f"one, such as `headstart quickstart --drafter {named}` trains, or its name on the "
                "Hub."
            )
        if self.name in PUBLISHED:
            raise ArtifactError(
                f"{self.name!r} is a family of drafters that are not trained here; give the name "
                "on the Hub, or the folder, of one that was published."
            )
        if Path(self.name).exists() or not is_hub_name(split_revision(self.name)[0]):
            raise ArtifactError(
                f"no drafter at {self.name!r}: neither a folder nor the name of a Hub repository; "
                "check the name."
            )
        folder = download(self.name, files_to_download(self._listed, self.allow_pickle))
        if not folder.is_dir():  # the repository has none of the files
            raise ArtifactError(
                f"{self} holds no {MANIFEST}; expected a repository that headstart pushed."
            )
        return folder

    @cached_property
    def files(self) -> list[str]:
        """The names of all its files; without a network, of those in the local cache."""
        return self._listed or [path.name for path in self.folder.iterdir()]

    @cached_property
    def kind(self) -> SourceKind:
        """What the name stands for."""
        if (alone := self._alone) is not None:
            return SourceKind.WEIGHTLESS if alone[0].weightless else SourceKind.IN_TARGET
        config = self.folder / CONFIG
        if (self.folder / MANIFEST).is_file() or not config.is_file():
            return SourceKind.ARTIFACT  # perhaps a damaged one
        ours = str(read_json(config).get("model_type")).startswith("headstart_")
        return SourceKind.ARTIFACT if ours else SourceKind.CHECKPOINT

    @cached_property
    def manifest(self) -> Manifest:
        """The artifact's manifest; an ArtifactError for any other kind."""
        if self.kind is SourceKind.ARTIFACT:
            self._check_is_artifact()
            return read_manifest(self.folder)
        pickles = pickled(self.files) if self.kind is SourceKind.CHECKPOINT else []
        found = f"{self.kind} with {pickles[0]}, a pickle" if pickles else str(self.kind)
        raise ArtifactError(
            f"{self} is no artifact of headstart (it is {found}); make an artifact of a checkpoint "
            "with headstart convert."
        )

    @property
    def own_target(self) -> str:
        """The target that an artifact was trained for: its folder on this machine, or its Hub name.

        An ArtifactError where it is neither.
        """
        name = self.manifest.target
        target = Path(name)
        # A relative path holds where the training ran, which is above `runs` by default; a run's
        # folder that was moved keeps its parts, and runs that share a target may have moved
        # together.
        run = self.folder.absolute().parent
        together = run.parent / target.parent.name / target.name
        for found in (target, run / target.name, together, run.parent.parent / target):
            if found.is_dir():
                return str(found)
        if is_hub_name(name):
            return name
        raise ArtifactError(
            f"the target of {self}, {name!r}, is not on this machine; pass its folder or its name "
            "on the Hub as --target."
        )

    @cached_property
    def tree(self) -> list[list[int]] | None:
        """The rank paths that an artifact was measured with; None where there are none."""
        known = self.kind is SourceKind.ARTIFACT and (self.folder / TREE).is_file()
        return read_json(self.folder / TREE) if known else None

    def of_target(self, target: PreTrainedModel) -> Drafter:
        """The drafter of a family that its name alone loads; not bound yet.

        Raises:
            OptionError: the target has none.
        """
        assert self._alone is not None, self.kind
        kind, options = self._alone
        return kind.of_target(target, **options)

    @cached_property
    def _alone(self) -> tuple[Any, dict[str, int]] | None:
        """The family that the name alone loads, and what a number after its name sets."""
        name, colon, number = self.name.partition(":")
        if self._local is not None or name not in FAMILIES:
            return None
        kind = family(name)
        if not (kind.weightless or kind.in_target) or (colon and kind.after_name is None):
            return None
        if colon and not (number.isdecimal() and int(number)):
            raise ArtifactError(
                f"{self.name!r} names no drafter: expected {name}, or {name}:N with the number N "
                f"of its {kind.after_name}, such as {name}:4."
            )
        return kind, {str(kind.after_name): int(number)} if colon else {}

    def plans(self, target: PreTrainedModel, compiled: bool = False) -> list[Plan]:
        """An artifact's plans for a target's device and dtype; see `find_plans`."""
        return find_plans(self.folder, target, compiled) if self.kind is SourceKind.ARTIFACT else []

    def check_target(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """An ArtifactError for a target, or a given tokenizer, that it was not trained for."""
        manifest = self.manifest
        pairs = [("target", manifest.target_fingerprint, fingerprint(target))]
        if tokenizer is not None and manifest.tokenizer_hash:
            pairs.append(("tokenizer", manifest.tokenizer_hash, tokenizer_hash(tokenizer)))
        name = manifest.target
        if manifest.target_revision:
            name += f" at revision {manifest.target_revision}"
        for what, expected, found in pairs:
            if expected != found:
                remedy = f"load the {what} it was trained for, or train a drafter for this one"
                if what == "target" and str(target.dtype) == "torch.float16":
                    remedy = "float16 rounds some weights otherwise: load it as bfloat16 or float32"
                raise ArtifactError(
                    f"{self.folder} was trained for another {what}: expected fingerprint "
                    f"{expected[:12]} ({name}), found {found[:12]}; {remedy}."
                )

    def check_files(self) -> Path:
        """An artifact's weights; an ArtifactError for files missing, damaged, pickled or unsafe."""
        self._check_config()
        weights, pickle = self.folder / WEIGHTS, self.folder / PICKLE
        if not weights.is_file():
            if self.allow_pickle and pickle.is_file():
                weights = pickle
            elif pickles := pickled(path.name for path in self.folder.iterdir()):
                raise ArtifactError(
                    f"{self.folder} holds no {WEIGHTS} but {pickles[0]}, a pickle, which can run "
                    f"any code; ask for safetensors, or trust a {PICKLE} with allow_pickle=True."
                )
        adapter = self.folder / ADAPTER_WEIGHTS
        for path, expected, missing in (
            (weights, self.manifest.weights_sha256, None),
            (adapter, self.manifest.adapter_sha256, ""),  # a drafter may have no adapter
        ):
            if (sha256(path) if path.is_file() else missing) != expected:
                raise ArtifactError(
                    f"{path} is missing or not the file that was saved (its sha256 differs from "
                    "the manifest's); restore it or download the drafter again."
                )
            if path.is_file() and path.suffix == ".safetensors":
                read_header(path)
        return weights

    def _check_is_artifact(self) -> None:
        if (self.folder / MANIFEST).is_file():
            return
        for run in (self.folder, self.folder.parent):
            if ((inner := run / "heads") / MANIFEST).is_file():
                where = "the folder of a run" if run == self.folder else "another folder of a run"
                raise ArtifactError(f"{self} is {where}, and its drafter is in {inner}; give that.")
        if not (self.folder / CONFIG).is_file():
            raise ArtifactError(
                f"{self} is not the folder of a drafter: it holds neither {MANIFEST} nor {CONFIG}; "
                "give one that headstart saved, such as runs/NAME/heads."
            )

    def _check_config(self) -> None:
        name, path = self.manifest.family, self.folder / CONFIG
        config = read_json(path)
        found, expected = config.get("model_type"), f"headstart_{name}"
        if name in KNOWN and is_language_model(name):
            from transformers import CONFIG_MAPPING

            expected = found if str(found) in CONFIG_MAPPING else "one of transformers' own"
        if found != expected:
            raise ArtifactError(
                f"{path} is of model type {found!r}, expected {expected!r} as {MANIFEST} says; "
                "restore both files."
            )
        check_settings(self.folder, config)

    @property
    def origin(self) -> str:
        """A folder's name, or `ORG/NAME@COMMIT`."""
        if self._local is not None:
            return self.name
        return f"{split_revision(self.name)[0]}@{self.folder.name}"  # the cache names it so

    @cached_property
    def _local(self) -> Path | None:
        """The folder of this name, or what an interrupted save has left of it."""
        folder = Path(self.name)
        places = (folder, retired_folder(folder)) if folder.name else (folder,)
        return next((place for place in places if place.is_dir()), None)

    @cached_property
    def _listed(self) -> list[str]:
        """The file names of a repository; empty where the Hub does not answer."""
        return [] if self._local is not None else file_names(self.name)
