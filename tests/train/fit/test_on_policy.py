"""On-policy text: the current student's, drawn by (seed, step), and corrected by the target."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor
from transformers import LlamaForCausalLM

from headstart.heads import FAMILIES, OptionError
from headstart.heads.draft_model import DraftModel
from headstart.heads.families import with_article
from headstart.train.data.batches import Batches
from headstart.train.data.prefixes import DistillError
from headstart.train.data.training_rows import Rows
from headstart.train.fit import on_policy
from headstart.train.fit.arguments import training_arguments
from headstart.train.fit.on_policy import StudentText, check_on_policy
from headstart.train.fit.target_with_drafter import TargetWithDrafter
from headstart.train.fit.trainer import DrafterTrainer
from headstart.train.recipe import Distill, OnPolicy, RecipeError, Train, parse_recipe
from tests.support import training
from tests.support.counting import SIZE, counting_target
from tests.support.paths import ROOT
from tests.support.recipes import SAME, TINY, launch
from tests.support.training import (
    IDLE,
    check_same_checkpoints,
    columns,
    drafter_of,
    killed_and_resumed,
)

PROMPT, LENGTH = 3, 12
DISTILL = Distill(prefix_tokens=PROMPT, new_tokens=LENGTH - PROMPT, batch_size=5)
SPEC = Train(
    loss="reverse_kl", learning_rate=1e-2, batch_size=4, max_steps=12, eval_every=4,
    on_policy=OnPolicy(lmbda=0.5, every=3),
)  # fmt: skip


def rows(count: int = 10) -> Rows:
    prompts = [PROMPT - (row % 2) for row in range(count)]  # two lengths
    supervised = [np.arange(LENGTH) >= prompt for prompt in prompts]
    return training.rows(count, LENGTH, supervised)


def student(seed: int = 0, **changes: Any) -> DraftModel:
    """A one-layer student of a random target, and not its equal."""
    torch.manual_seed(seed)
    config = counting_target().config
    for name, value in {"initializer_range": 0.3, **changes}.items():
        setattr(config, name, value)
    drafter = drafter_of(LlamaForCausalLM(config).eval(), "draft_model", layers=1)
    assert isinstance(drafter, DraftModel)
    torch.nn.init.normal_(drafter.model.lm_head.weight, std=0.3)  # type: ignore[union-attr]
    return drafter


class Processes:
    """Training arguments as one of several processes sees them."""

    def __init__(self, rank: int = 0, world: int = 1, rows: int = 4, every: int = 4, seed: int = 3):
        self.process_index, self.world_size, self.seed = rank, world, seed
        self.train_batch_size, self.gradient_accumulation_steps = rows, 1
        self.save_steps, self.max_steps = every, 12


def text_of(
    drafter: DraftModel, spec: OnPolicy, distill: Distill = DISTILL, count: int = 10, **how: Any
) -> Any:
    args: Any = Processes(**how)
    own = args.train_batch_size, args.gradient_accumulation_steps, args.seed
    given = rows(count)
    batches = Batches(given.lengths, *own, args.process_index, args.world_size)
    return StudentText(spec, drafter, given, distill, args, batches)


def test_the_text_is_the_current_students() -> None:
    drafter = student()
    model: Any = drafter.model
    cold = OnPolicy(lmbda=1.0, temperature=1e-4, every=1)  # as good as greedy
    found = []
    for _ in range(2):
        drafter.train()
        text = columns(text_of(drafter, cold).at(0))
        assert drafter.model.training
        for tokens, length, start in zip(
            text.tokens, text.lengths, text.prompt_lengths, strict=True
        ):
            assert length == start + DISTILL.new_tokens
            prompt = tokens[None, :start].long()
            assert any(torch.equal(prompt[0], row[:start].long()) for row in columns(rows()).tokens)
            drafter.eval()
            expected = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                max_new_tokens=DISTILL.new_tokens,
            )  # fmt: skip
            assert torch.equal(tokens[:length], expected[0])
        assert torch.equal(text.supervised.sum(1), text.lengths - text.prompt_lengths)
        found.append(text.tokens)
        with torch.no_grad():  # one step of training, as good as any
            model.lm_head.weight.normal_(std=0.3)
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    "distill",
    [Distill(writer="given", prefix_tokens=2, new_tokens=4), replace(DISTILL, max_length=6)],
    ids=["given rows with long prompts", "a bound of all rows"],
)
def test_no_text_is_longer_than_a_row(distill: Distill) -> None:
    drafter, cold = student(), OnPolicy(lmbda=1.0, temperature=1e-4, every=1)
    own = columns(rows()).tokens
    for row in text_of(drafter, cold, distill).at(0):
        start, new = int(row.supervised.argmax()), 4 if distill.writer == "given" else 3
        assert len(row.tokens) == len(row.supervised) == start + new <= 6
        prompt = row.tokens[:start].tolist()
        assert any(text[:PROMPT][-start:] == prompt or text[:2][-start:] == prompt
                   for text in own.tolist())  # fmt: skip


def test_the_share_of_steps_is_lambda() -> None:
    text = text_of(student(), OnPolicy(lmbda=0.3))
    due = [text.is_due(step) for step in range(2000)]
    assert abs(sum(due) / 2000 - 0.3) < 4 * (0.3 * 0.7 / 2000) ** 0.5
    assert due == [text.is_due(step) for step in range(2000)]
    always = text_of(student(), OnPolicy(lmbda=1.0))
    assert all(always.is_due(step) for step in range(100))


@pytest.mark.parametrize("count", [64, 11, 9], ids=["whole", "of three rows", "of one row"])
def test_processes_share_what_one_would_write(count: int) -> None:
    """Also in an epoch's last step, where one row leaves a process without any."""
    drafter, spec = student(), OnPolicy(lmbda=1.0, temperature=1.5)
    whole = text_of(drafter, spec, count=count).at(2)
    assert len(whole) == min(count - 8, 4)
    halves = [
        text_of(drafter, spec, count=count, rank=rank, world=2, rows=2).at(2) for rank in (0, 1)
    ]
    taught = [row for half in halves for row in half if row.supervised.any()]
    assert len(halves[0]) == len(halves[1]) or count == 11
    assert torch.equal(columns(taught).tokens, columns(whole).tokens)
    whole = columns(text_of(drafter, spec).at(1)).tokens
    for other in (text_of(drafter, spec).at(0), text_of(drafter, spec, seed=4).at(1)):
        assert not torch.equal(columns(other).tokens, whole)


def test_text_is_written_at_once_and_never_kept_over_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def counted(speculator: Any, prefixes: list[Tensor], *others: Any, **how: Any) -> Any:
        sizes.append(len(prefixes))
        return write(speculator, prefixes, *others, **how)

    write = on_policy.write_rows
    monkeypatch.setattr(on_policy, "write_rows", counted)
    text = text_of(student(), OnPolicy(lmbda=1.0, every=3), count=48, every=5)
    written = []
    for step in range(12):
        text.at(step)
        written.append(sum(sizes) // 4)
        assert not text.written or max(text.written) < step + 3
    # Steps 0-2, 3-4 (a checkpoint follows), 5, 6-8, 9 (another), 10-11.
    assert written == [3, 3, 3, 5, 5, 6, 9, 9, 9, 10, 12, 12] and max(sizes) == 5


def test_the_text_ends_and_is_spelt_as_the_targets() -> None:
    """Whatever the student's own config says, and however many tokens it has."""
    drafter = student()
    drafter.target.generation_config.eos_token_id = [7]  # type: ignore[union-attr]
    hot = OnPolicy(lmbda=1.0, temperature=5.0)
    text = columns(text_of(drafter, hot, count=64, rows=64).at(0))
    ended = text.lengths < text.prompt_lengths + DISTILL.new_tokens
    last = text.tokens.gather(1, (text.lengths - 1).long().unsqueeze(1)).squeeze(1)
    assert ended.any() and (last[ended] == 7).all()
    drafter.model.resize_token_embeddings(4 * SIZE)
    assert columns(text_of(drafter, hot, count=16, rows=16).at(0)).tokens.max() < SIZE
    drafter.model.resize_token_embeddings(SIZE // 2)
    assert columns(text_of(drafter, hot, count=16, rows=16).at(0)).tokens.max() < SIZE // 2


def trainer(folder: Path, drafter: DraftModel, spec: Train = SPEC, validate: Any = None) -> Any:
    module = TargetWithDrafter(drafter.target, drafter, spec.head_decay, spec.loss)
    args = training_arguments(spec, folder, seed=3)
    assert spec.on_policy is not None
    text = partial(StudentText, spec.on_policy, drafter, rows(), DISTILL, args)
    check = validate or (lambda _: IDLE)
    return DrafterTrainer(module, args, rows(), spec, check, progress=False, student_text=text)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_take_the_students_text_in_its_turn(tmp_path: Path, accumulation: int) -> None:
    spec = replace(SPEC, gradient_accumulation=accumulation, batch_size=2, feature_cache_mb=1.0)
    run = trainer(tmp_path / "run", student(), spec)
    forward, seen = run.module.forward, []

    def watched(rows: Any, tokens: Tensor, *others: Any, **how: Any) -> Any:
        own = not any(torch.equal(tokens[0], row["tokens"]) for row in run.rows)
        assert own == (rows is None)
        seen.append((run.state.global_step, own, len(tokens)))
        return forward(rows, tokens, *others, **how)

    run.module.forward = watched
    run.fit()
    assert [(step, own) for step, own, _ in seen] == [
        (step, run.student_text.is_due(step)) for step, _, _ in seen
    ]
    assert {step for step, _, _ in seen} == set(range(12))
    assert {own for _, own, _ in seen} == {True, False}
    for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        if "loss" in line:  # of its own text a student's accuracy says nothing
            own = run.student_text.is_due(line["step"] - 1)
            assert ("accuracy_by_depth" in line) != own and len(line["loss_by_depth"]) == 1
    # Five batches of two rows an epoch, so that with accumulation a last step has but one.
    steps = {step: sum(size for at, _, size in seen if at == step) for step in range(12)}
    short = [step for step, size in steps.items() if size < 2 * accumulation]
    assert short == ([] if accumulation == 1 else [2, 5, 8, 11])


def test_the_cache_is_of_the_targets_text_alone() -> None:
    drafter = student()
    module = TargetWithDrafter(drafter.target, drafter, 0.8, "reverse_kl")
    text = columns(text_of(drafter, OnPolicy(lmbda=1.0)).at(0))
    batch = text.tokens.long(), text.supervised
    online = module(None, *batch)["loss"]
    assert module.fill_cache(rows(), 1.0)
    assert torch.equal(module(None, *batch)["loss"], online)
    assert not torch.equal(module(torch.arange(4), *batch)["loss"], online)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Its checkpoints fall between the steps at which text is written."""

    spec = replace(SPEC, on_policy=OnPolicy(lmbda=0.7, every=3))
    killed_and_resumed(
        lambda folder, validate: trainer(folder, student(), spec, validate),
        lambda _: IDLE,
        tmp_path,
    )
    check_same_checkpoints(tmp_path, "model.safetensors")


@pytest.mark.parametrize("loss", ["reverse_kl", "total_variation"])
def test_the_loss_falls_on_the_students_text(tmp_path: Path, loss: str) -> None:
    drafter = student()
    on_policy = OnPolicy(lmbda=1.0, every=4)
    run = trainer(
        tmp_path, drafter, replace(SPEC, loss=loss, max_steps=40, eval_every=None,
                                   on_policy=on_policy),
    )  # fmt: skip

    def on_fresh_text() -> float:
        text = columns(text_of(drafter, on_policy, count=64, rows=64).at(0))
        module = TargetWithDrafter(drafter.target, drafter, 1.0, loss)
        with torch.no_grad():
            return float(module(None, text.tokens.long(), text.supervised)["loss"])

    before = on_fresh_text()
    run.fit()
    assert on_fresh_text() < 0.8 * before


def recipe_with(on_policy: Any, family: str = "draft_model", **train: Any) -> Any:
    options = {"layers": 1} if family == "draft_model" else {}
    return parse_recipe({
        "name": "r", "target": {"model": "m"}, "drafter": {"family": family, **options},
        "train": {"loss": "reverse_kl", **train, "on_policy": on_policy},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("on_policy", "train", "said"),
    [
        ({"lambda": 0.5}, {}, r"train\.on_policy\.lambda: unknown key \(did you mean 'lmbda'"),
        (
            {"lmbda": 0.0},
            {},
            r"train\.on_policy\.lmbda: found 0\.0, expected a finite number greater than 0",
        ),
        (
            {"lmbda": 1.5},
            {},
            r"train\.on_policy\.lmbda: found 1\.5, expected a finite number greater than 0 and "
            r"at most 1",
        ),
        ({"every": 0}, {}, r"train\.on_policy\.every"),
        ({"temperature": -1}, {}, r"train\.on_policy\.temperature"),
        (0.5, {}, r"train\.on_policy: found the number 0\.5"),
        ({}, {"loss": "cross_entropy"}, "would train the drafter on its own text; set train.loss"),
        (
            {},
            {"loss": {"cross_entropy": 1, "forward_kl": 2}},
            r"1 cross_entropy \+ 2 forward_kl would train the drafter on its own text",
        ),
    ],
)
def test_mistakes_are_named(on_policy: Any, train: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said) as error:
        recipe_with(on_policy, **train)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_who_cannot_write_is_refused(family: str) -> None:
    check_on_policy(recipe_with(None, family))
    if family in ("draft_model", "pard"):
        return check_on_policy(recipe_with({}, family))
    with pytest.raises(
        OptionError, match=f"{with_article(family)} drafter writes no text"
    ) as error:
        check_on_policy(recipe_with({}, family))
    assert "\n" not in str(error.value)


def test_sharded_students_and_short_contexts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = student(max_position_embeddings=LENGTH - 1)
    with pytest.raises(DistillError, match="the draft model's context is 11; lower one of them"):
        text_of(drafter, OnPolicy())
    monkeypatch.setattr(on_policy, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(OptionError, match="use ZeRO-2 or DDP"):
        check_on_policy(recipe_with({}))


@pytest.mark.proof
@pytest.mark.distributed
def test_two_processes_train_one_student(tmp_path: Path) -> None:
    """Each writes its own rows; together they take the steps that one takes with all of them."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY | {
        "output": str(tmp_path / "runs"),
        "drafter": {"family": "draft_model", "layers": 1},
        "train": {"loss": "forward_kl", "on_policy": {"lmbda": 0.7, "every": 2}},
    }))  # fmt: skip
    config = str(ROOT / "recipes" / "launch" / "ddp_cpu.yaml")
    alone = [sys.executable, "-m", "headstart.train", str(recipe), "train.batch_size=4"]
    both = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "-m",
            "headstart.train", str(recipe), "name=two", "shares=tiny",
            "train.batch_size=2"]  # fmt: skip
    for command in (alone, both):
        done = launch([*command, *SAME], ACCELERATE_USE_CPU="true", PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (
        safetensors.torch.load_file(tmp_path / "runs" / name / "heads" / "model.safetensors")
        for name in ("tiny", "two")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)
