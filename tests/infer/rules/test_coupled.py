"""Sampled text equals seeded plain decoding, token for token, which draws from the target."""

import math
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, set_seed

from headstart.heads import Drafter, Step
from headstart.heads.core import gumbel
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Speculator
from tests.support.covering import covering
from tests.support.scripted import ScriptedConfig, make
from tests.support.tiny import VOCAB, prompts, tiny

NEW = 20
LENGTHS = [9, 4, 7]
SEEDS = [11, 5, 8]
TREES = {
    "chain": "chain:4",
    "cartesian": "cartesian:3,2,1",
    "sparse": [[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2, 0]],
}
RULES = ("coupled", "match")
SHAPES = ("heads", "cached", "lookup")
"""Of scripted drafters."""
WARPS: dict[str, dict] = {
    "free": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 0.6},
    "top-k": {"top_k": 9, "temperature": 1.3},
    "top-p": {"top_k": 0, "top_p": 0.8},
    "min-p": {"top_k": 0, "min_p": 0.05, "temperature": 1.1},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
}
PENALTIES: dict[str, dict] = {
    "repetition": {"repetition_penalty": 1.7},
    "n-gram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[3], [7, 9], [20, 21]]},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 6},
}


def decode(
    speculator: Speculator, seed: Any = None, rows: list[int] | None = None, **more: Any
) -> Tensor:
    """New tokens of the shared prompts (or of some rows of them), sampled when a seed is given."""
    ids, mask = prompts(LENGTHS)
    rows = list(range(len(LENGTHS))) if rows is None else rows
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": seed is not None, **more}
    if seed is not None:
        options["seed"] = seed
    out = speculator.generate(ids[rows], attention_mask=mask[rows], **options)
    return out[:, ids.shape[1] :]


@cache
def plain(warp: str, name: str = "llama") -> Tensor:
    """Seeded plain decoding, a target forward a token; longer than the tests decode."""
    return decode(Speculator(tiny(name)), SEEDS, **WARPS[warp], max_new_tokens=NEW + 8)


@cache
def medusa(name: str = "llama", spread: float = 0.05) -> Drafter:
    """Heads that are near the target's own output layer: seldom right, never absurd."""
    drafter = Medusa(MedusaConfig.for_target(tiny(name), heads=4, layers=1)).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.nn.init.normal_(drafter.weight, std=spread)
    drafter.bind(tiny(name))
    return drafter.eval()


def drafters(warp: str, name: str = "llama") -> dict[str, Drafter]:
    """Real heads, and scripted ones that see the text to come at odds like those of the noise."""
    found: dict[str, Drafter] = {"medusa": medusa(name)}
    for shape in SHAPES:
        found[shape] = make(shape, tiny(name), plain(warp, name), scale=3.0)
    return found


class Oracle(Drafter):
    """A perfect drafter: whole forwards of the target over the text and each node's chain."""

    config_class = ScriptedConfig

    def __init__(self, target: Any) -> None:
        super().__init__(ScriptedConfig.for_target(target))
        self.bind(target)

    def start(self, batch: int, capacity: int) -> Any:
        return SimpleNamespace(text=torch.zeros(batch, capacity + 8, dtype=torch.long), size=None)

    def prefill(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        state.text[:, : tokens.shape[1]] = tokens
        state.size = count

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        for step in range(tokens.shape[1]):
            taken = (step < count).nonzero().flatten()
            state.text[taken, state.size[taken] + step] = tokens[taken, step]
        state.size = state.size + count
        state.chains = torch.empty(len(tokens), 1, 0, dtype=torch.long)  # the root's is empty
        return Step(self.after(state, state.chains))

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        depth = state.chains.shape[-1]
        above = state.chains.gather(1, (parent + 1).unsqueeze(-1).expand(-1, -1, depth))
        grown = torch.cat([above, tokens.unsqueeze(-1)], -1)  # [B, W, depth + 1]
        state.chains = torch.cat([torch.nn.functional.pad(state.chains, (0, 1)), grown], 1)
        return Step(self.after(state, grown))

    def after(self, state: Any, chains: Tensor) -> Tensor:
        """Logits [B, W, V] after the text and each chain [B, W, depth], padded on the right."""
        batch, width, depth = chains.shape
        longest = int(state.size.max()) + depth
        ids = state.text[:, None, :longest].expand(-1, width, -1).clone()
        at = (state.size[:, None] + torch.arange(depth))[:, None].expand(-1, width, -1)
        ids.scatter_(2, at, chains)
        logits = self.target(ids.flatten(0, 1), use_cache=False).logits.unflatten(0, (batch, width))
        last = (state.size + depth - 1).view(-1, 1, 1, 1).expand(-1, width, 1, logits.shape[-1])
        return logits.gather(2, last).squeeze(2)


@pytest.mark.parametrize("warp", WARPS)
def test_plain_is_the_argmax_of_log_p_plus_noise(warp: str) -> None:
    """Against a loop by hand: one row at a time, a whole forward a token, transformers' warpers."""
    model = tiny("llama")
    config = dict(WARPS[warp])
    found = plain(warp)
    ids, mask = prompts(LENGTHS)
    for row in range(3):
        text = ids[row][mask[row].bool()].tolist()
        for step in range(8):
            with torch.no_grad():
                logits = model(torch.tensor([text]), use_cache=False).logits[:, -1].float()
            scores = warped(logits, config).log_softmax(-1).double()
            position = torch.tensor([[len(text)]])
            noise = gumbel(torch.tensor([SEEDS[row]]), position, torch.arange(VOCAB))[0]
            token = int((scores + noise).argmax())
            assert token == found[row, step]
            text.append(token)


def warped(logits: Tensor, config: dict) -> Tensor:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    order = (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    )
    for name, warper in order:
        if config.get(name):
            logits = warper(config[name])(None, logits)  # type: ignore[arg-type]
    return logits


@pytest.mark.parametrize(
    ("warp", "tree", "rule", "shape"),
    covering([*product(WARPS, TREES, RULES, ("medusa", *SHAPES))]),
)
def test_equals_plain(warp: str, tree: str, rule: str, shape: str) -> None:
    speculator = Speculator(tiny("llama"), drafters(warp)[shape], tree=TREES[tree], rule=rule)
    out = decode(speculator, SEEDS, **WARPS[warp])
    assert torch.equal(out, plain(warp)[:, :NEW])
    assert shape == "medusa" or speculator.stats.tau > 1.1


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt2", "qwen3"])
def test_equals_plain_on_other_targets(name: str) -> None:
    for tree in TREES.values():
        for drafter in drafters("all", name).values():
            speculator = Speculator(tiny(name), drafter, tree=tree)
            out = decode(speculator, SEEDS, **WARPS["all"])
            assert torch.equal(out, plain("all", name)[:, :NEW])


@pytest.mark.parametrize("tree", ["plain", *TREES.values()], ids=["plain", *TREES])
def test_a_row_is_the_same_alone_and_among_others(tree: Any) -> None:
    speculator = Speculator(tiny("llama"), medusa(), tree=tree)
    expected = plain("top-p")[:, :NEW]
    for row in range(3):
        # An int is spread over the rows: it is not the row's own seed.
        spread = decode(speculator, SEEDS[row], [row], **WARPS["top-p"])
        assert not torch.equal(spread[0], expected[row])
        alone = decode(speculator, [SEEDS[row]], [row], **WARPS["top-p"])
        assert torch.equal(alone[0], expected[row])
    for order in ([2, 0, 1], [1, 2], [0, 0]):
        seeds = [SEEDS[row] for row in order]
        assert torch.equal(decode(speculator, seeds, order, **WARPS["top-p"]), expected[order])


def test_seeds_matter() -> None:
    speculator = Speculator(tiny("llama"), medusa(), tree="chain:2")
    one, two = decode(speculator, [1, 1, 1], [0, 0, 0]), decode(speculator, [1, 2, 3], [0, 0, 0])
    assert torch.equal(one[0], one[1]) and not torch.equal(two[0], two[1])
    spread = decode(speculator, 4, [0, 0])
    assert not torch.equal(spread[0], spread[1])
    assert torch.equal(decode(speculator, 4, [0, 0]), spread)


def test_set_seed_governs_the_draw() -> None:
    speculator = Speculator(tiny("llama"), medusa(), tree="chain:2")
    texts = []
    for seed in (3, 3, 4):
        set_seed(seed)
        texts.append(decode(speculator, None, do_sample=True, top_k=0))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    set_seed(3)
    assert torch.equal(decode(Speculator(tiny("llama")), None, do_sample=True, top_k=0), texts[0])


def test_coupling_accepts_more_than_matching() -> None:
    """The shared noise is what makes a drafter near the target agree with it."""
    model = tiny("llama")
    near = medusa(spread=0.0)  # exactly the target's output layer, one feature behind
    taus = {}
    for rule in ("coupled", "match"):
        total = 0.0
        for seed in range(6):
            speculator = Speculator(model, near, tree="chain:1", rule=rule)
            decode(speculator, [seed, seed + 50, seed + 90], top_k=0, temperature=4.0)
            total += speculator.stats.tau
        taus[rule] = total / 6
    assert taus["coupled"] > taus["match"] + 0.03, taus


@pytest.mark.parametrize(
    ("penalty", "tree", "shape"), covering([*product(PENALTIES, TREES, SHAPES)])
)
def test_greedy_with_processors_that_read_the_text_equals_generate(
    penalty: str, tree: str, shape: str
) -> None:
    ids, mask = prompts(LENGTHS)
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, "eos_token_id": 5}
    options |= PENALTIES[penalty]
    model = tiny("llama")
    expected = model.generate(ids, attention_mask=mask, **options)
    free = model.generate(ids, attention_mask=mask, **(options | dict.fromkeys(PENALTIES[penalty])))
    # The processors change the text, or the test would prove nothing ("bad words" may not occur).
    assert penalty == "bad words" or not torch.equal(expected, free)
    script = torch.nn.functional.pad(expected[:, ids.shape[1] :], (0, 8))
    drafter = make(shape, model, script)
    speculator = Speculator(model, drafter, tree=TREES[tree])
    out = speculator.generate(ids, attention_mask=mask, **options)
    assert torch.equal(out, expected)
    assert speculator.stats.tau > 1.2


@pytest.mark.parametrize(
    ("penalty", "tree", "rule", "shape"), covering([*product(PENALTIES, TREES, RULES, SHAPES)])
)
def test_sampling_with_processors_that_read_the_text_equals_plain(
    penalty: str, tree: str, rule: str, shape: str
) -> None:
    options = {**PENALTIES[penalty], **WARPS["all"], "eos_token_id": 5}
    expected = decode(Speculator(tiny("llama")), SEEDS, **options)
    script = torch.nn.functional.pad(expected, (0, 8))
    drafter = make(shape, tiny("llama"), script, scale=3.0)
    speculator = Speculator(tiny("llama"), drafter, tree=TREES[tree], rule=rule)
    assert torch.equal(decode(speculator, SEEDS, **options), expected)


class Parity(LogitsProcessor):
    """A processor of the user's: after an even number of tokens only even ones, else only odd."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        wrong = torch.arange(scores.shape[-1]) % 2 != input_ids.shape[1] % 2
        return scores.masked_fill(wrong, -torch.inf)


def test_a_processor_of_the_users() -> None:
    ids, _ = prompts(LENGTHS)
    more = {"logits_processor": LogitsProcessorList([Parity()])}
    expected = decode(Speculator(tiny("llama")), SEEDS, top_k=0, **more)
    places = torch.arange(NEW) + ids.shape[1]
    assert (expected % 2 == places % 2).all()
    for tree in TREES.values():
        speculator = Speculator(tiny("llama"), medusa(), tree=tree)
        assert torch.equal(decode(speculator, SEEDS, top_k=0, **more), expected)


def test_the_first_token_follows_the_softmax() -> None:
    """Chi-square at alpha 1e-6 over 4,000 rows of one prompt, each with its own seed."""
    model, rows = tiny("llama"), 4000
    ids, _ = prompts([6], seed=4)
    out = Speculator(model).generate(
        ids.expand(rows, -1), max_new_tokens=1, do_sample=True, temperature=4.0, top_k=0, seed=1
    )
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, -1]
    found = torch.bincount(out[:, -1], minlength=VOCAB).double()
    assert statistic(found, (logits / 4.0).softmax(-1)) < limit(VOCAB - 1)
    assert statistic(found, (logits / 3.0).softmax(-1)) > limit(VOCAB - 1)


@pytest.mark.parametrize("warp", ["free", "all"])
@pytest.mark.parametrize("tree", TREES)
def test_a_perfect_drafter_is_always_accepted_when_coupled(tree: str, warp: str) -> None:
    """Only if drafter and target use the noise of the same row, position and token."""
    model = tiny("llama")
    speculator = Speculator(model, Oracle(model), tree=TREES[tree])
    options = {**WARPS[warp], "temperature": 3.0}
    out = decode(speculator, SEEDS, **options)
    assert torch.equal(out, decode(Speculator(model), SEEDS, **options))
    depth = speculator.tree.max_depth
    if tree != "sparse":  # there the best path is less deep in places
        assert speculator.stats.rounds == 3 * -(-(NEW - 1) // (depth + 1))
    assert speculator.stats.acceptance_by_depth[0] == 1
    match = Speculator(model, Oracle(model), tree=TREES[tree], rule="match")
    assert torch.equal(decode(match, SEEDS, **options), out)
    assert match.stats.tau < speculator.stats.tau


@pytest.mark.parametrize(
    ("rule", "tree", "low", "high"),
    [("coupled", "chain:2", 2.0, 2.0), ("match", "cartesian:2,2", 1.2, 1.9)],
)
def test_later_tokens_follow_the_softmax_through_a_tree(
    rule: str, tree: str, low: float, high: float
) -> None:
    """The third token given the two before it; nearly all are drafted, some rejected by `match`."""
    model, rows = tiny("llama"), 4000
    ids, _ = prompts([6], seed=4)
    options = {"do_sample": True, "temperature": 6.0, "top_k": 3, "max_new_tokens": 3}
    speculator = Speculator(model, Oracle(model), tree=tree, rule=rule)
    out = speculator.generate(ids.expand(rows, -1), seed=2, **options)
    assert low <= speculator.stats.tau <= high
    new = out[:, ids.shape[1] :]
    contexts, which = new[:, :2].unique(dim=0, return_inverse=True)
    assert len(contexts) == 9
    for index, context in enumerate(contexts):
        text = torch.cat([ids[0], context])
        with torch.no_grad():
            logits = model(text.unsqueeze(0), use_cache=False).logits[0, -1]
        best = (logits / 6.0).topk(3)
        third = new[which == index, 2]
        found = torch.stack([(third == token).sum() for token in best.indices]).double()
        assert found.sum() == len(third)  # nothing outside of the top three
        assert statistic(found, best.values.softmax(-1)) < limit(2)


def statistic(found: Tensor, share: Tensor) -> float:
    """Chi-square of counts against shares, cells of less than five pooled."""
    expected = share * found.sum()
    small = expected < 5
    cells = [(found[~small], expected[~small])]
    if small.any():
        cells.append((found[small].sum()[None], expected[small].sum()[None]))
    return float(sum(((f - e) ** 2 / e).sum() for f, e in cells))


def limit(freedom: int) -> float:
    """The critical value at alpha 1e-6 (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3
