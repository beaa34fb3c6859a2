"""Python code that comes with a model: never run unasked, whatever stands on stdin."""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import headstart
from headstart.cli import main
from headstart.heads import ArtifactError, HeadstartError, load_drafter
from headstart.heads.core import load_pretrained
from headstart.heads.draft_model import DraftModel, DraftModelConfig
from headstart.train.data.target_text import sample_documents
from tests.support.bytewise import save_target
from tests.support.hostile_code import CODE
from tests.support.paths import ROOT
from tests.support.tiny import COMMON, one_line, tiny

MODEL = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "code.Own"]}, "tokenizer_class": "Own"}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the code writes; stdin agrees to everything."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    monkeypatch.setattr("sys.path", [*sys.path])
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    return tmp_path / "ran"


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def folder(marker: Path, model: bool = False, tokenizer: bool = False) -> str:
    """A model of which the model, or its tokenizer, has code of its own."""
    place = marker.parent / "own"
    save_target(place)
    (place / "code.py").write_text(CODE.format(marker=str(marker)))
    change(place / "tokenizer_config.json", bos_token="!")
    if model:
        change(place / "config.json", auto_map=MODEL, model_type="own_llama")
    if tokenizer:
        change(place / "tokenizer_config.json", **TOKENIZER)
    return str(place)


def bytewise(marker: Path) -> tuple[Any, Any]:
    return save_target(marker.parent / "target")


WAYS = {
    "load": lambda name, marker: headstart.load(name),
    "generate": lambda name, marker: command("generate", "--target", name, "--prompt", "x"),
    "drafter": lambda name, marker: headstart.load(bytewise(marker)[0], name),
    "given": lambda name, marker: load_drafter(name, *bytewise(marker), trust_remote_code=True),
    "corpus": lambda name, marker: next(sample_documents(name, 4, 0)),
    "student": lambda name, marker: DraftModelConfig.for_target(tiny("llama"), model=name),
}


def command(*arguments: str) -> None:
    """Run a command; its error is raised again, as the line that it printed."""
    error, sys.stderr = sys.stderr, io.StringIO()
    try:
        status, said = main(arguments), sys.stderr.getvalue()
    finally:
        sys.stderr = error
    if status == 2:
        raise HeadstartError(said.splitlines()[-1])


@pytest.mark.parametrize("way", ["load", "generate", "drafter", "given", "corpus", "student"])
def test_a_model_s_code_is_not_run(way: str, marker: Path) -> None:
    with pytest.raises(HeadstartError) as caught:
        WAYS[way](folder(marker, model=True), marker)
    said = one_line(caught.value)
    assert "own_llama" in said or "--trust-remote-code" in said
    assert not marker.exists()


@pytest.mark.parametrize("way", ["load", "generate", "drafter", "given", "corpus"])
def test_a_tokenizer_s_code_is_not_run(way: str, marker: Path) -> None:
    with pytest.raises(HeadstartError) as caught:
        WAYS[way](folder(marker, tokenizer=True), marker)
    assert "--trust-remote-code" in one_line(caught.value)
    assert not marker.exists()


def test_code_for_a_known_type_is_not_run(marker: Path) -> None:
    """A student of a type that is known, but not as a causal language model."""
    student = tf.T5Config(d_model=8, num_layers=1, num_heads=1, d_ff=8).to_dict()
    own = {"AutoModelForCausalLM": f"{folder(marker)}--code.Model"}
    with pytest.raises(ValueError, match="trust_remote_code"):
        DraftModel(DraftModelConfig(student=student | {"auto_map": own}))
    assert not marker.exists()


def test_a_target_that_is_trusted(marker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = folder(marker, model=True, tokenizer=True)
    speculator = headstart.load(name, trust_remote_code=True, dtype=torch.float32)
    kinds = type(speculator.model).__name__, type(speculator.tokenizer).__name__
    assert kinds == ("Model", "Own")
    marker.unlink()
    shutil.rmtree(marker.parent / "modules")
    trusted = ["generate", "--target", name, "--trust-remote-code", "--prompt", "x"]
    sys.modules.pop("transformers_modules.own.code", None)
    assert main([*trusted, "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    # A target that only a drafter names is not trusted.
    assert main(["generate", "--drafter", name, "--trust-remote-code", "--prompt", "x"]) == 2
    assert "--target; name one" in capsys.readouterr().err


def test_a_drafter_is_not_trusted_with_the_target(marker: Path) -> None:
    bytewise(marker)
    with pytest.raises(HeadstartError, match="a target's"):
        headstart.load(
            marker.parent / "target", folder(marker, tokenizer=True), trust_remote_code=True
        )
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"\x80\x02pickle", (2**60).to_bytes(8, "little") + b"{}"])
def test_a_target_whose_weights_are_damaged(
    content: bytes, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = folder(marker)
    (Path(name) / "model.safetensors").write_bytes(content)
    assert main(["generate", "--target", name, "--prompt", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and "safetensors" in line


def test_every_auto_class_is_called_through_it() -> None:
    rooms = [ROOT / name for name in ("heads", "infer", "train", "headstart")]
    direct = [
        path.name
        for room in rooms
        for path in room.rglob("*.py")
        if path.name != "pretrained.py"
        and re.search(r"\bAuto\w+\.from_pretrained\(", path.read_text(encoding="utf-8"))
    ]
    assert not direct


@pytest.mark.parametrize("config", [None, '{"tokenizer_class": "LlamaTokenizer"}'])
def test_a_folder_without_a_tokenizer(config: str | None, tmp_path: Path) -> None:
    """Of a config alone transformers makes a tokenizer in which every text is empty."""
    tf.LlamaConfig(**COMMON).save_pretrained(tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ArtifactError) as caught:
        load_pretrained(tf.AutoTokenizer, str(tmp_path))
    said = "holds no tokenizer that can be read, such as a tokenizer.json; save the model's beside"
    assert said in one_line(caught.value)
