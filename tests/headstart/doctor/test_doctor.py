"""The doctor on a target that counts: its measurements, and the command."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from headstart.cli import main
from headstart.doctor.acceptance import Accepted, Decodes, gain
from headstart.doctor.diagnosis import Diagnosis, Finding, judged
from headstart.doctor.of_texts import chat, openings
from headstart.doctor.pairs import Pair
from headstart.doctor.scene import Scene
from headstart.heads import Manifest, fingerprint, save_drafter
from headstart.heads.artifacts.conditions import (
    drafter_conditions,
    probe_losses,
    target_conditions,
)
from headstart.infer.measure.noise import Gain
from headstart.reports.diagnosis import print_diagnosis
from headstart.train.data.documents import Document
from tests.support.chats import CHATML, TOOLS, ZEPHYR, chat_tokenizer
from tests.support.counting import SIZE, counting_drafter, counting_target

KEPT = 26  # the letters


def accepted(counts: list[list[int]], documents: list[int] | None = None) -> Accepted:
    numbers = documents or list(range(len(counts)))
    texts = [torch.arange(9)] * len(counts)
    return Accepted([np.array(c) for c in counts], [3] * len(counts), numbers, 2, texts)


def test_gains_are_paired_by_prompts() -> None:
    before, after = [[0, 1], [2, 2], [1, 1]], [[1, 2], [2, 3], [2, 2]]
    found = gain(accepted(before), accepted(after))
    # Each prompt gains 1, 0.5 and 1 a round: the mean, and its standard error.
    assert found.tau == pytest.approx(2.5 / 3)
    assert found.se == pytest.approx(np.std([1, 0.5, 1], ddof=1) / 3**0.5)
    assert found.beyond(2) and not gain(accepted(after), accepted(before)).beyond(0)
    # A prompt that one of the two left out does not count.
    assert gain(accepted(before), accepted(after[1:], [1, 2])).tau == pytest.approx(0.75)


def test_a_trial_is_no_cause_beside_a_costlier_one_that_is_known() -> None:
    known = Finding("window", "differs", "", Gain(3.5, 0.1), matters=True)
    little = Finding("layers", "", "", Gain(0.1, 0.02), matters=True)
    much = Finding("norms", "", "", Gain(4.0, 0.1), matters=True)
    assert [each.matters for each in judged([known, little, much])] == [True, False, True]
    assert judged([little, much]) == [little, much]


def test_acceptance_by_depth_and_position() -> None:
    found = accepted([[2, 0, 1, 2], [0, 0, 2, 2]])
    assert found.by_depth == [5 / 8, 4 / 5] and found.tau == 1 + 9 / 8
    assert sum(part["rounds"] for part in found.by_position()) == 8
    assert found.by_position()[0]["from"] == 3 and found.first_round() == 2


@pytest.mark.parametrize(("new_tokens", "deep"), [(10, 3), (3, 2)])
def test_no_round_is_cut_by_a_texts_end(model: Path, new_tokens: int, deep: int) -> None:
    """A drafter that is always right is so at every depth and position."""
    target: Any = counting_target()
    tokenizer = AutoTokenizer.from_pretrained(model)
    pair = Pair(target, counting_drafter(target, heads=3), tokenizer)
    documents = [Document("0", "a b c"), Document("1", "d e f g")]
    found = Decodes(documents, new_tokens, 3).accepted(pair)
    assert found.tau == 1 + deep and found.by_depth == [1.0] * deep
    assert {part["tau"] for part in found.by_position()} == {1.0 + deep}
    assert sum(map(len, found.counts)) == 2 * (new_tokens - deep)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that counts, with a token for each letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    letters = {chr(ord("a") + i) if i < KEPT else f"<{i}>": i for i in range(SIZE)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    counting_target().save_pretrained(folder)
    return folder


def save(model: Path, folder: Path, shift: int = 0, noted: bool = True) -> str:
    """Heads over 26 of the 32 tokens, whose map is `shift` off what the manifest notes."""
    from headstart.heads.medusa import Medusa, MedusaConfig

    target: Any = counting_target()
    whole = counting_drafter(target, heads=3)
    config = MedusaConfig.for_target(target, heads=3, output="trimmed", draft_vocab_size=KEPT)
    drafter = Medusa(config).bind(target)
    drafter.vocabulary.copy_(torch.arange(KEPT) + 2)
    with torch.no_grad():
        assert drafter.output is not None and whole.output is not None
        drafter.output.copy_(whole.output[:, drafter.vocabulary])
    trained: dict[str, Any] = {
        "target": target_conditions(target) | {"probe_losses": probe_losses(target)},
        "drafter": drafter_conditions(drafter), "chat": {"how": "text"},
        "rows": {"longest": 200},
    }  # fmt: skip
    drafter.vocabulary.add_(shift)
    manifest = Manifest(
        "medusa", str(model), fingerprint(target), metrics={"tau": 3.5},
        trained=trained if noted else {},
    )  # fmt: skip
    save_drafter(drafter, folder, manifest)
    return str(folder)


def command(heads: str, folder: Path, *more: str) -> list[str]:
    letters = "abcdefghij"
    rows = [
        {"text": " ".join(letters[i:]), "category": "odd" if i % 2 else "even"} for i in range(6)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--new-tokens", "10"]
    return ["doctor", "--drafter", heads, *prompts, *more]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({}, ""), ({"answers": 40, "openings": 40}, ""),
        ({"answers": 1040, "openings": 40}, "of 1,040 answers in training 1,000 have"),
    ],
)  # fmt: skip
def test_answers_whose_beginning_was_not_taught(rows: dict[str, int], said: str) -> None:
    pair: Any = None
    manifest = Manifest("medusa", "x", "", trained={"rows": rows})
    found = openings(Scene(pair, manifest, first_round=1.25))
    assert bool(found) == bool(said)
    for each in found:
        assert each.cause == "first answer token" and not each.ways
        assert said in each.said and "where τ is 1.25" in each.said


@pytest.mark.parametrize(("trained", "found"), [(CHATML, []), (ZEPHYR, ["chat template"])])
def test_of_several_templates_the_default_is_compared(trained: str, found: list[str]) -> None:
    tokenizer = chat_tokenizer({"default": CHATML, "tool_use": TOOLS})
    noted = {"how": "template", "template": trained, "template_kwargs": {}, "system": None}
    model: Any = None
    scene = Scene(
        Pair(model, model, tokenizer), Manifest("medusa", "x", "", trained={"chat": noted})
    )
    assert [each.cause for each in chat(scene)] == found


def test_a_sound_pair(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = save(model, tmp_path / "heads")
    assert main(command(heads, tmp_path)) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    assert "No cause was found" in printed and "τ of even" in printed
    assert "after training, validation" in printed and "here, temperature 1" in printed


def test_a_long_finding_is_indented_below_its_number() -> None:
    of = Finding("context length", "rows " * 30, "train", Gain(-0.45, 0.36), "words " * 12)
    measured: dict[str, Any] = {
        "trained": None, "temperature 0": {"tau": None}, "temperature 1": {"tau": None},
        "prompts": 1, "left_out": 0, "depth": 1, "first_round": 1.0, "by_position": [],
        "by_category": {},
    }  # fmt: skip
    out = io.StringIO()
    print_diagnosis(Diagnosis([], [of], [], [], measured), out, "doctor")
    lines = out.getvalue().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("  1. context length: -0.45"))
    assert all(line.startswith("     ") for line in lines[first + 1 :])


@pytest.mark.parametrize("noted", [True, False])
def test_a_shifted_vocabulary(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], noted: bool
) -> None:
    """With a manifest that notes the map, and by trial without one."""
    heads = save(model, tmp_path / "heads", shift=1, noted=noted)
    assert main(command(heads, tmp_path, "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    (cause,) = found["causes"]
    assert cause["cause"] == "draft vocabulary" and cause["by"] == "ids one less"
    assert bool(cause["said"]) == noted and cause["gain"]["tau"] > 1.5
    assert set(found["measured"]["by_category"]) == {"even", "odd"}
    assert found["measured"]["temperature 0"]["tau"] == 1


def test_a_draft_model_that_proposes_some_tokens_has_no_map(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows are those of its own tokens, whose ids nobody counts otherwise."""
    from headstart.heads.draft_model import DraftModel

    target: Any = counting_target()
    drafter = DraftModel.of(counting_target()).bind(target)
    drafter.keep_tokens(torch.arange(2, KEPT))
    manifest = Manifest("draft_model", str(model), fingerprint(target))
    heads = str(save_drafter(drafter, tmp_path / "heads", manifest))
    assert main(command(heads, tmp_path, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["causes"] == []


@pytest.mark.parametrize("name", ["lookup", "early_exit:1"])
def test_what_has_learnt_nothing_is_not_diagnosed(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(name, tmp_path, "--target", str(model))) == 2
    assert f"--drafter {name} has learnt nothing" in capsys.readouterr().err


def test_another_target_is_measured_and_not_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    heads, other = save(model, tmp_path / "heads"), tmp_path / "other"
    changed = counting_target()
    with torch.no_grad():  # it counts in twos
        changed.lm_head.weight.copy_(torch.eye(SIZE).roll(2, 0))
    changed.save_pretrained(other)
    AutoTokenizer.from_pretrained(model).save_pretrained(other)
    assert main(command(heads, tmp_path, "--target", str(other))) == 1
    printed = capsys.readouterr().out
    assert "1. target's weights: +" in printed and "the target of training" in printed
    assert main(command(heads, tmp_path, "--target", str(other), "--no-original")) == 0
    assert "what it costs was not measured" in capsys.readouterr().out


def test_long_texts_are_cut_as_bench_cuts_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = save(model, tmp_path / "heads")
    arguments = command(heads, tmp_path)
    context = counting_target().config.max_position_embeddings
    row = json.dumps({"text": " ".join("abcdefghij"[i % 10] for i in range(context + 1))})
    (tmp_path / "prompts.jsonl").write_text(f"{row}\n" * 5)
    assert main([*arguments, "--json"]) != 2, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["measured"]


def test_mistakes(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heads = save(model, tmp_path / "heads")
    assert main(command(heads, tmp_path, "--limit", "2")) == 2
    assert "found 2 prompts with --limit 2" in capsys.readouterr().err
    monkeypatch.setattr("headstart.commands.doctor.LEAST_PROMPTS", 0)  # some may be left out later
    assert main(command(heads, tmp_path, "--limit", "2")) == 2
    assert "found 2 prompts to decode" in capsys.readouterr().err
    assert main(command(heads, tmp_path, "--template-kwargs", "[1]")) == 2
    assert "expected a JSON object" in capsys.readouterr().err
    assert main(command("lookup", tmp_path, "--target", str(model))) == 2
    assert "has learnt nothing" in capsys.readouterr().err
