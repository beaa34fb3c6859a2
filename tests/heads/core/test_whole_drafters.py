"""Layers of EAGLE and EAGLE-3 as one call compute what the layers themselves compute."""

from typing import Any

import pytest
import torch

from headstart.heads import family
from headstart.heads.core.whole_layer import WholeLayers
from headstart.heads.core.whole_model import WholeModel
from headstart.infer import Speculator
from headstart.infer.measure.lossless_greedy import compare_greedy
from tests.support.tiny import large_enough, prompts

ALIKE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of the largest number

NORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle": ("eagle", {}, {}),
    "eagle3": ("eagle3", {}, {}),
    "adds to its normed input": ("eagle3", {"norm_before_residual": True}, {}),
    "norms of queries and keys": ("eagle3", {}, {"qk_norm": True}),
    "a Qwen3 without such norms": ("eagle3", {}, {"sliding_window": 6}),
    "a window": ("eagle", {}, {"sliding_window": 6, "layer_types": ["sliding_attention"]}),
    "dflash": ("dflash", {"layers": 2, "depths": 4}, {}),
    "mtp": ("mtp", {}, {}),
    "two layers": ("eagle", {}, {"num_hidden_layers": 2}),
}
"""The family, options of its config and of its layer."""

SHARES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a share of each head": ("eagle3", {"partial_rotary_factor": 0.5}, {}),
    "in a block": ("dflash", {"layers": 2, "depths": 4, "partial_rotary_factor": 0.25}, {}),
}
"""Likewise."""


def drafter(model: Any, name: str) -> Any:
    """One with random weights, whose norms are not ones."""
    of, options, layer = (NORMS | SHARES)[name]
    kind: Any = family(of)
    config = kind.config_class.for_target(model, **options)
    config.layer = {**config.layer, **layer}
    torch.manual_seed(5)
    made = kind(config).to(model.dtype).bind(model)
    made.init_from_target(torch.arange(model.config.vocab_size))
    for part, weight in made.named_parameters():
        drawn = torch.rand(weight.shape) + 0.5 if "norm" in part else torch.randn(weight.shape) / 20
        weight.data = drawn.to(model.dtype)
    return made.eval()


@pytest.mark.parametrize("name", NORMS)
def test_its_states_are_the_layers(
    name: str, kernel_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = large_enough(kernel_type)
    own = drafter(model, name)
    whole, true = list[bool](), WholeModel.run

    def both(self: WholeModel, *args: Any, **options: Any) -> Any:
        found = true(self, *args, **options)
        if self.model.config is own.model.config:
            whole.append(found is not None)
            if found is not None:
                states, expected = found[0].float(), own.model(*args, **options)[0].float()
                far = (states - expected).abs().max() / expected.abs().max()
                assert states.shape == expected.shape and far < ALIKE[kernel_type]
        return found

    monkeypatch.setattr(WholeModel, "run", both)
    tree = "best-first:6,3,3" if own.independent else "beam:3,3"
    ours = Speculator(model, own, tree=tree, compile=True)
    rows = [row.unsqueeze(0) for row in prompts([9], seed=5)[0]]
    assert compare_greedy(ours, rows, 16).holds
    assert len(whole) > (10 if own.independent else 30) and all(whole)
    assert not any("forward" in vars(part) for part in own.modules())


@pytest.mark.parametrize("name", SHARES)
def test_layers_that_turn_a_share_are_left_to_themselves(
    name: str, kernel_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel turns whole heads."""
    model = large_enough(kernel_type)
    own = drafter(model, name)
    whole, true = list[bool](), WholeLayers.run

    def counted(self: WholeLayers, *args: Any, **options: Any) -> Any:
        found = true(self, *args, **options)
        if self.layers[0].attention.config is own.model.config:
            whole.append(found is not None)
        return found

    monkeypatch.setattr(WholeLayers, "run", counted)
    ours = Speculator(model, own, tree="chain:3", compile=True)
    rows = [row.unsqueeze(0) for row in prompts([9], seed=5)[0]]
    assert compare_greedy(ours, rows, 16).holds
    whole.clear()  # its trial is made with angles of whole heads
    ours.generate(rows[0], max_new_tokens=8)
    assert whole and not any(whole)
