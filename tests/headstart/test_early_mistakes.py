"""Mistakes that names, configs and tokenizers show are told before any weights are read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import headstart
from headstart.cli import main
from tests.support.bytewise import save_heads, save_target
from tests.support.chats import GEMMA

CONTEXT = 256  # tokens, of the target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    save_target(folder)
    return str(folder)


@pytest.fixture(scope="module")
def strict(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same target with a chat template that refuses a system's message."""
    folder = tmp_path_factory.mktemp("strict") / "target"
    shutil.copytree(target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = GEMMA
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def heads(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An artifact of two heads."""
    return save_heads(target, tmp_path_factory.mktemp("drafter") / "heads")


@pytest.fixture(scope="module")
def parallel(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model that drafts three tokens at once."""
    folder = tmp_path_factory.mktemp("parallel") / "heads"
    return save_heads(target, folder, None, "pard", layers=1, depths=3)


class WeightsAreRead(Exception):
    pass


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*given: Any, **options: Any) -> None:
        raise WeightsAreRead

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", read)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"import os{n}"}) + "\n" for n in range(8)))
    return str(path)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    (error,) = filter(None, capsys.readouterr().err.splitlines())
    return error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "generate --prompt x --drafter HEADS --tree chain:3",
            "but the drafter proposes 2",
        ),
        ("generate --prompt x --drafter HEADS --tree chain:2+chain:2", "2 parts, found 1 drafter;"),
        ("generate --prompt x --drafter lookup --drafter HEADS --tree chain:2", "found 2; give a"),
        (
            "generate --prompt x --drafter HEADS --rule greedy --temperature 1",
            "RULE",
        ),
        ("chat --rule greedy --temperature 1", "RULE"),
        ("bench --prompts PROMPTS --rule greedy --temperature 1", "RULE"),
        ("bench --prompts PROMPTS --drafter HEADS --tree chain:3", "the drafter proposes 2 tokens"),
        (
            "bench --prompts PROMPTS --drafter lookup --drafter HEADS --separately --tree chain:1+"
            "chain:1",
            "lookup decodes alone, and no tree of chain:1+chain:1 is for one drafter",
        ),
        ("generate --prompt x --chat", "has no chat template; leave out --chat"),
        ("generate --prompt x --max-new-tokens 5000", "1 token and 5,000 new tokens are asked for"),
        ("verify-lossless --prompts PROMPTS --new-tokens 5000", "5,000 new tokens are asked for"),
        ("bench --prompts PROMPTS --new-tokens 5000", f"for {CONTEXT} in all; ask for at most 255"),
        ("verify-lossless --prompts PROMPTS --draws 99", "expected a whole number from 100"),
        ("verify-lossless --prompts PROMPTS --rule greedy", "RULE"),
        ("doctor --drafter HEADS --prompts PROMPTS --limit 1", "found 1 prompt with --limit 1"),
        ("plan --drafter HEADS --prompts PROMPTS --max-nodes 1", "expected a whole number from 2"),
        ("plan --drafter HEADS --prompts PROMPTS --new-tokens 5000", "ask for at most 255"),
    ],
)
def test_no_weights_are_read_before_a_mistake_is_told(
    words: str,
    said: str,
    target: str,
    heads: str,
    prompts: str,
    no_weights: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [{"HEADS": heads, "PROMPTS": prompts}.get(word, word) for word in words.split()]
    assert main([given[0], "--target", target, *given[1:]]) == 2
    rule = "--rule greedy with --temperature above 0; use one that samples"
    assert said.replace("RULE", rule) in last_line(capsys)


@pytest.mark.parametrize(
    "words",
    [
        "generate --prompt x --drafter HEADS --tree chain:2",
        "generate --prompt x --drafter lookup --drafter HEADS --tree chain:9+chain:2",
        "generate --prompt x --drafter HEADS --rule greedy",
        "bench --prompts PROMPTS --drafter HEADS --tree chain:2 --report none",
        "verify-lossless --prompts PROMPTS --rule greedy --temperature 0",
        "doctor --drafter HEADS --prompts PROMPTS --limit 4",
        "plan --drafter HEADS --prompts PROMPTS --max-nodes 2 --report none",
    ],
)
def test_weights_are_read_where_there_is_no_mistake(
    words: str, target: str, heads: str, prompts: str, no_weights: None
) -> None:
    given = [{"HEADS": heads, "PROMPTS": prompts}.get(word, word) for word in words.split()]
    with pytest.raises(WeightsAreRead):
        main([given[0], "--target", target, *given[1:]])


def test_a_template_without_a_system_message_is_told(
    strict: str, no_weights: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--target", strict, "--system", "be brief"]) == 2
    assert "refuses a chat of the roles system, user; leave out --system" in last_line(capsys)
    for given in ([], ["--system", ""]):
        with pytest.raises(WeightsAreRead):
            main(["chat", "--target", strict, *given])


@pytest.mark.parametrize(
    ("drafter", "options", "said"),
    [
        ("lookup", {"rule": "greedier"}, "rule is 'greedier'"),
        ("lookup", {"tree": "chian:4"}, "tree is 'chian:4'"),
        ("lookup", {"expansion": "topp"}, "expansion is 'topp'"),
        ("lookup", {"rule": "block", "tree": "cartesian:2,2"}, "takes a chain"),
        ("HEADS", {"tree": "chain:3"}, "the drafter proposes 2 tokens"),
        ("HEADS", {"tree": {(1, 0.0): "chain:3"}}, "the drafter proposes 2 tokens"),
        (None, {"tree": "chain:3"}, "needs a drafter"),
        ("lookupp/x", {}, "lookupp/x"),
        ("./lookupp", {}, "neither a folder"),
    ],
)
def test_load_finds_mistakes_before_it_reads_weights(
    drafter: str | None,
    options: dict[str, Any],
    said: str,
    target: str,
    heads: str,
    no_weights: None,
) -> None:
    named = heads if drafter == "HEADS" else drafter
    with pytest.raises(ValueError, match=said):
        headstart.load(target, named, **options)
    with pytest.raises(WeightsAreRead):
        headstart.load(target, heads, tree="chain:2", rule="match")


@pytest.mark.parametrize("ours", [True, False], ids=["artifact", "model"])
def test_what_a_model_drafts_at_once_is_told_before_its_weights_are_read(
    ours: bool, target: str, parallel: str, no_weights: None, tmp_path: Path
) -> None:
    place = Path(parallel)
    if not ours:
        place = tmp_path / "published"
        shutil.copytree(parallel, place, ignore=shutil.ignore_patterns("headstart.json"))
    with pytest.raises(ValueError, match="chain:4 is 4 deep, but the drafter proposes 3 tokens"):
        headstart.load(target, place, tree="chain:4")
    for tree in ("chain:3", None):
        with pytest.raises(WeightsAreRead):
            headstart.load(target, place, tree=tree)


def test_a_target_without_a_tokenizer_is_told(
    target: str, no_weights: None, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(target) / name, bare / name)
    with pytest.raises(ValueError, match="holds no tokenizer that can be read"):
        headstart.load(bare)


def test_greedy_text_alone_is_compared_at_temperature_0(
    target: str, heads: str, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify-lossless", "--target", target, "--drafter", heads, "--prompts", prompts]
    command += ["--limit", "1", "--new-tokens", "4", "--draws", "100", "--json"]
    assert main([*command, "--temperature", "0"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"greedy"}
    assert main(command) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"greedy", "sampled"}
    assert main([*command[:-1], "--temperature", "0"]) == 0
    printed = capsys.readouterr().out
    assert "Sampled" not in printed and "All of 4 tokens after 1 prompt are" in printed


def test_a_folder_of_an_adapter_is_a_target(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has a tokenizer, and no config of the model."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(target), LoraConfig())
    model.save_pretrained(str(tmp_path / "adapted"))
    AutoTokenizer.from_pretrained(target).save_pretrained(tmp_path / "adapted")
    given = ["--drafter", "lookup", "--prompt", "import os", "--max-new-tokens", "4"]
    assert main(["generate", "--target", str(tmp_path / "adapted"), *given]) == 0
    assert capsys.readouterr().out
