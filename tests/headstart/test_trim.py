"""`headstart trim`: from an artifact and a text to a smaller one that decodes the same text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import headstart
from headstart.cli import main
from headstart.heads import Manifest, fingerprint, save_drafter
from tests.support.bytewise import save_target
from tests.support.drafters import made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target whose tokens are bytes, an EAGLE drafter for it, and a text of few letters."""
    monkeypatch.chdir(tmp_path)
    save_target(Path("target"))
    model = AutoModelForCausalLM.from_pretrained("target")
    save_drafter(made("eagle", model), "whole", Manifest("eagle", "target", fingerprint(model)))
    Path("target/generation_config.json").write_text('{"eos_token_id": [7, 200]}')
    lines = [{"prompt": f"abc {number}"} for number in range(20)]
    Path("text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_it_is_written_and_decodes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trim", "whole", "few", "--text", "text.jsonl", "--tokens", "16"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "few" and out[1].startswith("It proposes 16 of ") and "100.00%" in out[2]
    assert out[3].endswith("headstart plan --drafter few --prompts FILE")
    speculator: Any = headstart.load("target", "few")
    known = speculator.drafter.draft_vocabulary.tolist()
    assert set(known) == {7, 200, *speculator.tokenizer("abc 0123456789").input_ids}
    ids = speculator.tokenizer("abc 1", return_tensors="pt").input_ids
    assert main(["trim", "few", "fewer", "--text", "text.jsonl"]) == 0
    assert "It proposes 4 of 16 tokens" in capsys.readouterr().out
    fewer: Any = headstart.load("target", "fewer")
    assert set(fewer.drafter.draft_vocabulary.tolist()) < set(known)
    plain: Any = headstart.load("target")
    text = speculator.generate(ids, max_new_tokens=20)
    assert torch.equal(text, plain.generate(ids, max_new_tokens=20))


def test_heads_that_share_a_layer_are_trimmed_by_default(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of four gets rows of its own, a quarter of those that they compute now all together."""
    model = AutoModelForCausalLM.from_pretrained("target")
    drafter = made("medusa", model, heads=4, output="shared")
    save_drafter(drafter, "shared", Manifest("medusa", "target", fingerprint(model)))
    assert main(["trim", "shared", "few", "--text", "text.jsonl"]) == 0
    size = model.config.vocab_size // 4 // 4
    assert f"It proposes {size} of " in capsys.readouterr().out
    few: Any = headstart.load("target", "few")
    assert few.drafter.output.shape[:2] == (4, size)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["whole", "few", "--text", "none.jsonl"], "--text none.jsonl is not there"),
        (["whole", "target", "--text", "text.jsonl"], "target is not empty"),
        (["whole", "few", "--text", "text.jsonl", "--tokens", "4000"], "expected 1 … 255"),
        (
            ["lookup", "few", "--text", "text.jsonl", "--target", "target"],
            "a lookup drafter has no",
        ),
        (["lookup", "few", "--text", "text.jsonl"], "does not say which model it drafts"),
    ],
)
def test_mistakes(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["trim", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("headstart: error: ") and said in error
    assert not Path("few").exists()
