"""A training run on rows of different lengths: whole, and cut in two. Several processes may do it.

`python -m tests.support.ragged_run FOLDER SETTINGS`, which are JSON, makes both in FOLDER, whose
folder `rows` has the rows.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.state import PartialState

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.data.training_rows import Row, Rows, write_shard
from headstart.train.fit.feature_files import FeatureFolder
from headstart.train.fit.trainer import DrafterTrainer
from headstart.train.processes.lifetime import end_processes
from headstart.train.recipe import Train
from tests.support.counting import SIZE, counting_target
from tests.support.paths import ROOT
from tests.support.recipes import launch
from tests.support.training import IDLE, Validate, killed_and_resumed, trainer_of

COUNT = 25


def ragged_rows(folder: Path) -> Rows:
    """Rows that count, of 4 to 30 tokens, in two shards."""
    lengths = np.random.default_rng(5).integers(4, 31, COUNT)
    rows = [
        Row(str(i), (5 * i + np.arange(n)) % SIZE, np.arange(n) >= 2) for i, n in enumerate(lengths)
    ]
    if not folder.exists():
        for shard, part in enumerate((rows[:9], rows[9:])):
            write_shard(folder / f"train-{shard:05d}-of-00002", part, {})
    return Rows.load(folder)


def ragged_trainer(folder: Path, validate: Validate, rows: Rows, **train: Any) -> DrafterTrainer:
    """Of twelve steps, with checkpoints at 4, 8 and 12; by default an epoch has nine."""
    spec = {"batch_size": 3, "max_steps": 12, "eval_every": 4, "learning_rate": 1e-2, **train}
    target = counting_target()
    drafter = Medusa(MedusaConfig.for_target(target, heads=2, output="own")).bind(target)
    drafter.init_from_target()
    run = trainer_of(drafter, folder, Train(**spec), validate, rows)
    if limit := 1e9 * run.spec.feature_disk_gb:
        root = folder.with_name(f"{folder.name}-features")
        run.features = FeatureFolder(root, limit, "counting")
    return run


def cut_in_two(root: Path, rows: Rows, **train: Any) -> None:
    killed_and_resumed(
        lambda folder, validate: ragged_trainer(folder, validate, rows, **train),
        lambda _: IDLE,
        root,
    )


def run_in_two_processes(folder: Path, train: dict[str, Any]) -> None:
    """Run this file in `folder`, whose `rows` are there, by torch's launcher on the CPU."""
    done = launch(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
         "-m", "tests.support.ragged_run", str(folder), json.dumps(train)],
        ACCELERATE_USE_CPU="true", PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    root, train = Path(sys.argv[1]), json.loads(sys.argv[2])
    cut_in_two(root, Rows.load(root / "rows"), **train)
    state = PartialState()  # not before: the training's arguments set the processes up
    (root / f"witness-{state.process_index}").write_text(
        f"{state.distributed_type.value} {state.num_processes}"
    )
    end_processes()
