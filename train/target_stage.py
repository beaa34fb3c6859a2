"""The target that a run's stage `target` has made or named, loaded once on each process."""

from __future__ import annotations

import os
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    TrainingArguments,
)

from headstart.heads import fingerprint
from headstart.heads.core import load_pretrained, options_in_parts

from .fit.arguments import load_options
from .processes.engine import loaded_as, weights_are_sharded
from .processes.launched import check_same_target, several_nodes
from .processes.tensor_parallel import WORDS
from .recipe import TargetSpec
from .stages.store import Stage


class RunTarget:
    """Reads what the finished stage `target` stands for.

    Attributes:
        model: on this process's device; None until it is loaded.
    """

    def __init__(self, spec: TargetSpec, args: TrainingArguments):
        self.spec, self.args = spec, args
        self.model: PreTrainedModel | None = None
        self._revision = {"revision": spec.revision} if spec.revision else {}
        self._tokenizer: Any = None

    def name(self, stage: Stage) -> str:
        """Path or Hub name; a run's folder may have moved since a target was trained in it."""
        return str(stage.folder) if self.spec.scratch else stage.info["model"]

    def config(self, stage: Stage) -> Any:
        """Its config, without its weights."""
        return load_pretrained(AutoConfig, self.name(stage), **self._revision)

    def tokenizer(self, stage: Stage) -> Any:
        """Its tokenizer, without its weights; read once."""
        if self._tokenizer is None:
            self._tokenizer = load_pretrained(AutoTokenizer, self.name(stage), **self._revision)
        return self._tokenizer

    def load(self, stage: Stage) -> PreTrainedModel:
        """The model on this process's device; loaded once."""
        if self.model is not None:
            return self.model
        name, spec, world = self.name(stage), self.spec, self.args.world_size
        how = load_options(spec, self.args.device, world)
        if spec.tp_plan is not None and world > 1:
            how |= options_in_parts(name, spec.tp_plan, world, **WORDS, **self._revision)
        with loaded_as(spec.dtype, name):
            model = load_pretrained(AutoModelForCausalLM, name, **how)
        placed = "device_map" in how or "distributed_config" in how
        if not placed and not weights_are_sharded():
            model.to(self.args.device)  # type: ignore[arg-type]
        if several_nodes(os.environ) and not weights_are_sharded():
            check_same_target(fingerprint(model))
        self.model = model.eval()
        return model
