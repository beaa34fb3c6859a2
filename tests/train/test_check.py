"""`headstart check`: a run that can work passes, and each planted fault is named."""

import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.heads.core import features
from headstart.heads.parts.adapter import Adapter
from headstart.train.checks import inspect
from headstart.train.checks.findings import Finding
from headstart.train.checks.inspect import inspect_run
from headstart.train.checks.masks import tokenizer_fits
from headstart.train.checks.needs import needs_of
from headstart.train.checks.overfit import learns_by_heart
from headstart.train.checks.pace import Measured, measure_steps, measure_writing, pace_of
from headstart.train.checks.plan import plan_run
from headstart.train.data import rendering
from headstart.train.data.documents import Document
from headstart.train.drafter_stage import make_drafter
from headstart.train.fit import target_with_drafter
from headstart.train.fit.joint import training_module
from headstart.train.losses.draft_loss import head_labels
from headstart.train.recipe import Recipe, Scratch, parse_recipe
from headstart.train.scratch_target import train_target
from tests.support.recipes import TINY

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(n: int, answered: bool = True) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You count for those who ask."},
        {"role": "user", "content": f"Which number comes after number {n}?"},
        {"role": "assistant", "content": f"The number {n + 1} comes after number {n}."},
    ]
    return {"messages": messages if answered else messages[:2]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`chats.jsonl`, and `target`, which has learnt a little of them, with a chat template."""
    root = tmp_path_factory.mktemp("home")
    rows = [chat(n) for n in range(300)]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "corpus").mkdir()
    for split in ("train", "held_out"):
        documents = [Document.chat(str(n), row["messages"]) for n, row in enumerate(rows)]
        lines = [json.dumps({"id": d.id, "text": d.text}) + "\n" for d in documents]
        (root / "corpus" / f"{split}.jsonl").write_text("".join(lines))
    spec = Scratch(
        vocab_size=300, hidden_size=32, layers=2, intermediate_size=64, context=192,
        sequence_length=64, max_seconds=None, max_tokens=60_000,
    )  # fmt: skip
    train_target(spec, root / "corpus", root / "target", 0, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(root / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "target")
    return root


def recipe(home: Path, **sections: dict[str, Any]) -> Recipe:
    data: dict[str, Any] = TINY | {
        "output": str(home / "runs"),
        "target": {"model": str(home / "target")},
        "corpus": {"source": str(home / "chats.jsonl"), "held_out": 0.1},
        "distill": {**TINY["distill"], "prefix": "prompt", "prefix_tokens": 96, "new_tokens": 32},
        "drafter": {"family": "medusa", "heads": 2, "output": "own"},
    }
    for section, changes in sections.items():
        data[section] = {**data[section], **changes}
    return parse_recipe(data)


def wrong(made: Recipe, learn: bool = False) -> list[Finding]:
    """What speaks against a run; without learning a text by heart, which takes longest."""
    learnt = Finding("learns one text", True, "not tried")
    tried = learns_by_heart if learn else lambda *_: learnt
    with mock.patch.object(inspect, "learns_by_heart", tried):
        return [finding for finding in inspect_run(made).findings if finding.fine is False]


def test_a_run_that_can_work_passes(home: Path) -> None:
    started = time.perf_counter()
    found = inspect_run(recipe(home))
    assert time.perf_counter() - started < 120
    assert found.fine, [f for f in found.findings if f.fine is False]
    names = [finding.name for finding in found.findings if finding.fine]
    assert names == [
        "held-out prompts", "tokenizer", "loss mask", "chat template", "labels", "features",
        "learns one text",
    ]  # fmt: skip
    assert found.counts["held-out documents"] == 30
    assert found.pace is not None and found.pace.distill_s > 0 and found.pace.train_s > 0
    assert not (home / "runs").exists()


def test_writing_is_measured_in_a_batch_of_the_recipe(home: Path) -> None:
    """A GPU writes 64 texts in about the time of eight."""
    model = AutoModelForCausalLM.from_pretrained(home / "target").eval()
    model.generation_config.eos_token_id = None
    prompts, sizes = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])], list[int]()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    spec = recipe(home, distill={"batch_size": 24, "new_tokens": 8, "examples": 100}).distill
    for documents, size in ((50, 24), (10, 10)):
        sizes.clear()
        tokens, seconds = measure_writing(model, prompts, spec, documents)
        assert tokens == size * 8 and seconds > 0 and max(sizes) == size


class Timed(torch.nn.Module):
    """A module whose steps take so many seconds."""

    def __init__(self, *stages: tuple[float, dict[str, Any]]) -> None:
        super().__init__()
        self.drafter, self.target = torch.nn.Linear(1, 1), torch.zeros(1)
        self.stages = lambda: stages or [(1.0, {})]
        self.trained = lambda: [self.drafter]

    def step(self, seconds: float) -> Any:
        time.sleep(seconds)
        return {"loss": self.drafter.weight.sum()}


def test_a_step_has_all_of_its_rows_and_epochs_end_the_run(home: Path) -> None:
    calls: list[int] = []

    class Counted(Timed):
        def forward(self, rows: Any, tokens: torch.Tensor, supervised: Any) -> Any:
            calls.append(len(tokens))
            return self.step(0.02)

    made = recipe(home, train={"rows_per_step": 40, "epochs": 3, "max_steps": 1_000_000})
    step = measure_steps(Counted(), made, 300, 8)  # type: ignore[arg-type]
    assert calls == [4, 4, 4] and 10 * 0.02 < step.step_s < 2
    # 24 rows are asked for, and taken of at least as many documents: a step an epoch.
    for documents, steps in ((100, 3), (10, 3)):
        pace = pace_of(made, (100, 1.0), step, documents, (1, 1))
        assert pace.train_s == pytest.approx(steps * step.step_s)
        assert pace.distill_s == pytest.approx(min(24, documents) * 32 / 100)
    assert pace_of(made, (100, 1.0), Measured(2.0, 0), 100, (10, 1)).train_s == 3 * 6 * 2.0
    made = recipe(home, train={"rows_per_step": 8, "epochs": 3, "max_steps": 1_000_000})
    assert pace_of(made, (100, 1.0), Measured(2.0, 0), 100, (1, 1)).train_s == 9 * 2.0
    # Chats of four answers, 32 tokens at most each; they are as many rows, or one of 128 tokens.
    four = pace_of(made, (100, 1.0), Measured(2.0, 0), 100, (4, 4))
    assert four.train_s == 4 * 9 * 2.0 and four.distill_s == pytest.approx(24 * 4 * 32 / 100)
    assert pace_of(made, (100, 1.0), Measured(2.0, 0), 100, (1, 9)).distill_s == 24 * 128 / 100


def test_packed_rows_are_measured_as_they_are_trained(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    class Packed(Timed):
        def forward(self, rows: Any, tokens: Any, segments: Any, positions: Any, **_: Any) -> Any:
            asked.append(tuple(tokens.shape))
            assert segments[0, [7, 8, 19]].tolist() == [0, 1, 2]
            assert positions[0, [7, 8, 19]].tolist() == [7, 0, 3]
            return self.step(0.0)

    how = {"packing": True, "packed_length": 512, "epochs": 3, "max_steps": 1_000_000}
    made, plain = recipe(home, train=how), recipe(home)
    measure_steps(Packed(), made, 300, 8, 20)  # type: ignore[arg-type]
    assert asked == [(4, 20)] * 3
    # 24 rows in steps of 4 packed ones, which hold two each.
    assert pace_of(made, (100, 1.0), Measured(2.0, 0), 100, (1, 1), 2.0).train_s == 3 * 3 * 2.0
    needs, less = (needs_of(each, plan_run(each)) for each in (made, plain))
    rest = 16 * needs.drafter + needs.target
    assert needs.memory - rest == pytest.approx(4 * (less.memory - rest))  # rows have 128 tokens
    measured = mock.Mock(wraps=measure_steps)
    monkeypatch.setattr(inspect, "measure_steps", measured)
    assert not wrong(made)
    assert measured.call_args.args[-3:] == (128, 512, True)


def test_features_that_are_kept_are_computed_once(home: Path) -> None:
    """As a training does it: a row's features take time before the first step, and in none."""
    step = Measured(2.0, 0, 0.5)
    asked = {"epochs": 3, "max_steps": 1_000_000}
    pace = pace_of(recipe(home, train=asked), (100, 1.0), step, 100, (2, 1))
    assert pace.features_s == 48 * 0.5 and pace.train_s == pace.features_s + 3 * 12 * 2.0
    bounded = recipe(home, train=asked | {"max_seconds": 5.0})
    assert pace_of(bounded, (100, 1.0), step, 100, (2, 1)).train_s == 5.0
    target = AutoModelForCausalLM.from_pretrained(home / "target")
    for how, room in (({}, None), ({"packing": True}, 20)):
        made = recipe(home, train=how)
        drafter: Any = make_drafter(made, target, None)
        module = training_module(made.train, target, drafter)
        with mock.patch.object(module, "features", mock.Mock(wraps=module.features)) as ran:
            measured = measure_steps(module, made, 300, 8, room, True)
            assert ran.call_count == 2 and measured.row_s > 0
            assert module.cache is not None and len(module.cache) == 4 * (room or 8)
            assert measure_steps(module, made, 300, 8, room).row_s == 0
            assert ran.call_count == 5  # each step's
        module.release()
    for limit, kept in ((1024, True), (0.001, False)):
        measure = mock.Mock(wraps=measure_steps)
        with mock.patch.object(inspect, "measure_steps", measure):
            assert not wrong(recipe(home, train={"feature_cache_mb": limit}))
        assert measure.call_args.args[-1] is kept


def test_stages_are_measured_by_their_share(home: Path) -> None:
    class Staged(Timed):
        def forward(self, rows: Any, tokens: Any, supervised: Any, weight: float | None) -> Any:
            return self.step(0.02 if weight is None else 0.12)

    stages = (0.75, {"weight": None}), (0.25, {"weight": 0.2})
    seconds = measure_steps(Staged(*stages), recipe(home), 300, 8).step_s  # type: ignore[arg-type]
    assert 0.045 <= seconds < 0.1


def test_an_adapter_needs_memory_and_disk_too(home: Path) -> None:
    """Of each parameter a float32 weight, gradient and two moments, three checkpoints, and one."""
    options = {"output": "own", "rank": 4}
    made = [recipe(home), recipe(home, drafter={"family": "medusa2", **options})]
    heads, both = (needs_of(each, plan_run(each)) for each in made)
    model = AutoModelForCausalLM.from_pretrained(home / "target")
    adapter = Adapter(4, 8, 0.0, [])
    adapter.attach(model)
    count = sum(factor.numel() for factor in adapter.parameters())
    assert heads.drafter == both.drafter
    assert both.disk - heads.disk == pytest.approx(40 * count)
    assert both.memory - heads.memory == pytest.approx(16 * count)


def test_given_rows_are_as_long_as_their_texts(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the target's context, of 192 tokens; `prefix_tokens` and `new_tokens` bound none."""
    lengths, true = [], inspect.measure_steps

    def noted(*given: Any) -> Any:
        lengths.append(given[3])
        return true(*given)

    monkeypatch.setattr(inspect, "measure_steps", noted)
    for repeats in (1, 99):
        lines = [
            {"text": f"the number {n} comes after number {n - 1} " * repeats} for n in range(99)
        ]
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        corpus = {"source": str(tmp_path / "texts.jsonl")}
        found = inspect_run(recipe(home, distill={"writer": "given"}, corpus=corpus))
        assert len(found.rows[0].tokens) <= lengths[-1] <= 192
    short, long = lengths
    assert short < 40 and long == 192
    found = inspect_run(recipe(home, distill={"writer": "given", "max_length": 48}, corpus=corpus))
    assert lengths[-1] == 48 and len(found.rows) > 4 * 10  # texts of over 1,000 tokens


def test_labels_that_are_shifted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(tokens: torch.Tensor, supervised: torch.Tensor, *rest: Any) -> torch.Tensor:
        return head_labels(tokens.roll(1, 1), supervised.roll(1, 1), *rest)

    monkeypatch.setattr(target_with_drafter, "head_labels", shifted)
    found = wrong(recipe(home), learn=True)
    assert [finding.name for finding in found] == ["labels", "learns one text"]
    assert "labels are shifted" in found[0].said


@pytest.mark.parametrize("family", ["medusa", "eagle3"])
def test_features_of_another_layer(
    home: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    stack, build = features.decoder_layers, features.FeatureTap.__init__

    def another(self: Any, model: Any, layers: Sequence[int]) -> None:
        build(self, model, [1 if layer == features.FINAL else layer for layer in layers])

    def reversed_stack(model: Any) -> torch.nn.ModuleList:
        return torch.nn.ModuleList(reversed(stack(model)))

    if family == "medusa":
        monkeypatch.setattr(features.FeatureTap, "__init__", another)
        made = recipe(home)
    else:
        monkeypatch.setattr(features, "decoder_layers", reversed_stack)
        made = recipe(home)
        made.drafter.family = family
        made.drafter.options = {"depths": 2, "feature_layers": [0, 1, 1]}
    (finding,) = [f for f in wrong(made) if f.name == "features"]
    assert "another layer's" in finding.said or "changes its output layer" in finding.said


def with_template(home: Path, folder: Path, template: str) -> Recipe:
    target = folder / "target"
    shutil.copytree(home / "target", target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    return recipe(home, target={"model": str(target)})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, r"its mark <\|im_end\|> is no token"),
        (TEMPLATE.replace("{{ eos_token }}", "</s>"), "without a token at which the target stops"),
    ],
    ids=["marks", "end"],
)
def test_another_models_template(home: Path, tmp_path: Path, template: str, said: str) -> None:
    (finding,) = [f for f in wrong(with_template(home, tmp_path, template)) if "chat" in f.name]
    assert re.search(said, finding.said)


def test_a_mask_that_trains_user_turns(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = rendering.add_answer

    def all_taught(rows: list[Any], *rest: Any) -> None:
        add(rows, *rest)
        rows[-1] = replace(rows[-1], supervised=np.ones_like(rows[-1].supervised))

    given = {"writer": "given", "max_length": 150}
    assert not wrong(recipe(home, distill=given))
    monkeypatch.setattr(rendering, "add_answer", all_taught)
    (finding,) = wrong(recipe(home, distill=given))
    assert finding.name == "loss mask" and "a turn of the system's" in finding.said


def test_another_tokenizer(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(home / "target", target)
    path = target / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    ids = sorted(vocabulary.values())
    data["model"]["vocab"] = {word: ids[-1] - id for word, id in vocabulary.items()}
    for token in data["added_tokens"]:
        token["id"] = data["model"]["vocab"].get(token["content"], token["id"])
    path.write_text(json.dumps(data))
    (finding,) = [
        f for f in wrong(recipe(home, target={"model": str(target)})) if "token" in f.name
    ]
    assert "it is noise to the target" in finding.said


@pytest.mark.parametrize("used", ["nowhere", "in the corpus", "in the template"])
def test_tokens_that_the_target_has_no_embedding_for(home: Path, tmp_path: Path, used: str) -> None:
    """As the token of pictures in Gemma 3's tokenizer: it matters where it is used."""
    tokenizer: Any = AutoTokenizer.from_pretrained(home / "target")
    model: Any = AutoModelForCausalLM.from_pretrained(home / "target").eval()
    rows = model.get_input_embeddings().weight.shape[0]
    fill = [f"<unused{n}>" for n in range(rows - len(tokenizer))]
    tokenizer.add_special_tokens({"additional_special_tokens": [*fill, "<picture>"]})
    assert tokenizer.convert_tokens_to_ids("<picture>") == rows
    if used == "in the template":
        tokenizer.chat_template = "<picture>" + TEMPLATE
    text = "<picture>" if used == "in the corpus" else ""
    text += "".join(m["content"] for n in range(9) for m in chat(n)["messages"])
    finding = tokenizer_fits(tokenizer, model, [torch.tensor(tokenizer(text)["input_ids"])])
    assert finding.fine == (used == "nowhere"), finding
    said = "; 1 of its tokens have no embedding, and are in no text"
    if used != "nowhere":
        said = f"has token {rows} of its {rows + 1}, and the target's embedding {rows} rows: it is"
    assert said in finding.said


def test_texts_of_tokens_alone_are_their_tokens(home: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(home / "target")
    alone = Document("1", "", ids=[[5, 6], [7]])
    both = replace(Document.chat("2", chat(1)["messages"]), ids=[[5], [6]])
    made = recipe(home)
    ids, of_both = inspect._ids(made, tokenizer, [alone, both])
    (rendered,) = inspect.encode(tokenizer, [both], "auto", made.chat)
    assert ids == [5, 6, 7] and of_both.tolist() == rendered.tolist()


def test_no_turn_of_the_assistant(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [chat(n, answered=False) for n in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"writer": "given", "max_length": 150}
    with pytest.raises(ValueError, match=r"none of \d+ training documents has an answer"):
        inspect_run(recipe(home, corpus={"source": str(path)}, distill=given))


def test_too_few_held_out_prompts(home: Path) -> None:
    (finding,) = wrong(recipe(home, decode={"prompts": 21}))
    assert finding.name == "held-out prompts"
    assert finding.said.startswith("10 for validation, 2 wanted; 20 for bench, 21 wanted; give")


def test_a_context_that_is_too_short(home: Path) -> None:
    with pytest.raises(ValueError, match="make 196 tokens, but the target's context is 192"):
        inspect_run(recipe(home, distill={"new_tokens": 100}))


def test_what_is_left_out_is_noted(home: Path) -> None:
    def notes(made: Recipe) -> list[str]:
        with mock.patch.object(inspect, "_try_training"):
            found = inspect_run(made)
        return [f.said for f in found.findings if f.name in ("corpus", "examples")]

    bytes_of = (home / "chats.jsonl").stat().st_size
    assert not notes(recipe(home, distill={"examples": 270}))
    assert notes(recipe(home)) == ["24 of 270 documents are taken (distill.examples)"]
    ended, few = notes(recipe(home, corpus={"max_bytes": 20_000}))
    assert re.fullmatch(r"corpus\.max_bytes 20,000 ends the corpus after 1\d\d documents", ended)
    assert few.startswith("24 of 1")
    with mock.patch.object(inspect, "_READ", 10_000):  # a sample tells less
        (_, *unsure) = reversed(notes(recipe(home, corpus={"max_bytes": 20_000})))
        assert unsure == [f"corpus.max_bytes 20,000 may end the corpus, of {bytes_of:,} bytes"]
        assert len(notes(recipe(home, corpus={"max_bytes": bytes_of}))) == 1
