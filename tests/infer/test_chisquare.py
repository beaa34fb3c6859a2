"""Through the real loop: what is written has the target's law, whoever else is in the batch.

The joint law of the first tokens of a random model is known: every text is run once. Many rows
decode with a drafter of another mind, and Pearson's statistic compares. Then the draws themselves:
Gumbel noise gives Plackett-Luce orders, and no two keys share a number.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from headstart.heads import Drafter, DrafterGroup, Sampling, Step
from headstart.heads.core import row_seeds
from headstart.heads.core.noise import Stream, place
from headstart.infer import Decoding, Request, Target
from headstart.infer.rules.registry import RULES
from headstart.infer.trees.parse import parse_tree
from tests.support import random_rounds
from tests.support.enumeration import Orders
from tests.support.random_rounds import Case, Run, draw_case, left_padded
from tests.support.rounds import LEGAL
from tests.support.scripted import ScriptedConfig, decoding_of, rows_of
from tests.support.tiny import prompts

VOCAB = 6
FIRST = 4  # tokens whose joint law is compared: one of the prefill, three of the rounds
ALPHA = 1e-6
ROWS = 1 << 13
SMALL, FULL = 3 * ROWS, 123 * ROWS
PROMPT = [1, 4, 2]

SAMPLING_PAIRS = [pair for pair in LEGAL if RULES[pair[1]].samples and RULES[pair[1]].exact]


def tree_for(pair: tuple[str, str]) -> str:
    return "chain:2" if RULES[pair[1]].chains_only else "cartesian:2,2"


def model() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class Bigrams(Drafter):
    """Proposes by the last token and the place in the text, from a table [places, V, V]."""

    config_class = ScriptedConfig

    def __init__(self, target: Any, table: Tensor):
        config = ScriptedConfig.for_target(target)
        config.feature_layers = ()
        super().__init__(config)
        self.bind(target)
        self.table = table

    def start(self, batch: int, capacity: int) -> Any:
        return {"emitted": torch.zeros(batch, 1, dtype=torch.long)}

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        state["emitted"] = state["emitted"] + count.unsqueeze(1)
        state["depths"] = torch.zeros_like(state["emitted"])
        last = tokens.gather(1, (count - 1).clamp(min=0).unsqueeze(1))
        return self.step(state["emitted"], last)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        depth = state["depths"].gather(1, parent + 1) + 1
        state["depths"] = torch.cat([state["depths"], depth], 1)
        return self.step(state["emitted"] + depth, tokens)

    def step(self, where: Tensor, token: Tensor) -> Step:
        return Step(self.table[where.clamp(max=len(self.table) - 1), token])


def processors(warp: str) -> LogitsProcessorList:
    warpers: list[Any] = [TemperatureLogitsWarper(1.2)]
    return LogitsProcessorList(warpers + [TopPLogitsWarper(0.9)] * (warp == "top_p"))


@torch.no_grad()
def joint_law(target: Any, warp: str) -> Tensor:
    """[VOCAB ** FIRST] how probable each continuation of the prompt is, in float64."""
    law = torch.ones(1, dtype=torch.float64)
    for length in range(FIRST):
        texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))
        texts = texts.view(VOCAB**length, length).long()
        prompt = torch.tensor(PROMPT).expand(len(texts), -1)
        logits = target(torch.cat([prompt, texts], 1)).logits[:, -1].double()
        after = processors(warp)(texts, logits).softmax(-1)  # type: ignore[arg-type]
        law = (law.unsqueeze(1) * after).flatten()
    return law


@torch.no_grad()
def counts(target: Any, pair: tuple[str, str], warp: str, draws: int, tree: str) -> Tensor:
    """[VOCAB ** FIRST] how often the loop wrote each continuation."""
    torch.manual_seed(4)
    drafter = Bigrams(target, torch.randn(FIRST + 4, VOCAB, VOCAB))
    found = torch.zeros(VOCAB**FIRST)
    runner, policy, drafters = Target(target), parse_tree(tree), DrafterGroup([drafter])
    ids = torch.tensor(PROMPT).expand(ROWS, -1)
    for number in range(draws // ROWS):
        sampling = Sampling(row_seeds(1000 + number, ROWS), processors(warp))
        expansion: Any = pair[0]
        request = Request(
            runner, drafters, policy, sampling, rule=RULES[pair[1]], expansion=expansion
        )
        decoding = Decoding(request)
        decoding.prefill(ids, torch.ones_like(ids), FIRST)
        while not decoding.finished:
            decoding.round()
        code = torch.zeros(ROWS, dtype=torch.long)
        for token in decoding.sequences[:, len(PROMPT) :].T:
            code = code * VOCAB + token
        found += torch.bincount(code, minlength=len(found))
    return found


def chance(observed: Tensor, law: Tensor) -> float:
    """How probable counts at least as far from `law` are: Pearson's test, rare cells in one.

    The tail of the chi-square distribution is the regularised upper incomplete gamma function.
    """
    observed, expected = observed.double(), law.double() * observed.sum()
    if (observed[law == 0] > 0).any():
        return 0.0
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
        expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    cells = expected > 0
    statistic = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = torch.tensor((cells.sum().item() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def test_the_test_itself() -> None:
    """Known tails, draws of the law itself, and draws of a law one per cent away."""
    law = torch.tensor([0.5, 0.5]).double()
    # 60 of 100: the statistic is 4, whose tail with one degree of freedom is 0.0455.
    assert chance(torch.tensor([60.0, 40.0]), law) == pytest.approx(0.0455, abs=1e-4)
    law = torch.rand(300).double()
    law /= law.sum()
    drawn = torch.bincount(torch.multinomial(law, 10**6, True), minlength=300)
    assert chance(drawn, law) > ALPHA
    other = law * (1 + 0.02 * torch.randn(300).double().sign())
    assert chance(drawn, other / other.sum()) < ALPHA


@pytest.mark.parametrize("pair", SAMPLING_PAIRS, ids="-".join)
def test_the_loop_has_the_law_of_the_target(pair: tuple[str, str]) -> None:
    target = model()
    found = counts(target, pair, "top_p", SMALL, tree_for(pair))
    assert chance(found, joint_law(target, "top_p")) > ALPHA


@pytest.mark.proof
@pytest.mark.parametrize("pair", SAMPLING_PAIRS, ids="-".join)
def test_a_million_draws_have_the_law_of_the_target(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = model()
    found = counts(target, pair, "plain", FULL, tree_for(pair))
    value = chance(found, joint_law(target, "plain"))
    with capsys.disabled():
        print(f"\n{pair[1]} x {pair[0]}: {int(found.sum())} draws, p = {value:.3f}")
    assert found.sum() >= 1e6
    assert value > ALPHA


@pytest.mark.parametrize("wrong", ["typical", "another temperature", "one seed for all rounds"])
def test_what_is_wrong_shows(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, pair = model(), ("without_replacement", "rejection")
    law = joint_law(target, "plain")
    if wrong == "typical":
        pair = ("topk", "typical")
    elif wrong == "another temperature":
        law = law**1.1 / (law**1.1).sum()
    else:
        true = Sampling.uniforms

        def uniforms(self: Sampling, positions: Tensor, *rest: Any) -> Tensor:
            return true(self, torch.zeros_like(positions), *rest)

        monkeypatch.setattr(Sampling, "uniforms", uniforms)
    found = counts(target, pair, "plain", SMALL, "cartesian:2,2")
    assert chance(found, law) < ALPHA


def draws_of(count: int, scores: Tensor, ranks: int) -> Tensor:
    """[count, M, ranks] children of nodes 0 … M - 1 with these scores [M, V], as policies draw."""
    sampling = Sampling(row_seeds(9, count))
    keys = place(torch.full((count, 1), 7), torch.arange(len(scores)))
    noisy = sampling.perturb(scores.expand(count, -1, -1), keys, stream=Stream.CHILDREN)
    return noisy.topk(ranks).indices


@pytest.mark.parametrize(
    "count", [SMALL, pytest.param(FULL, marks=pytest.mark.proof)], ids=["small", "full"]
)
def test_gumbel_orders_are_plackett_luce_and_nodes_independent(count: int) -> None:
    scores = torch.tensor([[0.3, -0.4, 1.1, -0.2], [0.9, 0.1, -1.0, -torch.inf]])
    orders = Orders(4, 2)
    laws = orders.weights(scores)  # [2, P]
    assert torch.allclose(laws.sum(1), torch.ones(2).double())
    drawn = draws_of(count, scores, 2)
    which = (drawn.unsqueeze(2) == orders.tokens).all(-1).byte().argmax(-1)  # [count, 2]
    found = torch.bincount(which[:, 0] * laws.shape[1] + which[:, 1], minlength=laws.shape[1] ** 2)
    joint = (laws[0].unsqueeze(1) * laws[1]).flatten()
    assert chance(found, joint) > ALPHA
    # Were both nodes given the same noise, or drawn with replacement, it would show.
    assert chance(found, joint**1.1 / (joint**1.1).sum()) < ALPHA


def test_no_two_keys_share_a_number() -> None:
    """Streams, positions, nodes, draws and rows: every number handed out is another one."""
    sampling = Sampling(row_seeds(2, 3))
    keys = place(torch.arange(5).expand(3, -1).unsqueeze(-1), torch.arange(7)).flatten(1)
    keys = torch.cat([keys, torch.arange(5).expand(3, -1)], 1)
    numbers = [sampling.uniforms(keys, 6, stream).flatten() for stream in Stream]
    together = torch.cat(numbers)
    assert len(together.unique()) == len(together)


JUDGED = [pair for pair in SAMPLING_PAIRS if not RULES[pair[1]].same_text]


class Judged(Run):
    """A case of the cache's oracle, decoded with a rule that draws its verdicts."""

    def __init__(self, case: Case, pair: tuple[str, str]):
        self.case, self.rounds, self.checked = case, 0, 0
        expansion: Any = pair[0]
        target = random_rounds.tiny(case.name)
        # What the target says after one token alone is near to what it says after the text.
        alone = target(torch.arange(VOCAB).unsqueeze(1)).logits  # [V, 1, V]
        drafter = Bigrams(target, alone.transpose(0, 1))
        tree = "chain:3" if RULES[pair[1]].chains_only else "cartesian:3,2"
        sampling = replace(case.sampling, dtype=torch.float64)
        self.decoding = decoding_of(
            target, drafter, tree, sampling, rule=RULES[pair[1]], expansion=expansion
        )
        self.texts = [list(row) for row in case.prompts]
        self.counts: list[list[int]] = [[] for _ in case.prompts]
        self._note(self.decoding.prefill(*left_padded(case), case.new))

    def finish(self) -> float:
        """Decode to the end; the cache's largest distance from a fresh prefill."""
        worst = self.cache_distance()
        while not self.decoding.finished:
            self.round()
            worst = max(worst, self.cache_distance())
        return worst


@pytest.fixture
def small_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's machinery around a target of few tokens, so that many drafts are accepted."""
    target = model().double()
    monkeypatch.setattr(random_rounds, "tiny", lambda name: target)


def judged_case(rows: list[int]) -> Case:
    """Three prompts of their own lengths and seeds, in that order."""
    texts, mask = prompts([4, 11, 7])
    lists = rows_of(texts, mask)
    return replace(
        draw_case(0),
        prompts=tuple(tuple(token % VOCAB for token in lists[row]) for row in rows),
        seeds=tuple(50 + row for row in rows),
        warp=0,
        new=24,
        stop=False,
    )


@torch.no_grad()
@pytest.mark.usefixtures("small_target")
@pytest.mark.parametrize("pair", JUDGED, ids="-".join)
def test_rows_are_their_own_and_the_cache_is_a_fresh_prefill(pair: tuple[str, str]) -> None:
    """The same text and rounds alone, in a batch and in another order."""
    rows = [0, 1, 2]
    run = Judged(judged_case(rows), pair)
    assert run.finish() <= 1e-10
    assert run.decoding.stats.tau > 1.1
    others = [[row] for row in rows] + [[2, 0, 1]]
    for order in others:
        again = Judged(judged_case(order), pair)
        again.finish()
        assert again.texts == [run.texts[row] for row in order]
        assert again.counts == [run.counts[row] for row in order]


@torch.no_grad()
@pytest.mark.usefixtures("small_target")
def test_verdicts_that_know_their_row_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws keyed by the place in the batch: rows then differ from their solo runs."""
    true = Sampling.uniforms

    def uniforms(self: Sampling, *args: Any) -> Tensor:
        assert self.seeds is not None
        return true(replace(self, seeds=self.seeds + torch.arange(len(self.seeds))), *args)

    pair = ("topk", "rejection")
    monkeypatch.setattr(Sampling, "uniforms", uniforms)
    run = Judged(judged_case([0, 1, 2]), pair)
    alone = [Judged(judged_case([row]), pair) for row in (0, 1)]
    for each in (run, *alone):
        each.finish()
    assert alone[0].texts[0] == run.texts[0]
    assert alone[1].texts[0] != run.texts[1]
