"""Seconds of a training step with features that the target computes, or that files hold.

    python -m benchmarks.feature_files [MODEL]

prints for each pair of target and drafter the processor's milliseconds of a step without the
optimizer (median), and of its features alone: computed (`online`), computed and written, and read
(`disk`). Rows are random tokens. MODEL is a further target, a folder.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headstart.heads import family
from headstart.train.data.training_rows import Row, Rows
from headstart.train.fit.feature_files import FeatureFolder
from headstart.train.fit.target_with_drafter import TargetWithDrafter


def measure(target: Any, name: str, rows: int, length: int, batch: int, **options: Any) -> str:
    """One line of figures for a drafter of the family `name`."""
    torch.manual_seed(0)
    width, kind, draw = target.config.vocab_size, family(name), np.random.default_rng(0)
    config: Any = kind.config_class
    drafter: Any = kind(config.for_target(target, **options)).float().bind(target)
    drafter.init_from_target(torch.arange(width))
    data = Rows.of(
        Row(str(n), draw.integers(0, width, length), np.arange(length) >= 32) for n in range(rows)
    )
    module, found = TargetWithDrafter(target, drafter, 0.8, "forward_kl"), {}
    module.train()
    with tempfile.TemporaryDirectory() as folder:
        for what in ("online", "written", "disk"):
            if what == "written":
                module.open_files(FeatureFolder(Path(folder), 1e12, "target"), data, False)
            steps, features = [], []
            for first in range(0, rows, batch):
                numbers = torch.arange(first, min(first + batch, rows))
                items = [data[n] for n in numbers.tolist()]
                tokens = torch.stack([item["tokens"] for item in items])
                supervised = torch.stack([item["supervised"] for item in items])
                started = time.process_time()
                module.read(numbers, tokens)
                features.append(time.process_time() - started)
                started = time.process_time()
                module(numbers, tokens, supervised)["loss"].backward()
                steps.append(time.process_time() - started)
                drafter.zero_grad()
            found[what] = [round(1e3 * float(np.median(each[1:])), 1) for each in (steps, features)]
    found["written"] = found["written"][1:]  # what was just written is read in the step
    return f"{target.config.hidden_size} {name}: ms of (step, features) {found}"


def shaped(**sizes: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        given = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        print(measure(given, "medusa", 96, 256, 8, heads=4, output="shared"), flush=True)
        print(measure(given, "eagle3", 96, 256, 8, depths=4), flush=True)
    small = shaped(
        vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=12,
        num_attention_heads=4,
    )  # fmt: skip
    print(measure(small, "medusa", 64, 192, 8, heads=5, output="own"), flush=True)
    large = shaped(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=16,
        num_attention_heads=8,
    )  # fmt: skip
    print(measure(large, "eagle3", 16, 256, 4, depths=4), flush=True)
