"""An artifact made of somebody else's checkpoint: what it says, and what is not converted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from headstart.cli import main
from headstart.heads import ArtifactError, load_drafter
from headstart.heads.artifacts import source as source_module
from headstart.heads.artifacts.conversion import convert
from headstart.heads.artifacts.license import LICENSE, license_of
from headstart.heads.artifacts.manifest import read_manifest
from headstart.heads.artifacts.publish import clean_copy
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.artifacts.trimming import save_trimmed
from headstart.infer import Speculator
from tests.support.artifacts import OLD, save, value_of
from tests.support.bytewise import save_target
from tests.support.published_hydra import public
from tests.support.tiny import VOCAB, one_line, tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    folder = tmp_path_factory.mktemp("model") / "target"
    _, tokenizer = save_target(folder)
    return AutoModelForCausalLM.from_pretrained(folder), tokenizer, folder


def checkpoint(folder: Path) -> Path:
    """Three Medusa heads in the authors' second layout, bfloat16."""
    folder.mkdir()
    (folder / "config.json").write_text('{"medusa_num_heads": 1}')
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = torch.randn(32, 32).bfloat16()
        tensors[f"{head}.0.linear.bias"] = torch.randn(32).bfloat16()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def test_it_becomes_an_artifact(target: Any, tmp_path: Path) -> None:
    model, tokenizer, _ = target
    theirs = checkpoint(tmp_path / "theirs")
    ours = convert(theirs, model, tokenizer, tmp_path / "ours")
    manifest = read_manifest(ours)
    assert (manifest.family, manifest.origin) == ("medusa", str(theirs))
    assert (manifest.metrics, manifest.recipe) == ({}, {})
    assert "Nothing was measured" in (ours / "README.md").read_text()
    kept: Any = load_drafter(ours, model, tokenizer, dtype="auto")
    first: Any = load_drafter(theirs, model, dtype="auto")
    assert kept.dtype == torch.bfloat16 and torch.equal(kept.weight, first.weight)
    text = Speculator(model, kept).generate(torch.tensor([[7, 8, 9]]), max_new_tokens=8)
    assert text.shape == (1, 11)

    # What is pushed names the origin without the path of this machine.
    (tmp_path / "out").mkdir()
    clean_copy(ours, tmp_path / "out", "me/drafter", "me/base")
    assert json.loads((tmp_path / "out" / "headstart.json").read_text())["origin"] == "theirs"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "made from `theirs`" in card and str(tmp_path) not in card


OWN = {"license": "other", "license_name": "their-own", "license_link": "LICENSE.md"}
MET = {"license": "other", "license_name": "x: y", "license_link": "https://their.org/license"}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"license": "apache-2.0", "tags": ["medusa"]}, {"license": "apache-2.0"}),
        (OWN, {key: OWN[key] for key in ("license", "license_name")}),  # no such file here
        (MET, MET),
        ({"license": ["mit"], "license_name": "x"}, {}),
        ("no: {mapping", {}),
        (None, {}),
    ],
)
def test_the_card_names_the_licence_of_the_checkpoint(
    said: Any, kept: dict[str, str], target: Any, tmp_path: Path
) -> None:
    """Which goes with what is made of it, and is pushed unless another one is given."""
    model, tokenizer, _ = target
    theirs = checkpoint(tmp_path / "theirs")
    if said is not None:
        front = said if isinstance(said, str) else yaml.safe_dump(said)
        (theirs / "README.md").write_text(f"---\n{front}\n---\n\n# Heads\n\n---\n")
    ours = convert(theirs, model, tokenizer, tmp_path / "ours")
    drafter: Any = load_drafter(ours, model, tokenizer, dtype="auto")
    ids, smaller = torch.arange(8), tmp_path / "smaller"
    save_trimmed(drafter, DrafterSource(ours), tokenizer, ids, smaller)
    for number, (made, given) in enumerate(((ours, {}), (smaller, {}), (ours, {"license": "mit"}))):
        (out := tmp_path / f"out-{number}").mkdir()
        clean_copy(made, out, "me/drafter", "me/base", given)
        data = ModelCard.load(out / "README.md").data.to_dict()
        found = {key: data[key] for key in LICENSE if key in data}
        assert found == (given or kept)


def test_a_module_in_its_targets_files_has_their_licence(target: Any) -> None:
    model, _, folder = target
    assert license_of(DrafterSource("mtp"), model) == {}
    card = folder / "README.md"
    card.write_text("---\nlicense: mit\n---\n")
    found = license_of(DrafterSource("mtp"), model)
    card.unlink()
    assert found == {"license": "mit"}


def test_a_link_to_a_file_of_a_repository_becomes_its_address(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = checkpoint(tmp_path / "theirs")
    (there / "README.md").write_text(f"---\n{yaml.safe_dump(OWN)}---\n")
    monkeypatch.setattr(source_module, "download", lambda name, files: there)
    monkeypatch.setattr(source_module, "file_names", lambda name: [])
    found = license_of(DrafterSource("org/heads@v2"), target[0])
    assert found["license_link"] == "https://huggingface.co/org/heads/blob/v2/LICENSE.md"


def test_the_targets_commit_is_noted(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And named where another commit's target is loaded."""
    model, tokenizer, _ = target
    monkeypatch.setattr(model.config, "_commit_hash", "0123456789" * 4, raising=False)
    ours = convert(checkpoint(tmp_path / "theirs"), model, tokenizer, tmp_path / "ours")
    assert read_manifest(ours).target_revision == "0123456789" * 4
    with pytest.raises(ArtifactError, match="at revision 0123456789"):
        load_drafter(ours, tiny("llama"))


def test_blocks_under_several_names_are_written_apart(target: Any, tmp_path: Path) -> None:
    """The authors' Hydra heads of three layers hold one block under two names."""
    model, tokenizer, _ = target
    config, tensors = public("mlp", 3)
    rows = model.get_input_embeddings().weight.shape[0]
    for name, tensor in tensors.items():
        if tensor.shape[:1] == (VOCAB,):
            wide = torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype)
            wide[:VOCAB] = tensor
            tensors[name] = wide
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(config))
    torch.save(tensors, theirs / "hydra_lm_head.pt")
    source = DrafterSource(theirs, allow_pickle=True)
    ours = convert(source, model, tokenizer, tmp_path / "ours")
    kept = load_drafter(ours, model, tokenizer, dtype="auto").state_dict()
    first = load_drafter(source, model, dtype="auto").state_dict()
    assert kept.keys() == first.keys() and "embed_tokens.weight" in kept
    assert all(torch.equal(kept[name], first[name]) for name in kept)


def test_a_smaller_model_becomes_an_artifact(target: Any, tmp_path: Path) -> None:
    model, tokenizer, place = target
    ours = convert(place, model, tokenizer, tmp_path / "ours")
    assert (read_manifest(ours).family, read_manifest(ours).origin) == ("draft_model", str(place))
    assert load_drafter(ours, model, tokenizer).max_depth is None


def test_what_is_not_converted(target: Any, tmp_path: Path) -> None:
    model, tokenizer, _ = target
    for name in (save(tmp_path / "artifact"), "lookup"):
        with pytest.raises(ArtifactError, match="not a checkpoint of another project") as caught:
            convert(name, model, tokenizer, tmp_path / "ours")
        one_line(caught.value)
    taken = checkpoint(tmp_path / "theirs")
    with pytest.raises(ArtifactError, match="no name"):
        convert(taken, tiny("llama"), tokenizer, tmp_path / "ours")


def test_nothing_is_replaced(
    target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trained drafter least of all; the command says so before it loads the target."""
    model, tokenizer, _ = target
    theirs, trained = checkpoint(tmp_path / "theirs"), save(tmp_path / "trained")
    before = (trained / "headstart.json").read_bytes()
    for taken in (theirs, trained):
        with pytest.raises(ArtifactError, match="is not empty; choose a new") as caught:
            convert(theirs, model, tokenizer, taken)
        one_line(caught.value)
    assert (theirs / "medusa_lm_head.safetensors").is_file()
    assert main(["convert", str(theirs), str(trained), "--target", "no such model"]) == 2
    assert f"{trained} is not empty" in capsys.readouterr().err
    assert (trained / "headstart.json").read_bytes() == before and value_of(trained) == OLD
    with pytest.raises(
        ArtifactError, match=r"cannot be made: .*headstart.json is a file"
    ) as caught:
        convert(theirs, model, tokenizer, trained / "headstart.json" / "folder")
    one_line(caught.value)
    (tmp_path / "empty").mkdir()
    assert read_manifest(convert(theirs, model, tokenizer, tmp_path / "empty")).family == "medusa"


def test_a_folder_that_cannot_be_written_is_refused_before_the_target_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = checkpoint(tmp_path / "theirs")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # read-only
    new = tmp_path / "new" / "folder"
    assert main(["convert", str(theirs), str(new), "--target", "no such model"]) == 2
    assert f"{new} cannot be made: {tmp_path} cannot be written to" in capsys.readouterr().err
