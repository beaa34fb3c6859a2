"""A draft model that proposes some tokens alone is saved whole, and says which they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headstart.heads import ArtifactError, Manifest, OptionError, fingerprint, load_drafter
from headstart.heads.artifacts.export import export_drafter
from headstart.heads.artifacts.manifest import sha256, tokenizer_hash
from headstart.heads.artifacts.saving import save_drafter
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.artifacts.trimming import save_trimmed
from headstart.heads.draft_model import DraftModel
from headstart.heads.pard import Pard
from headstart.train.fit.warm_start import start_from
from tests.support.bytewise import save_target
from tests.support.drafters import made
from tests.support.tiny import COMMON, one_line

IDS = torch.arange(1, 250, 3)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Any, Any]:
    """A target whose tokens are bytes, and its tokenizer."""
    _, tokenizer = save_target(tmp_path / "target")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "target"), tokenizer


def whole(target: Any, tied: bool, parallel: bool) -> Any:
    torch.manual_seed(6)
    sizes = {**COMMON, "vocab_size": target.config.vocab_size, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    if not parallel:
        return DraftModel.of(model).eval().bind(target)
    return Pard.of(model, depths=3, mask_token_id=5).eval().bind(target)


def saved(drafter: Any, tokenizer: Any, folder: Path) -> Path:
    target, family = drafter.target, drafter.config.family_name()
    manifest = Manifest(family, "target", fingerprint(target), tokenizer_hash(tokenizer))
    return save_drafter(drafter, folder, manifest)


def logits(drafter: Any) -> Any:
    tokens, count = torch.arange(3, 12).unsqueeze(0), torch.tensor([8])
    state, none = drafter.start(1, 20), torch.empty(1, 8, 0)
    drafter.prefill(state, none, tokens[:, :8], count)
    drafter.reserve(state, 9, 8)
    return drafter.begin(state, none[:, :1], tokens[:, 8:], torch.tensor([1])).logits


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_artifact(tied: bool, parallel: bool, tmp_path: Path, pair: Any) -> None:
    """transformers reads the whole model in it, and headstart the rows of the tokens."""
    target, tokenizer = pair
    drafter = whole(target, tied, parallel)
    source = DrafterSource(saved(drafter, tokenizer, tmp_path / "whole"))
    place = save_trimmed(drafter, source, tokenizer, IDS, tmp_path / "few")
    few: Any = load_drafter(place, target, tokenizer)
    assert type(few) is type(drafter) and torch.equal(few.draft_vocabulary, IDS)
    assert few.model.lm_head.weight.shape[0] == len(IDS) and few.language_model is None
    torch.testing.assert_close(logits(few), logits(drafter)[..., IDS])
    there = load_file(place / "model.safetensors")
    assert torch.equal(there.pop("draft_vocabulary"), IDS)
    before = load_file(tmp_path / "whole/model.safetensors")
    assert there.keys() == before.keys() and ("lm_head.weight" in there) is not tied
    assert all(torch.equal(there[name], before[name]) for name in there)
    read = AutoModelForCausalLM.from_pretrained(place)
    assert torch.equal(read.lm_head.weight, drafter.model.lm_head.weight)
    again = save_trimmed(few, DrafterSource(place), tokenizer, IDS[::2], tmp_path / "fewer")
    torch.testing.assert_close(
        logits(load_drafter(again, target, tokenizer)), logits(few)[..., ::2]
    )
    told = f"proposes {len(IDS[::2])} of {target.config.vocab_size} tokens"
    assert told in " ".join((again / "README.md").read_text().split())
    for form in ("vllm", "transformers"):
        with pytest.raises(ArtifactError, match="export the drafter that it was trimmed from"):
            export_drafter(few, form, tmp_path / "exported", tokenizer)
    assert not (tmp_path / "exported").exists()


def test_training_starts_from_no_trimmed_one(tmp_path: Path, pair: Any) -> None:
    target, tokenizer = pair
    drafter = made("draft_model", target, layers=1)
    source = DrafterSource(saved(drafter, tokenizer, tmp_path / "whole"))
    few = save_trimmed(drafter, source, tokenizer, IDS, tmp_path / "few")
    with pytest.raises(OptionError) as caught:
        start_from(str(few), made("draft_model", target, layers=1))
    assert "has (83,) at draft_vocabulary, expected nothing" in one_line(caught.value)


WRONG = [torch.tensor(ids) for ids in ([3, 2], [3, 999], [-1], [1.0])]


@pytest.mark.parametrize("ids", [*WRONG, IDS[:0]])
def test_tokens_that_are_none(ids: torch.Tensor, tmp_path: Path, pair: Any) -> None:
    target, tokenizer = pair
    drafter = whole(target, tied=False, parallel=False)
    with pytest.raises(ArtifactError) as caught:
        drafter.keep_tokens(ids)
    assert "expected ascending token ids below" in one_line(caught.value)
    assert drafter.draft_vocabulary is None
    folder = saved(drafter, tokenizer, tmp_path / "whole")
    weights, manifest = folder / "model.safetensors", folder / "headstart.json"
    digest = sha256(weights)
    save_file({**load_file(weights), "draft_vocabulary": ids}, weights)
    manifest.write_text(manifest.read_text().replace(digest, sha256(weights)))
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, target, tokenizer)
    assert "expected ascending token ids below" in one_line(caught.value)


def test_tokens_that_the_target_lacks(pair: Any) -> None:
    target, _ = pair
    sizes = {**COMMON, "vocab_size": target.config.vocab_size + 8}
    drafter = DraftModel.of(LlamaForCausalLM(LlamaConfig(**sizes))).eval()
    drafter.keep_tokens(torch.tensor([1, target.config.vocab_size]))
    with pytest.raises(OptionError, match="load the target that it was trimmed for"):
        drafter.bind(target)
