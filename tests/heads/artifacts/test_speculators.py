"""Heads go to the speculators library and come from it: its own code computes the same logits.

Its pins exclude ours, so it runs in an environment of its own, which `.ci/speculators` makes.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from headstart.heads import family, load_drafter
from headstart.heads.artifacts.export import export_drafter
from tests.support.paths import ROOT, SPECULATORS
from tests.support.published_eagle3 import VARIANTS
from tests.support.shipped_mtp import HYBRIDS
from tests.support.tiny import COMMON, VOCAB

SIZE, KEPT = COMMON["hidden_size"], 20
LAYERS = [0, 2, 3]
pytestmark = pytest.mark.speculators


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    sizes: dict[str, Any] = COMMON | {"num_hidden_layers": 4}
    return saved(LlamaForCausalLM, LlamaConfig(**sizes), tmp_path_factory.mktemp("target"))


def saved(kind: Any, config: Any, folder: Path) -> Any:
    """A random model with a folder of its own."""
    torch.manual_seed(1)
    model = kind(config).eval()
    model.save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


@dataclass(frozen=True)
class Published:
    """A variant of published heads, by its name, and the layers that it reads."""

    name: str
    layers: list[int]

    def write(self, folder: Path) -> None:
        theirs = VARIANTS[self.name]
        folder.mkdir()
        named = {"eagle_aux_hidden_state_layer_ids": self.layers}
        (folder / "config.json").write_text(json.dumps(theirs.config | named))
        save_file(theirs.tensors(), folder / "model.safetensors")


def drafter_of(target: Any, name: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    cls: Any = family(name)
    drafter: Any = cls(cls.config_class.for_target(target, **options)).bind(target)
    drafter.init_from_target(torch.arange(VOCAB).flip(0))
    for parameter in drafter.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return drafter.eval()


def pairs(drafter: Any, features: torch.Tensor, tokens: torch.Tensor, depths: int) -> torch.Tensor:
    """Our logits [depths, T, Vd] of T pairs (features [1, T, F], tokens [1, T])."""
    # Pair t is (feature t, token t + 1) here; theirs are given side by side.
    where = torch.ones(tokens.shape, dtype=torch.bool)
    shifted = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    states = drafter.draft_hidden_states(features, shifted, where, depths)
    return torch.stack([drafter.draft_logits(k + 1)(states[k]) for k in range(depths)])


@cache
def process(path: str) -> Any:
    """One of the library for all tests, which takes long to import; it ends with its input."""
    script = Path(__file__).with_name("speculators_logits.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [str(SPECULATORS), str(script)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip


def run(kind: str, folder: Path, path: str = "") -> None:
    """Run the library on a folder, see `speculators_logits.py`."""
    library = process(path)
    print(json.dumps([kind, str(folder)]), file=library.stdin, flush=True)
    failure = library.stdout.readline()
    assert failure == "\n", json.loads(failure) if failure else "its process has ended"


def layer(target: Any) -> dict[str, Any]:
    config = target.config.to_dict()
    names = (
        "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
        "num_key_value_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    return {name: config[name] for name in names} | {"num_hidden_layers": 1}


def speculators_config(target: Any, kind: str) -> dict[str, Any]:
    return {
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": target.name_or_path, "architectures": ["LlamaForCausalLM"],
            },
        },
        "transformer_layer_config": layer(target),
    }  # fmt: skip


def compared(
    kind: str,
    target: Any,
    exported: dict[str, Any],
    written: dict[str, dict[str, Any]],
    folder: Path,
    path: str = "",
) -> None:
    """Both ways: our exports in the library, and its heads here, with the same logits each.

    Args:
        exported: options of our drafters, or what others published.
        written: fields of the library's configs.
    """
    drafters, ours_of = {}, {"peagle": "eagle3", "dspark": "dflash"}
    generator = torch.Generator().manual_seed(0)
    for name, options in exported.items():
        case = folder / "read" / name
        case.mkdir(parents=True)
        if isinstance(options, Published):
            options.write(case / "given")
            drafter: Any = load_drafter(case / "given", target)
        else:
            drafter = drafter_of(target, ours_of.get(kind, kind), options)
        drafters[name] = drafter
        export_drafter(drafter, "speculators", case / "out")
        width = len(drafter.config.feature_layers) * SIZE
        features = torch.randn(1, 9, width, generator=generator)
        tokens = torch.randint(VOCAB, (1, 9), generator=generator)
        torch.save({"features": features, "tokens": tokens}, case / "in.pt")
    (folder / "write").mkdir()
    for name, fields in written.items():
        text = json.dumps(speculators_config(target, kind) | fields)
        (folder / "write" / f"{name}.json").write_text(text)
    run(kind, folder, path)
    for name in (*exported, *written):
        case = folder / ("read" if name in exported else "write") / name
        drafter = drafters.get(name) or load_drafter(case / "out", target)
        assert type(drafter) is family(ours_of.get(kind, kind))
        theirs, (first, ahead) = torch.load(case / "logits.pt"), torch.load(case / "places.pt")
        depths = int(ahead.max()) + 1
        assert depths == (1 if kind in ("eagle", "eagle3", "mtp") else 3)
        # A state that needs a token past the end may be anything; theirs may begin before the text.
        known = (first + ahead < 8) & (first >= 0)
        assert known.sum() >= (12 if ours_of.get(kind, kind) == "dflash" else 8 * depths - 6)
        ours = pairs(drafter, **torch.load(case / "in.pt"), depths=depths)[ahead, first][known]
        worst = (ours - theirs[known]).abs().max() / ours.abs().max()
        assert worst <= 1e-5, (name, worst)
        if name in written and kind not in ("eagle", "mtp"):
            assert list(drafter.config.feature_layers) == LAYERS


@torch.no_grad()
def test_eagle3(target: Any, tmp_path: Path) -> None:
    read, trimmed = {"feature_layers": LAYERS}, {"output": "trimmed", "draft_vocab_size": KEPT}
    own = {"draft_vocab_size": KEPT, "eagle_aux_hidden_state_layer_ids": LAYERS}
    exported = {
        "plain": read,
        "trimmed": read | trimmed,
        "norm-before-residual": read | trimmed | {"norm_before_residual": True},
        "norm-before-fc": read | trimmed | {"norm_before_fc": True, "norm_output": True},
        "two-layers-of-the-target": {"feature_layers": LAYERS[:2], "fc_norm": True},
        "published": Published("of all", [0, 2, 4]),
    }
    written = {
        "own": own,
        "own-whole": own | {"draft_vocab_size": VOCAB},
        "own-norm-before-residual": own | {"norm_before_residual": True},
        "own-norm-before-fc": own | {"norm_before_fc": True},
        "own-fc-norm": own | {"fc_norm": True, "norm_output": True},
    }
    compared("eagle3", target, exported, written, tmp_path)


@torch.no_grad()
def test_peagle(target: Any, tmp_path: Path) -> None:
    """Every token of a round, all of them drafted at once, at every place where a round begins."""
    own = {"mask_token_id": 7, "eagle_aux_hidden_state_layer_ids": LAYERS}
    exported = {
        "published": Published("P-EAGLE", [0, 2, 4]),
        "published-two-layers": Published("P-EAGLE of two layers", [0, 2, 4]),
    }
    written = {
        "own": own | {"draft_vocab_size": KEPT},
        "own-whole": own | {"draft_vocab_size": VOCAB, "norm_before_residual": True},
    }
    compared("peagle", target, exported, written, tmp_path)


@torch.no_grad()
def test_mtp(tmp_path: Path) -> None:
    target = saved(Qwen3ForCausalLM, Qwen3Config(**COMMON), tmp_path / "target")
    own = {"transformer_layer_config": {**COMMON, "model_type": "qwen3"}}
    compared("mtp", target, {"plain": {"depths": 3}}, {"own": own}, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("kind", HYBRIDS)
def test_mtp_of_hybrids(kind: str, tmp_path: Path) -> None:
    """Whose norms store their scale - 1."""
    target = HYBRIDS[kind]().float().eval()
    target.save_pretrained(tmp_path / "target")
    target.name_or_path = str(tmp_path / "target")
    own = {"transformer_layer_config": target.config.to_dict()}
    # The library gives no values to experts of its own.
    written = {} if "num_experts" in target.config.to_dict() else {"own": own}
    compared("mtp", target, {"plain": {"depths": 3}}, written, tmp_path)


QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2}


def blocks_of(target: Any) -> dict[str, Any]:
    """Fields of the library's own configs of block drafters."""
    types = {"layer_types": ["full_attention"] * 2}
    return {
        "transformer_layer_config": layer(target) | QWEN3 | types, "mask_token_id": 7,
        "aux_hidden_state_layer_ids": LAYERS, "draft_vocab_size": VOCAB,
    }  # fmt: skip


@torch.no_grad()
def test_dflash(target: Any, tmp_path: Path) -> None:
    read = {"feature_layers": LAYERS, "layers": 2, "depths": 3}
    own = blocks_of(target) | {"block_size": 4}
    exported = {
        "plain": read,
        "trimmed": read | {"output": "trimmed", "draft_vocab_size": KEPT},
        "from-anchor": read | {"sample_from_anchor": True},
    }
    written = {"own": own, "own-trimmed": own | {"draft_vocab_size": KEPT}}
    compared("dflash", target, exported, written, tmp_path)


@torch.no_grad()
def test_dspark(target: Any, tmp_path: Path) -> None:
    read = {"feature_layers": LAYERS, "layers": 2, "depths": 3, "markov_rank": 5}
    own = blocks_of(target) | {"block_size": 3, "markov_rank": 6}
    exported = {
        "plain": read | {"sample_from_anchor": True},
        "gated": read | {"markov_head_type": "gated"},
        "rnn": read | {"markov_head_type": "rnn", "sample_from_anchor": True},
        "trimmed": read | {"output": "trimmed", "draft_vocab_size": KEPT},
    }
    written = {
        "own": own,
        "own-rnn": own | {"markov_head_type": "rnn"},
        "own-trimmed": own | {"draft_vocab_size": KEPT, "enable_confidence_head": False,
                              "confidence_head_with_markov": False},
    }  # fmt: skip
    compared("dspark", target, exported, written, tmp_path)


@torch.no_grad()
def test_eagle1(target: Any, tmp_path: Path) -> None:
    exported = {"plain": {"bias": False}, "bias": {}}
    written = {
        "own": {"layernorms": False, "fusion_bias": False},
        "own-bias": {"layernorms": False, "fusion_bias": True},
    }
    path = str(SPECULATORS.parent.parent / "eagle1")
    compared("eagle", target, exported, written, tmp_path, path)


def test_the_environment_is_made_by_the_script() -> None:
    """What .ci/speculators pins is what is compared with."""
    made_of = (SPECULATORS.parent.parent / "made-of").read_text()
    assert "speculators==0.9.0" in made_of and made_of.strip() != ""
    assert all(pin in (ROOT / ".ci" / "speculators").read_text() for pin in made_of.split())
