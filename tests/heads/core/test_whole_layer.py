"""A decoder layer as one call writes what the layer itself writes, or leaves the work to it."""

import copy
from typing import Any

import pytest
import torch

from headstart.heads import TokenTree
from headstart.heads.core import Packing, whole_layer
from headstart.heads.core.whole_layer import WholeLayer, WholeLayers, take_whole_layers
from headstart.infer import Speculator
from headstart.infer.measure.lossless_greedy import agreement, compare_greedy
from headstart.infer.target import Target
from headstart.infer.trees.static import StaticTree
from tests.support.tiny import large_enough, prompts, tiny

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each call of layers how many of them the kernel computed: 0, one or all."""
    seen, true = list[int](), WholeLayers.run

    def counted(self: WholeLayers, *args: Any, **options: Any) -> Any:
        found = true(self, *args, **options)
        seen.append(0 if found is None else len(self.layers))
        return found

    monkeypatch.setattr(WholeLayers, "run", counted)
    return seen


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_what_it_writes_is_the_models_text_but_for_near_ties(
    name: str, ran: list[int], kernel_type: torch.dtype
) -> None:
    model = large_enough(kernel_type, name)
    ours = Speculator(model, compile=True)
    fused: Any = ours.target.fused
    assert fused.found["whole layers"] == model.config.num_hidden_layers
    rows = [row.unsqueeze(0) for row in prompts([9] * 3, seed=5)[0]]
    assert compare_greedy(ours, rows, 24).holds
    assert ran and all(ran) == (name != "mistral")  # a window has a mask of its own kind
    assert not any("forward" in vars(part) for part in model.modules())


def test_rows_of_uneven_length_run_whole_and_listened_layers_as_they_are(
    ran: list[int], kernel_type: torch.dtype
) -> None:
    model = large_enough(kernel_type)
    ours = Speculator(model, compile=True)
    ids, mask = prompts([4, 9])
    short = ids[:1, -4:]  # the shorter one without its padding
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}

    def padded_and_alone(writer: Any) -> tuple[int, bool, float, float]:
        """Tokens that agree, whether any differs, and the difference and margin of logits."""
        both = writer.generate(ids, attention_mask=mask, **options)
        alone = writer.generate(short, **options)
        same, differs = agreement(alone.sequences, both.sequences[:1, -28:], short)
        steps = list(zip(both.logits, alone.logits, strict=True))[: same + 1]
        largest = max(float((one[0] - other[0]).abs().max()) for one, other in steps)
        best, second = steps[-1][1][0].float().topk(2).values.tolist()
        return same, differs, largest, best - second

    ran.clear()
    ours.generate(ids, attention_mask=mask, **GREEDY)
    assert set(ran) == {model.config.num_hidden_layers}
    *_, noise, _ = padded_and_alone(model)
    same, differs, largest, margin = padded_and_alone(ours)
    assert largest <= 2 * noise and (margin <= 2 * noise if differs else same == 24)
    runner: Any = ours.target.runner
    heard = list[int]()
    handle = runner.model.layers[0].mlp.register_forward_hook(lambda *_: heard.append(1))
    ran.clear()
    ours.generate(ids[1:], **GREEDY)
    assert set(ran) == {0, 1} and len(heard) > 20
    handle.remove()


def test_a_layer_that_is_not_a_llamas_is_left(
    monkeypatch: pytest.MonkeyPatch, kernel_type: torch.dtype
) -> None:
    for name in ("gemma3", "gpt2"):
        model = copy.deepcopy(tiny(name)).to(kernel_type)
        assert all(WholeLayer.of(layer) is None for layer in model.modules())
    model = Packing().copy(large_enough(kernel_type))
    monkeypatch.setattr(whole_layer, "_SLACK", 1e-3)
    assert take_whole_layers(model) == 0
    monkeypatch.undo()
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    assert take_whole_layers(model) == 0
    model.model.layers[0].mlp.act_fn = torch.nn.SiLU()
    assert take_whole_layers(model) == model.config.num_hidden_layers


@pytest.mark.parametrize("nodes", [1, 6, 43])
def test_features_are_those_of_the_layers(nodes: int, kernel_type: torch.dtype) -> None:
    """The hooks that capture them stand around the layers; and logits are as exact."""
    model = large_enough(kernel_type)
    ids = prompts([9])[0]
    siblings = StaticTree([[rank] for rank in range(nodes - 1)])
    topology, row = siblings.shape(1, ids.device)
    tree = TokenTree(ids[:, :1].repeat(1, nodes), topology, None, row)
    found = []
    for made, packed in ((model, True), (model, False), (copy.deepcopy(model).double(), False)):
        target = Target(made, (0, 1, 2), compile=packed)
        with torch.no_grad():
            target.prefill(ids, [9], 9 + nodes)
            found.append(target.verify(tree, torch.tensor([9]), 9, True))
    for ours, own, true in zip(*found, strict=True):
        assert ours.shape == true.shape
        errors = [(each.double() - true).norm() for each in (ours, own)]
        assert errors[0] <= 1.2 * errors[1]
