"""The proofs that users run on their own models: they hold, and they can fail."""

import copy
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.commands.verify_lossless import _sampled_sentences
from headstart.heads import OptionError
from headstart.heads.core import masks
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Speculator
from headstart.infer.measure.lossless_greedy import Divergence, compare_greedy, in_other_shapes
from headstart.infer.measure.lossless_sampled import (
    _WIDTHS,
    ALPHA,
    Text,
    _bin,
    _judge,
    compare_sampled,
    continuations,
)
from headstart.infer.rules.rule_api import Verified
from headstart.infer.target import Target
from tests.support.tiny import prompts, tiny

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}


def one_by_one(lengths: list[int]) -> list[Tensor]:
    ids, _ = prompts(lengths)
    return [ids[row : row + 1, -length:] for row, length in enumerate(lengths)]


def speculator(rule: str | None = None, tree: Any = "cartesian:3,2", **options: Any) -> Speculator:
    torch.manual_seed(3)
    heads = Medusa(MedusaConfig.for_target(tiny("llama"), heads=2))
    with torch.no_grad():
        heads.weight.normal_(std=0.05)
    return Speculator(tiny("llama"), heads, tree=tree, rule=rule, **options)


def test_greedy_text_is_that_of_generate() -> None:
    found = compare_greedy(speculator(), one_by_one([5, 9]), 12)
    assert found.holds and not found.divergences and found.tokens == 24
    assert found.plain_divergences is None


def test_a_wrong_mask_shows_and_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node sees every other node of the tree."""
    true = masks.tree_mask

    def wrong(lengths: Tensor, positions: Tensor, ancestors: Tensor, *rest: Any) -> Tensor:
        return true(lengths, positions, torch.ones_like(ancestors), *rest)

    broken = speculator()
    monkeypatch.setattr(masks, "tree_mask", wrong)
    found = compare_greedy(broken, one_by_one([5, 9, 7, 12]), 24)
    assert found.divergences and not found.holds
    apart = found.divergences[0]
    assert apart.difference > 100 * apart.noise


def test_a_near_tie_is_judged_by_the_noise_of_plain_decoding() -> None:
    assert Divergence(0, 3, margin=0.02, difference=0.03, noise=0.01).near_tie
    assert not Divergence(0, 3, margin=0.03, difference=0.03, noise=0.01).near_tie
    assert not Divergence(0, 3, margin=0.0, difference=0.06, noise=0.01).near_tie


def test_a_text_that_ends_elsewhere_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token less than asked for."""
    true = Speculator.generate

    def short(self: Speculator, *args: Any, max_new_tokens: int, **options: Any) -> Any:
        return true(self, *args, max_new_tokens=max_new_tokens - 1, **options)

    monkeypatch.setattr(Speculator, "generate", short)
    found = compare_greedy(speculator(), one_by_one([5]), 12)
    assert not found.holds and found.divergences[0].place == 11


def test_logits_that_are_off_by_more_than_rounding_show_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where rounding makes plain decoding differ from itself, many a wrong margin is small."""
    pair, texts = in_bfloat16()
    target: Any = pair.model
    assert compare_greedy(pair, texts, 24).holds
    true = Target.verify

    def wrong(self: Target, *args: Any, **options: Any) -> Any:
        logits, *rest = true(self, *args, **options)
        off = wide * torch.arange(logits.shape[-1]).sin().to(logits.dtype)  # [V]
        return logits + off * (logits.shape[1] > 1), *rest

    with torch.no_grad():
        wide = float(target(texts[0]).logits.float().std()) / 4
    monkeypatch.setattr(Target, "verify", wrong)
    found = compare_greedy(pair, texts, 24)
    print(found.divergences)
    close = [each for each in found.divergences if each.margin <= 2 * each.noise]
    assert close and not any(each.near_tie for each in close)


@pytest.mark.parametrize("rule", ["coupled", "match", "rejection", "traversal"])
def test_sampled_text_holds(rule: str) -> None:
    found = compare_sampled(speculator(rule), one_by_one([6, 4]), 16, draws=1500)
    assert found.holds and not found.approximate and found.p_value > 1e-4
    assert found.distance < found.bound < 0.5
    assert (found.tokens >= 4500) == (found.tokens > 0) == (found.seeded_tokens == 0)
    assert found.tokens_p_value > 1e-4
    assert (found.seeded_tokens == 32) == (rule in ("coupled", "match"))
    assert 0 < found.drafted < (found.draws * found.places + found.tokens) / 2


def test_it_is_told_when_hardly_a_token_was_drafted() -> None:
    found = compare_sampled(speculator("rejection"), one_by_one([6]), 4, draws=100)
    every = found.draws * found.places + found.tokens
    for drafted, few in ((every // 2, False), (every // 50, True)):
        *_, said = _sampled_sentences(replace(found, drafted=drafted))
        assert said.startswith(f"Of all these tokens {drafted / every:.0%} had been drafted")
        assert ("sample at a lower --temperature, or more --draws" in said) == few


def test_what_is_wrong_after_the_first_tokens_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharper target, from the fourth new token on."""
    true = Verified.scores_at

    def wrong(self: Verified, *args: Any) -> Tensor | None:
        scores, late = true(self, *args), self.lengths >= 9
        return None if scores is None else scores * (1 + 4 * late.unsqueeze(1).double())

    pair = speculator("rejection")
    monkeypatch.setattr(Verified, "scores_at", wrong)
    found = compare_sampled(pair, one_by_one([6, 4]), 16, draws=400)
    assert found.p_value > 1e-4 and found.tokens_p_value < ALPHA and not found.holds


def test_padding_behind_an_end_token_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, texts = speculator("rejection"), one_by_one([6])
    monkeypatch.setattr(pair.model.generation_config, "eos_token_id", list(range(0, 40, 3)))
    found = compare_sampled(pair, texts, 16, draws=400)
    assert found.holds and 0 < found.tokens < 1000


def in_bfloat16() -> tuple[Speculator, list[Tensor]]:
    torch.manual_seed(3)
    target: Any = copy.deepcopy(tiny("llama")).bfloat16()
    heads = Medusa(MedusaConfig.for_target(target, heads=2)).bfloat16()
    return Speculator(target, heads, tree="cartesian:3,2"), one_by_one([5, 9, 7, 12, 6, 8])


def test_seeded_text_may_differ_at_near_ties() -> None:
    """Of the scores with their noise, by which tokens are chosen."""
    pair, texts = in_bfloat16()
    found = compare_sampled(pair, texts, 48, draws=100)
    assert found.seeded_divergences and found.holds
    for each in found.seeded_divergences:
        assert 0 <= each.margin <= 2 * each.noise < 1 and each.difference > 0
        far = replace(each, margin=3 * each.noise)
        assert not replace(found, seeded_divergences=[far], dtype="float32").holds
        assert replace(found, seeded_divergences=[each], dtype="float32").holds


def test_noise_is_at_least_one_rounding() -> None:
    """Plain decoding of a short text may come out alike in all shapes, and a drafted one not."""
    pair, texts = in_bfloat16()
    model: Any = pair.model
    options = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    decode = partial(model.generate, max_new_tokens=1, **options)
    for ids in texts:
        alone = decode(ids)
        largest = float(alone.logits[0].abs().max())
        assert in_other_shapes(model, ids, alone, decode)[2] >= 2**-7 * largest


def test_text_of_another_seed_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its distribution is the target's, and in bfloat16 texts may differ; but not so."""
    pair, texts = in_bfloat16()
    true = Speculator.generate

    def wrong(self: Speculator, *args: Any, seed: Any = None, **options: Any) -> Any:
        other = seed + 1 if self is pair and isinstance(seed, int) else seed
        return true(self, *args, **options, **({} if other is None else {"seed": other}))

    monkeypatch.setattr(Speculator, "generate", wrong)
    found = compare_sampled(pair, texts[:2], 16, draws=100)
    assert found.agrees and len(found.seeded_divergences) == 2 and not found.holds


def test_draws_are_decoded_with_the_tree_of_a_single_prompt() -> None:
    """A plan for batches may be plain decoding, which every rule would pass."""
    trees = {(1, 0.0): "cartesian:3,2", (1, 1.0): "chain:2", (64, 1.0): "plain"}
    wrong = speculator("typical", tree=trees)
    found = compare_sampled(wrong, one_by_one([6]), 16, draws=400)
    assert found.tree == "chain:2" and not found.holds and len(wrong.trees) == 3
    assert compare_greedy(wrong, one_by_one([6]), 4).tree == "cartesian:3,2"


def test_the_approximate_rule_fails_and_is_called_so() -> None:
    found = compare_sampled(speculator("typical"), one_by_one([6]), 16, draws=400)
    assert found.approximate and not found.holds


def test_another_temperature_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws run at another temperature than the distribution they are held against."""
    wrong = speculator("rejection")
    true = Speculator.generate

    def hotter(self: Speculator, *args: Any, **options: Any) -> Any:
        if self.drafter is not None:
            options["temperature"] = 3.0
        return true(self, *args, **options)

    monkeypatch.setattr(Speculator, "generate", hotter)
    assert not compare_sampled(wrong, one_by_one([6]), 16, draws=1500).holds


def test_bins_are_whole_and_their_chances_are_the_targets() -> None:
    prompt = one_by_one([6])[0]
    bins = continuations(Speculator(tiny("llama")), prompt, SAMPLED)
    assert math.isclose(math.fsum(bins.values()), 1.0, abs_tol=1e-9)
    wanted = 1 + _WIDTHS[0] + _WIDTHS[0] * _WIDTHS[1] + math.prod(_WIDTHS)
    assert len(bins) == wanted
    whole = max((key for key in bins if -1 not in key), key=lambda key: bins[key])
    chance, text = 1.0, prompt
    for token in whole:
        with torch.no_grad():
            chance *= float(tiny("llama")(text).logits[0, -1].double().softmax(-1)[token])
        text = torch.cat([text, torch.tensor([[token]])], 1)
    assert math.isclose(bins[whole], chance, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("text", "bin"),
    [([5, 5], (-1,)), ([1, 5], (1, -1)), ([1, 2], (1, 2)), ([7, 0], (7,))],  # 7 ends, 0 pads
)
def test_every_text_has_one_bin(text: list[int], bin: tuple[int, ...]) -> None:
    assert _bin(text, {(-1,): 0.2, (1, -1): 0.3, (1, 2): 0.4, (7,): 0.1}) == bin


@pytest.mark.parametrize("bins", [{(0,): 1 - 1e-9, (-1,): 1e-9}, {(-1,): 0.004, (0,): 0.996}])
def test_text_that_the_target_all_but_never_writes_is_seen(bins: dict[Text, float]) -> None:
    """Where one continuation is nearly certain, too few draws are expected of any other."""
    *_, p_value, distance, bound = _judge(Counter({(0,): 970, (-1,): 30}), bins, 1000)
    assert p_value < ALPHA and bound > distance > 0.025
    rare = Counter({(0,): 1000 - (few := round(1000 * bins[(-1,)])), (-1,): few})
    assert _judge(rare, bins, 1000)[1] > 0.5


def test_the_distance_is_over_all_bins() -> None:
    found = Counter({(0,): 60, (1,): 40})
    bins, _, distance, bound = _judge(found, {(0,): 0.5, (1,): 0.49, (-1,): 0.01}, 100)
    assert bins == 3 and math.isclose(distance, 0.1) and bound > distance


@pytest.mark.parametrize(("draws", "temperature"), [(50, 1.0), (1000, 0.0)])
def test_what_is_no_test_is_refused(draws: int, temperature: float) -> None:
    with pytest.raises(OptionError, match=f"found {draws} draws at temperature {temperature}"):
        compare_sampled(speculator(), one_by_one([6]), 8, draws, temperature=temperature)
