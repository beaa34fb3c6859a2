"""DeepSpeed's settings, from a launch file and from a configuration of the user's own."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from headstart import train
from headstart.heads import OptionError
from headstart.train import pipeline
from headstart.train.processes.engine import deepspeed_settings


def own(folder: Path, **settings: Any) -> dict[str, Any] | None:
    file = folder / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}} | settings))
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)
    }  # fmt: skip
    return deepspeed_settings(environment, bf16=False)


def test_what_a_configuration_leaves_out_is_the_recipes(tmp_path: Path) -> None:
    found = own(tmp_path, gradient_clipping=0.5)
    shipped = deepspeed_settings({"ACCELERATE_USE_DEEPSPEED": "true"}, bf16=False)
    assert found is not None and shipped is not None
    assert found["gradient_clipping"] == 0.5
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        assert found[name] == "auto"
    assert found.keys() == shipped.keys()
    assert found["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_configuration_replaces_neither_optimizer_nor_schedule(
    tmp_path: Path, section: str
) -> None:
    """transformers' examples have both; their schedule left the rate at 0."""
    with pytest.raises(OptionError, match=f"has the section {section}, which would replace"):
        own(tmp_path, **{section: {"type": "WarmupLR", "params": {}}})


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_configuration_casts_no_weights(tmp_path: Path, kind: str) -> None:
    found = own(tmp_path, **{kind: {"enabled": "auto"}})
    assert found is not None and found[kind]["enabled"] is False
    with pytest.raises(OptionError, match=f"sets {kind}.enabled, which casts"):
        own(tmp_path, **{kind: {"enabled": True}})


def test_what_torch_deprecates_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """DeepSpeed's calls of it, which a user cannot change, in every step."""

    def run(*given: Any) -> Path:
        for module in ("torch.distributed.c10d_logger", "ours"):
            warnings.warn_explicit(f"of {module}", FutureWarning, "file.py", 1, module=module)
        return Path("heads")

    monkeypatch.setattr(pipeline, "train", run)
    assert train.main(["quickstart"]) == 0
    shown = [str(each.message) for each in recwarn if each.category is FutureWarning]
    assert shown == ["of ours"]
