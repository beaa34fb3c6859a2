"""Checks that a run is spread as its launcher was asked to, and says how it is.

accelerate starts something else in silence in some cases: one process, several runs that know
nothing of each other, or another engine.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from accelerate import DistributedType
from transformers import TrainingArguments

from headstart.heads import OptionError
from headstart.heads.artifacts.manifest import library_versions
from headstart.heads.core.files import write_atomically

from .agreement import from_all, from_process_0, is_process_0, wait_for_all
from .engine import check_kind, describe, kind_of
from .tensor_parallel import check_together

_TRUE = ("1", "true", "yes", "on", "y", "t")  # as accelerate reads it


def check_engine(
    args: TrainingArguments, environment: Mapping[str, str], together: bool = False
) -> str:
    """What the run is spread over, printed once: `DDP, 2 processes, cpu, float32`.

    `together` says that its processes divide the target's layers, see `tensor_parallel`.

    Raises:
        OptionError: the launcher was asked for something else.
    """
    kind, world = kind_of(args, environment), args.world_size
    if kind == "FSDP1":
        raise OptionError("the launch asks for FSDP 1; set fsdp_version: 2, see fsdp2.yaml.")
    known = args.distributed_state.distributed_type  # type: ignore[union-attr]
    if kind == "FSDP2" and known in (DistributedType.MULTI_CPU, DistributedType.NO):
        check_kind(kind, known)
    if kind.startswith("ZeRO") and environment.get("ACCELERATE_USE_CPU", "").lower() in _TRUE:
        check_kind(kind, DistributedType.MULTI_CPU)
    wanted = {int(environment.get("WORLD_SIZE", 1)), asked_of_launcher()}
    if wanted - {world, None}:
        asked = max(number for number in wanted if number)
        raise OptionError(
            f"the launch asks for {asked} processes, and this run has {world}; without GPUs set "
            "ACCELERATE_USE_CPU=true and leave out --cpu (see recipes/launch/ddp_cpu.yaml), and "
            "with GPUs ask for no more processes than there are."
        )
    if together:
        check_together(kind)
    told = describe(args, environment, together)
    if is_process_0() and world > 1:
        print(f"headstart: distributed: {told}", file=sys.stderr)
    return told


def check_same(recipe: dict[str, Any]) -> None:
    """Raise OptionError where processes were given other settings, or run other versions."""
    own = dict(_leaves(recipe, "")) | {f"version of {k}": v for k, v in library_versions().items()}
    first, *others = from_all(own)
    for number, found in enumerate(others, start=1):
        names = [n for n in {**first, **found} if first.get(n) != found.get(n)]
        if names:
            name = names[0]
            raise OptionError(
                f"process {number} was started with another recipe or environment: {name} is "
                f"{found.get(name)!r}, and {first.get(name)!r} on process 0; all nodes need the "
                "same command and the same versions."
            )


def check_same_target(digest: str) -> None:
    """Raise OptionError where processes have loaded different targets, by their fingerprints."""
    found = from_all(digest)
    if wrong := [rank for rank, other in enumerate(found) if other != found[0]]:
        raise OptionError(
            f"process {wrong[0]} has loaded another target than process 0; the files of "
            "target.model must be the same on all nodes."
        )


def _leaves(settings: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """The settings of a recipe by their paths."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def several_nodes(environment: Mapping[str, str]) -> bool:
    """Whether other machines take part in the run."""
    world = int(environment.get("WORLD_SIZE", 1))
    return int(environment.get("LOCAL_WORLD_SIZE", world)) < world


def check_shared(folder: Path) -> None:
    """Raise OptionError where a process does not see the folder that process 0 writes to."""
    token = from_process_0(secrets.token_hex(8))
    file = folder / f".shared-{token}"
    if is_process_0():
        write_atomically(file, token)
    wait_for_all()
    seen = from_all(file.exists())
    wait_for_all()
    if is_process_0():
        file.unlink()
    if not all(seen):
        raise OptionError(
            f"process {seen.index(False)} does not see {folder.resolve()}, where process 0 writes; "
            "all nodes must share the folder of the recipe's `output`, under one path."
        )


def asked_of_launcher() -> int | None:
    """How many processes `accelerate launch` was asked for, read from the parent's command line.

    None where the parent is something else, or does not say.
    """
    with suppress(OSError, ValueError, yaml.YAMLError, SystemExit):
        line = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
        names = ("accelerate-launch", "accelerate.commands.launch")
        if "launch" not in line and not any(word.endswith(names) for word in line):
            return None
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("num_processes", "config_file"):
            parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
        asked, _ = parser.parse_known_args(line[1:])
        if asked.num_processes is None and asked.config_file is not None:
            file = yaml.safe_load(Path(asked.config_file).read_text(encoding="utf-8"))
            return int(file["num_processes"]) if "num_processes" in file else None
        return int(asked.num_processes) if asked.num_processes else None
    return None
