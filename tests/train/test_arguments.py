"""Settings that need a library which is not installed."""

import importlib.util
from pathlib import Path

import pytest
import torch

from headstart.heads import OptionError
from headstart.train.arguments import load_options, training_arguments
from headstart.train.recipe import TargetSpec, Train


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
