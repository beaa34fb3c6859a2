"""Options of the training forward: activations computed again, and a compiled forward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.train.fit.target_with_drafter import TargetWithDrafter
from tests.support.packed import apart, batches, module_of, slopes
from tests.support.tiny import tiny


def layers_of(module: TargetWithDrafter) -> Any:
    """The layers whose activations take memory: the drafter's own, or those of its target."""
    if module.drafter.adapter is not None:
        return tiny("llama").model.layers
    drafter: Any = module.drafter
    model = getattr(drafter, "prefix", None) or drafter.model
    return model.get_decoder().layers


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [("hydra", {"prefix": True}), ("eagle", {}), ("eagle3", {}), ("dflash", {"layers": 2}),
     ("mtp", {}), ("draft_model", {}), ("medusa2", {})],
)  # fmt: skip
def test_activations_computed_again_give_the_same_gradients(
    name: str, options: dict[str, Any], packed: bool
) -> None:
    module, batch = module_of(name, options, tiny("llama"), "forward_kl"), batches()[packed]
    runs: list[Any] = []
    layers = tiny("llama").model.layers
    before = [vars(layer).get("forward") for layer in layers]  # as other tests have left them

    def seen(layer: Any, given: Any) -> None:
        runs.append(layer)

    hooks = [layer.mlp.register_forward_pre_hook(seen) for layer in layers_of(module)]
    try:
        module.train()
        slopes(module, batch)  # a student is run once more at first, to find what its logits are
        runs.clear()
        torch.manual_seed(0)  # an adapter has dropout, which must draw the same again
        expected, once = slopes(module, batch), len(runs)
        runs.clear()
        module.set_up(activation_checkpointing=True, compile=False)
        torch.manual_seed(0)
        found, twice = slopes(module, batch), len(runs)
        assert apart(found, expected) <= 1e-12 and found[0] == pytest.approx(expected[0], rel=1e-12)
        # An adapter's target runs without a gradient, too, for the teacher.
        again = once // 2 if name == "medusa2" else once
        assert twice == once + again
    finally:
        for hook in hooks:
            hook.remove()
        module.release()
        if module.drafter.adapter is not None:
            module.drafter.adapter.detach()
    assert [vars(layer).get("forward") for layer in layers] == before


def test_a_drafter_without_layers_says_so() -> None:
    module = module_of("medusa", {}, tiny("llama"), "cross_entropy")
    with pytest.raises(OptionError, match="activation_checkpointing is true, but a medusa") as said:
        module.set_up(activation_checkpointing=True, compile=False)
    module.release()
    assert "\n" not in str(said.value)


def check_compiled(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (plain, packed) = module_of("redrafter", {}, tiny("llama"), "forward_kl"), batches()
    expected, asked = [slopes(module, batch) for batch in (plain, packed)], []
    real = torch.compile

    def compiled(function: Any, **how: Any) -> Any:
        asked.append(how)
        return real(function, backend=backend, **how)

    monkeypatch.setattr("torch.compile", compiled)
    states = type(module.drafter).draft_hidden_states
    module.set_up(activation_checkpointing=False, compile=True)
    found = [slopes(module, batch) for batch in (plain, packed)]
    module.release()
    assert asked == [{"dynamic": True}] and type(module.drafter).draft_hidden_states is states
    for one, two in zip(found, expected, strict=True):
        assert apart(one, two) <= 1e-10


def test_a_compiled_forward_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a compiler, and run as it is."""
    check_compiled("eager", monkeypatch)


@pytest.mark.proof
def test_so_does_one_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiled("inductor", monkeypatch)


def test_a_wrong_forward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the above."""
    module = module_of("eagle3", {}, tiny("llama"), "forward_kl")
    plain, _ = batches()
    expected, states = slopes(module, plain), module.drafter.draft_hidden_states

    def wrong(*given: Any, **how: Any) -> Tensor:
        return states(*given, **how).roll(1, 1)

    monkeypatch.setattr(module.drafter, "draft_hidden_states", wrong)
    assert apart(slopes(module, plain), expected) > 1e-3
    module.release()
