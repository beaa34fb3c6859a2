"""What recurrent layers keep of prompts and trees, and models that run over it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import SlabCache, UnsupportedTarget
from headstart.heads.core import (
    AttentionWindows,
    check_tree,
    mixers,
    prefill_forward,
    probe_layers,
    recurrent,
)
from headstart.heads.core.recurrent import (
    RecurrentLayer,
    RecurrentShape,
    RecurrentStates,
    TreeRun,
    Updates,
)
from headstart.heads.core.tree import ancestor_mask
from tests.support.recurrent import RECURRENT, fresh

CPU = torch.device("cpu")
SHAPE = RecurrentShape(CPU, torch.float64, ((3, 4),), (2, 5, 6))


def states(batch: int = 2) -> RecurrentStates:
    made = RecurrentStates({0: RecurrentLayer(SHAPE), 3: RecurrentLayer(SHAPE)})
    made.resize(batch)
    return made


def test_a_prompts_last_inputs_are_kept_row_by_row() -> None:
    own = states(3)
    own.run_prompts([5, 2, 0])
    inputs = torch.arange(1.0, 46).view(3, 3, 5).double()
    assert own.layers[3].update_conv_state(inputs) is inputs
    kept: Any = own.layers[3].conv_states[0]
    assert torch.equal(kept[0], inputs[0, :, 2:])
    assert torch.equal(kept[1], torch.cat([torch.zeros(3, 1), inputs[1, :, :2]], 1).double())
    assert (kept[2] == 0).all()
    other: Any = own.layers[0].conv_states[0]
    assert (other == 0).all()


@pytest.mark.parametrize("length", [1, 5])
def test_prompts_without_padding(length: int) -> None:
    own = states()
    inputs = torch.rand(2, 3, length).double()
    own.layers[0].update_conv_state(inputs)
    kept: Any = own.layers[0].conv_states[0]
    assert torch.equal(kept[..., -min(length, 3) :], inputs[..., -3:])


def test_a_trees_inputs_are_kept_along_the_path() -> None:
    own = states(3)
    kept: Any = own.layers[0].conv_states[0]
    kept.copy_(torch.rand(3, 3, 3))
    before = kept.clone()
    parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 1], [-1, 0, 1, 2]])
    own.run_tree(TreeRun(parents, ancestor_mask(parents)))
    inputs, state = torch.rand(3, 3, 4).double(), own.layers[0].recurrent_states[0]
    assert state is not None
    state.fill_(2)
    for layer in own.layers.values():
        layer.update_conv_state(inputs)
        layer.updates = Updates(*(torch.ones(3, 2, 4, n) for n in (5, 6, 1, 1)))
    assert torch.equal(kept, before)
    own.commit(torch.tensor([3, 0, -1]))
    assert torch.equal(kept[0], inputs[0][:, [0, 2, 3]])
    assert torch.equal(kept[1], torch.cat([before[1, :, 1:], inputs[1, :, :1]], 1))
    assert torch.equal(kept[2], before[2])  # of this row nothing was committed
    assert (state[2] == 2).all() and (state[:2] != 2).all()


def test_batches_share_one_memory() -> None:
    own = states(3)
    made = own.made
    for batch in (1, 3, 2):
        own.resize(batch)
        state: Any = own.layers[3].recurrent_states[0]
        assert state.shape == (batch, 2, 5, 6) and (state == 0).all()
        state.fill_(7)
    assert own.made == made
    own.resize(4)
    assert own.made > made


def test_rows_are_adopted() -> None:
    own, other = states(3), states(2)
    for slab in other._slabs.values():
        slab.copy_(torch.rand(slab.shape))
    own.adopt(other, torch.tensor([2, 0]))
    for key, slab in own._slabs.items():
        assert torch.equal(slab[:, [2, 0]], other._slabs[key]) and (slab[:, 1] == 0).all()


def test_bytes_are_those_that_are_held() -> None:
    own = states(1)
    assert own.bytes_of_row == sum(slab.nbytes for slab in own._slabs.values())
    cache = SlabCache(probe_layers(fresh("falcon-h1")), 2, 64)
    held = [*cache._slabs, *cache.recurrent._slabs.values()]  # type: ignore[union-attr]
    assert cache.bytes_of(2, 64) == sum(slab.nbytes for slab in held)


@pytest.mark.parametrize("name", RECURRENT)
def test_the_trial_passes_by_far(name: str) -> None:
    model = fresh(name)
    shapes = probe_layers(model)
    assert check_tree(model, AttentionWindows.of(model), shapes) < 1e-5


@pytest.mark.parametrize("name", RECURRENT)
def test_other_caches_are_served_as_before(name: str) -> None:
    """After a model was made ready for slab caches its own cache gives the same text."""
    model, ids = fresh(name), torch.arange(5, 17).view(2, 6)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    probe_layers(model)
    probe_layers(model)  # a second time changes nothing more
    assert torch.equal(model.generate(ids, **options), before)


def chain(tree: TreeRun) -> TreeRun:
    """Every node follows the one before it."""
    parents = torch.arange(-1, tree.parents.shape[1] - 1).expand_as(tree.parents)
    return TreeRun(parents, ancestor_mask(parents), levels=parents.shape[1] - 1)


BREAKS = {
    "the tree is read as a chain": lambda patch: patch.setattr(
        RecurrentStates, "run_tree", lambda self, tree: self._run(chain(tree))
    ),
    "nothing is committed": lambda patch: patch.setattr(
        RecurrentStates, "commit", lambda self, last: None
    ),
    "padding counts as text": lambda patch: patch.setattr(
        RecurrentStates, "run_prompts", lambda self, counts=None: self._run(None)
    ),
}
STATES = [name for name in RECURRENT if not name.startswith("lfm2")]


@pytest.mark.parametrize("what", BREAKS)
@pytest.mark.parametrize("name", RECURRENT)
def test_the_trial_sees_what_is_broken(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh(name)
    shapes, windows = probe_layers(model), AttentionWindows.of(model)
    BREAKS[what](monkeypatch)
    with pytest.raises(UnsupportedTarget):
        check_tree(model, windows, shapes)


@pytest.mark.parametrize("name", STATES)
def test_the_trial_sees_a_state_that_is_not_added(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though inputs of convolutions are kept."""
    model = fresh(name)
    shapes, windows = probe_layers(model), AttentionWindows.of(model)
    monkeypatch.setattr(recurrent, "add_path", lambda *args: None)
    with pytest.raises(UnsupportedTarget, match="do not keep what they should"):
        check_tree(model, windows, shapes)


def test_a_layer_that_calls_other_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("qwen3.5")
    monkeypatch.setattr(mixers, "_SCANS", {})
    mixers._for_slabs.cache_clear()
    try:
        with pytest.raises(UnsupportedTarget, match="keeps a state at layer 0 that cannot"):
            probe_layers(model)
    finally:
        mixers._for_slabs.cache_clear()


def test_a_copied_model_runs_itself() -> None:
    """A deep copy's layers are its own, not those that it was copied from."""
    import copy

    model = fresh("qwen3.5")
    probe_layers(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    own: Any = fresh("qwen3.5")
    tokens = torch.arange(3, 9).unsqueeze(0)

    def logits(which: Any) -> Tensor:
        return prefill_forward(which, SlabCache(probe_layers(which), 1, 64), tokens, [6])

    with torch.no_grad():
        assert torch.equal(logits(other), logits(own))
        assert torch.equal(other(tokens).logits, own(tokens).logits)
