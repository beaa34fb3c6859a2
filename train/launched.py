"""Checks that a run is spread as its launcher was asked to, and says how it is.

accelerate starts something else in silence in some cases: one process, several runs that know
nothing of each other, or another engine.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml
from transformers import TrainingArguments

from headstart.heads import OptionError
from headstart.heads.core.files import write_atomically

from .engine import kind_of
from .processes import from_all, from_process_0, is_process_0, wait_for_all


def check_engine(args: TrainingArguments, environment: Mapping[str, str]) -> str:
    """What the run is spread over, printed once: `DDP, 2 processes, cpu, float32`.

    Raises:
        OptionError: the launcher was asked for something else.
    """
    kind, world = kind_of(args), args.world_size
    for name, engine in (("ACCELERATE_USE_DEEPSPEED", "ZeRO"), ("ACCELERATE_USE_FSDP", "FSDP2")):
        if environment.get(name, "false").lower() == "true" and not kind.startswith(engine):
            raise OptionError(
                f"the launch asks for {engine}, and the run has {kind}; on a CPU accelerate has no "
                "FSDP: take recipes/launch/ddp_cpu.yaml there, or GPUs."
            )
    wanted = {int(environment.get("WORLD_SIZE", 1)), asked_of_launcher()}
    if wanted - {world, None}:
        asked = max(number for number in wanted if number)
        raise OptionError(
            f"the launch asks for {asked} processes, and this run has {world}; without GPUs set "
            "ACCELERATE_USE_CPU=true and leave out --cpu (see recipes/launch/ddp_cpu.yaml), and "
            "with GPUs ask for no more processes than there are."
        )
    dtype = "bfloat16 products" if args.bf16 or _autocasts(args) else "float32"
    parts = [kind, *([f"{world} processes"] if world > 1 else []), args.device.type, dtype]
    told = ", ".join(parts)
    if is_process_0() and world > 1:
        print(f"headstart: distributed: {told}", file=sys.stderr)
    return told


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
        if "launch" not in line and not any(word.endswith("accelerate-launch") for word in line):
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


def _autocasts(args: TrainingArguments) -> bool:
    plugin = args.deepspeed_plugin
    return plugin is not None and "torch_autocast" in plugin.deepspeed_config
