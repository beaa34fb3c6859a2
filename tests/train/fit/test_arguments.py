"""What a run is started with: settings that need a library, and what a launcher asks for."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from headstart.heads import OptionError
from headstart.train.fit import arguments
from headstart.train.fit.arguments import load_options, training_arguments
from headstart.train.processes.engine import describe
from headstart.train.recipe import RecipeError, TargetSpec, Train


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed"
)
def test_what_needs_bitsandbytes_says_so(tmp_path: Path) -> None:
    for ask in (
        lambda: training_arguments(Train(optimizer="adamw_8bit"), tmp_path, seed=0),
        lambda: load_options(TargetSpec(dtype="4bit"), torch.device("cpu")),
    ):
        with pytest.raises(OptionError, match="needs bitsandbytes, which is not") as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_a_missing_tracker_is_found_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="names wandb, which is not installed") as caught:
        training_arguments(Train(report_to=["wandb"]), tmp_path, seed=0)
    assert "\n" not in str(caught.value)


def test_the_rows_of_a_step_are_divided_by_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Train(batch_size=2, rows_per_step=12)
    assert training_arguments(spec, tmp_path, seed=0).gradient_accumulation_steps == 6
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RecipeError, match="4 processes"):
        training_arguments(spec, tmp_path, seed=0)


@pytest.mark.parametrize("asked", ["no", "bf16", "fp16"])
def test_products_have_the_dtype_that_is_told_whatever_a_launcher_asks_for(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As accelerate's configuration in a user's home may."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    monkeypatch.setattr(arguments, "multiplies_in_bf16", lambda: False)
    args = training_arguments(Train(), tmp_path, seed=0)
    assert args.mixed_precision == os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
    assert describe(args, {}).endswith("float32")
    told = f"mixed_precision {asked} is not used: products are taken in float32"
    assert (told in caplog.text) == (asked != "no")


def test_what_a_target_is_loaded_with() -> None:
    spec = TargetSpec(dtype="bfloat16", revision="v1", attn_implementation="eager")
    named = {"dtype": "bfloat16", "revision": "v1", "attn_implementation": "eager"}
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert load_options(spec, cpu) == named
    # Straight to the device: nothing passes through the memory of the host.
    assert load_options(spec, gpu, world=8) == named | {"device_map": {"": gpu}}
    spread = TargetSpec(device_map="balanced")
    assert load_options(spread, gpu) == {"dtype": "float32", "device_map": "balanced"}
    with pytest.raises(OptionError, match="device_map is 'balanced' with 2 processes") as caught:
        load_options(spread, gpu, world=2)
    assert "\n" not in str(caught.value)
