"""Bad days: ends inside a block, limits, bad numbers, bad prompts. Each ends as it should."""

import logging
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from headstart.heads import DecodingError, HeadstartError, OptionError, Sampling, UnsupportedTarget
from headstart.heads.core import row_seeds
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Batcher, Speculator, load
from tests.support import families
from tests.support.covering import covering
from tests.support.scripted import Heads, Script, decoding_of, make
from tests.support.tiny import CONFIGS, VOCAB, letters, one_line, prompts, tiny

NEW = 20
LENGTHS = [9, 4, 7]


def base(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **more}


def greedy(lengths: list[int], name: str = "llama", **more: Any) -> tuple[Tensor, dict, Tensor]:
    """Prompts, their mask as an option, and what `generate` writes."""
    ids, mask = prompts(lengths)
    masked = {"attention_mask": mask}
    return ids, masked, tiny(name).generate(ids, **base(**masked, **more))


def speculator(text: Tensor, width: int, mode: str = "sometimes", **more: Any) -> Speculator:
    """Over a drafter that has read the text to come."""
    model, shape = tiny(more.pop("name", "llama")), more.pop("shape", "heads")
    drafter = make(shape, model, pad(text[:, width:], (0, 8)), mode)
    return Speculator(model, drafter, tree=more.pop("tree", "chain:4"), **more)


def medusa(name: str = "llama") -> Medusa:
    drafter = Medusa(MedusaConfig.for_target(tiny(name), heads=4)).double()
    return drafter.bind(tiny(name)).eval()


@pytest.mark.parametrize("place", range(1, 8))
def test_1_end_token_inside_an_accepted_block(place: int) -> None:
    """Nothing after it is emitted, counted, or left in the row's text and cache."""
    ids, masked, free = greedy([9])
    eos = int(free[0, 9 + place])
    expected = tiny("llama").generate(ids, **base(**masked, eos_token_id=eos))
    ours = speculator(free, 9, "always")
    assert torch.equal(ours.generate(ids, **base(**masked, eos_token_id=eos)), expected)
    new = expected.shape[1] - 9
    assert expected[0, -1] == eos and ours.stats.tokens == new - 1
    drafter = make("cached", tiny("llama"), pad(free[:, 9:], (0, 8)), "always")
    decoding = decoding_of(tiny("llama"), drafter, "chain:4", eos=[eos])
    with torch.no_grad():
        decoding.prefill(ids, masked["attention_mask"], NEW)
        while not decoding.finished:
            decoding.round()
    assert torch.equal(decoding.sequences, expected)
    assert decoding.lengths.tolist() == [9 + new - 1]  # cached: all but the end token


@pytest.mark.parametrize("mode", ["always", "sometimes", "never"])
@pytest.mark.parametrize("place", [1, 3, 4, 5, 6])
def test_2_stop_string_inside_and_across_blocks(place: int, mode: str) -> None:
    ids, masked, free = greedy([9])
    string = "".join(chr(48 + token) for token in free[0, 9 + place : 9 + place + 2].tolist())
    options = base(**masked, stop_strings=[string], tokenizer=letters())
    expected = tiny("llama").generate(ids, **options)
    ours = speculator(free, 9, mode)
    assert torch.equal(ours.generate(ids, **options), expected)
    assert expected.shape[1] < free.shape[1] and ours.stats.tokens == expected.shape[1] - 10


class Collects(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("new", [1, 4, 5, 6])
def test_3_exact_counts(new: int) -> None:
    """One token, as many as a block of a chain of four less one, as many, and one more."""
    ids, masked, free = greedy(LENGTHS)
    for mode in ("always", "never"):
        ours = speculator(free, 9, mode)
        out = ours.generate(ids, **base(**masked) | {"max_new_tokens": new})
        assert torch.equal(out, free[:, : 9 + new])


def made(options: dict[str, Any]) -> GenerationConfig:
    """A config as it can be set, but not be made, since making it checks the values."""
    config = GenerationConfig()
    for name, value in options.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("source", ["call", "config", "model"])
def test_3_no_new_token(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` refuses it, whoever decodes; the speculator's own `generate` writes nothing."""
    ids, masked, _ = greedy(LENGTHS)
    ours, none = load(tiny("llama"), medusa()), base() | {"max_new_tokens": 0}
    for more in ({}, {"custom_generate": ours}):
        with pytest.raises(ValueError, match="must be greater than 0"):
            tiny("llama").generate(ids, **masked, **none, **more)
    if source == "config":
        none = {"generation_config": made(none)}
    elif source == "model":
        monkeypatch.setattr(tiny("llama"), "generation_config", made(none))
        none = {}
    assert torch.equal(ours.generate(ids, **masked, **none), ids)
    assert ours.stats.tokens == ours.stats.rounds == 0
    if source == "call":
        streamer = Collects()
        out = ours.generate(ids[:1], **none, streamer=streamer, return_dict_in_generate=True)
        assert torch.equal(out.sequences, ids[:1])
        assert streamer.tokens == ids[0].tolist() and streamer.ended == 1
        several = ours.generate(ids, **masked, **none, num_return_sequences=2)
        assert torch.equal(several, ids.repeat_interleave(2, 0))


def short(name: str, positions: int) -> Any:
    """A model with so many positions, random, float64."""
    config: Any = {**CONFIGS, "opt": opt}[name]()
    config.max_position_embeddings = positions
    if name == "gpt2":
        config.n_positions = positions
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return tf.AutoModelForCausalLM.from_config(config).double().eval()


def opt() -> tf.OPTConfig:
    return tf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        init_std=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@pytest.mark.parametrize("tree", ["plain", "chain:4", "cartesian:3,2,1,1"])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_4_table_of_positions_ends_in_mid_draft(name: str, tree: str) -> None:
    """The draft shrinks; a row that needs one more position fails, as `generate` fails there."""
    model = short(name, 24)
    ids, mask = prompts([13, 5])
    # The last position feeds the last token: 24 - 13 + 1 = 12 of them in the longer row.
    expected = model.generate(ids, attention_mask=mask, **base(max_new_tokens=12))
    drafter = make("heads", model, pad(expected[:, 13:], (0, 30)), "always")
    ours = Speculator(model, drafter, tree=tree)
    out = ours.generate(ids, attention_mask=mask, **base(max_new_tokens=12))
    assert torch.equal(out, expected)
    with pytest.raises(IndexError):
        model.generate(ids, attention_mask=mask, **base(max_new_tokens=13))
    with pytest.raises(DecodingError, match=r"row 0 .*24 positions.* 12 new tokens") as caught:
        ours.generate(ids, attention_mask=mask, **base(max_new_tokens=13))
    one_line(caught.value)
    # An end token on the last position is in time, with any budget.
    end = int(expected[0, -1])
    assert end not in expected[0, 13:-1]
    ids, mask = ids[:1], mask[:1]
    more = base(max_new_tokens=400, eos_token_id=end)
    out = Speculator(model, make("heads", model, drafter.script.tokens[:1]), tree=tree).generate(
        ids, attention_mask=mask, **more
    )
    assert torch.equal(out, expected[:1])


def test_4_prompt_longer_than_the_table() -> None:
    model = short("gpt2", 24)
    ids, _ = prompts([25])
    with pytest.raises(OptionError, match=r"25 tokens.* 24 positions") as caught:
        Speculator(model).generate(ids, **base())
    one_line(caught.value)


@pytest.mark.parametrize("tree", ["plain", "chain:4", "cartesian:3,2,1,1"])
def test_4_rotary_positions_go_on(tree: str) -> None:
    """Past its trained length a rotary model writes on, as in `generate`."""
    model = short("llama", 16)
    ids, mask = prompts([13, 5])
    expected = model.generate(ids, attention_mask=mask, **base())
    drafter = make("cached", model, pad(expected[:, 13:], (0, 8)))
    out = Speculator(model, drafter, tree=tree).generate(ids, attention_mask=mask, **base())
    assert torch.equal(out, expected)


def test_5_every_draft_rejected() -> None:
    ids, masked, free = greedy(LENGTHS)
    for shape in ("heads", "cached"):
        ours = speculator(free, 9, "never", shape=shape, tree="cartesian:3,2,1")
        assert torch.equal(ours.generate(ids, **base(**masked)), free)
        assert ours.stats.tau == 1 and ours.stats.rounds == 3 * (NEW - 1)


def test_6_rows_that_accept_different_counts() -> None:
    ids, masked, free = greedy(LENGTHS)
    ours = speculator(free, 9, shape="cached", tree="cartesian:2,2,1")
    assert torch.equal(ours.generate(ids, **base(**masked)), free)
    drafter = make("cached", tiny("llama"), pad(free[:, 9:], (0, 8)))
    decoding, ragged = decoding_of(tiny("llama"), drafter, "cartesian:2,2,1"), False
    with torch.no_grad():
        decoding.prefill(ids, masked["attention_mask"], NEW)
        while not decoding.finished:
            ragged |= len({count for count in decoding.round().count.tolist() if count}) > 1
    assert ragged and torch.equal(decoding.sequences, free)
    for row, length in enumerate(LENGTHS):
        alone = ids[row : row + 1, -length:]
        own = speculator(free[row : row + 1], 9, shape="cached", tree="cartesian:2,2,1")
        assert torch.equal(own.generate(alone, **base())[0, length:], free[row, 9:])


def test_7_left_padding_equals_solo_and_any_width() -> None:
    ids, masked, free = greedy(LENGTHS)
    wide = {"attention_mask": pad(masked["attention_mask"], (5, 0))}
    ours = speculator(free, 9)
    out = ours.generate(pad(ids, (5, 0)), **base(**wide))
    assert torch.equal(out[:, 14:], free[:, 9:])


RIGHT = torch.tensor([[3, 9, 11, 4], [6, 2, 0, 0]])


@pytest.mark.parametrize(
    "how",
    [
        {"attention_mask": (RIGHT != 0).long()},
        {"attention_mask": (RIGHT != 0).long(), "eos_token_id": 0},
        {"attention_mask": (RIGHT != 0).long(), "pad_token_id": None},
        {},
        {"eos_token_id": 0},
        {"eos_token_id": [5, 0]},
        {"eos_token_id": 0, "pad_token_id": None},
        {"attention_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]])},
    ],
    ids=str,
)
def test_7_right_padding_is_refused(how: dict) -> None:
    """Also mixed, and where padding and end token are one and no mask tells."""
    with pytest.raises(OptionError, match="padding_side = 'left'") as caught:
        Speculator(tiny("llama")).generate(RIGHT, **base(**how) | how)
    one_line(caught.value)


def test_7_prompts_that_end_with_the_end_token_are_none() -> None:
    """A mask of ones says so, and then they are text."""
    whole = {"attention_mask": torch.ones_like(RIGHT), "eos_token_id": 0}
    expected = tiny("llama").generate(RIGHT, **base(**whole))
    assert torch.equal(Speculator(tiny("llama")).generate(RIGHT, **base(**whole)), expected)
    one = RIGHT[1:]
    expected = tiny("llama").generate(one, **base(eos_token_id=0))
    assert torch.equal(Speculator(tiny("llama")).generate(one, **base(eos_token_id=0)), expected)


@pytest.mark.parametrize("tree", ["chain:4", "cartesian:3,2,1,1"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_8_sliding_window_crossed_in_mid_draft(name: str, tree: str) -> None:
    """Windows of 9 tokens; prompts end at, before and after their edge."""
    for lengths in ([9, 4, 7], [8], [12, 10]):
        ids, masked, free = greedy(lengths, name)
        ours = speculator(free, ids.shape[1], name=name, tree=tree, shape="cached")
        assert torch.equal(ours.generate(ids, **base(**masked)), free)
        assert ours.stats.tau > 1.2


def test_9_a_cache_that_cannot_roll_back_is_refused() -> None:
    config = tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(UnsupportedTarget, match="mamba") as caught:
        load(tf.MambaForCausalLM(config).eval())
    one_line(caught.value)


@pytest.mark.parametrize("source", ["call", "config"])
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_10_temperature_near_zero_is_greedy(temperature: float, source: str) -> None:
    ids, masked, free = greedy(LENGTHS)
    options = base(do_sample=True, temperature=temperature)
    ours = speculator(free, 9, shape="cached", tree="cartesian:3,2,1")
    if source == "config":
        config = made(options)
        out = ours.generate(ids, generation_config=config, **masked)
        assert config.temperature == temperature and config.do_sample
    else:
        out = ours.generate(ids, **masked, **options)
    assert torch.equal(out, free) and ours.stats.tau > 1.2


@pytest.mark.parametrize("temperature", [1e-31, 1e-40, 1e-320])
def test_10_temperature_by_which_scores_overflow(temperature: float) -> None:
    ours, (ids, _, free) = Speculator(tiny("llama")), greedy([5])
    how = base(do_sample=True, temperature=temperature)
    for decoder in (ours, Batcher(ours)):
        with pytest.raises(OptionError, match=f"temperature is {temperature}; expected .*1e-30"):
            decoder.generate(ids, **how)
        assert torch.equal(decoder.generate(ids, **how | {"temperature": 1e-30}), free)


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, float("nan"), float("-inf")])
def test_10_temperature_that_is_none(temperature: float) -> None:
    ids, masked, _ = greedy(LENGTHS)
    for decode in (
        Speculator(tiny("llama"), medusa()).generate,
        lambda *a, **k: tiny("llama").generate(*a, custom_generate=Speculator(tiny("llama")), **k),
    ):
        with pytest.raises(ValueError, match=r"temperature.*(-1|nan|inf)") as caught:
            decode(ids, **masked, **base(do_sample=True, temperature=temperature))
        one_line(caught.value)


def test_11_one_path_for_target_and_drafter() -> None:
    """The warpers that a drafter's proposals get are the very objects that the target's logits do,
    in the same order; and a drafter that equals the target is always accepted (test_coupled)."""
    items = [
        tf.TemperatureLogitsWarper(0.7),
        tf.TopKLogitsWarper(9),
        tf.TopPLogitsWarper(0.8),
    ]
    logits = torch.randn(2, 3, VOCAB)
    alone = Sampling(None, LogitsProcessorList(items))
    assert torch.equal(alone.warp(logits), alone.process_each(logits))
    penalised = Sampling(
        None, LogitsProcessorList([tf.RepetitionPenaltyLogitsProcessor(1.5), *items])
    )
    assert torch.equal(penalised.warp(logits), alone.warp(logits))
    prefix = logits[:, 0].topk(2).indices
    assert not torch.equal(penalised.process(prefix, logits[:, 0]), alone.warp(logits[:, 0]))


class Sick(Heads):
    """Proposals that turn bad in some round, for some row or for all."""

    bad: float = float("nan")
    since: int = 0
    row: int | slice = slice(None)
    whole: bool = True
    calls: int = 0

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Any:
        step = super().begin(state, features, tokens, count)
        logits = step.logits
        assert logits is not None
        if self.calls >= self.since:
            logits[self.row] = logits[self.row].index_fill(
                -1, torch.arange(VOCAB if self.whole else 1), self.bad
            )
        self.calls += 1
        return step


BAD = (float("nan"), float("inf"))
EITHER = (True, False)


@pytest.mark.parametrize(
    ("since", "bad", "whole", "sampled", "tree"),
    covering([*product((0, 3), BAD, EITHER, EITHER, ("chain:4", "cartesian:3,2,1"))]),
)
def test_12_bad_draft_logits(since: int, bad: float, whole: bool, sampled: bool, tree: str) -> None:
    """A warning, then plain decoding: the drafter is not asked again, and the text is the same."""
    ids, masked, free = greedy(LENGTHS)
    options = base(**masked)
    if sampled:
        options |= {"do_sample": True, "seed": 3, "top_p": 0.9, "temperature": 0.9}
        free = Speculator(tiny("llama")).generate(ids, **options)
    drafter = Sick(tiny("llama"), Script(pad(free[:, 9:], (0, 8))))
    drafter.bad, drafter.since, drafter.whole, drafter.row = bad, since, whole, 1
    ours = Speculator(tiny("llama"), drafter, tree=tree)
    with pytest.warns(RuntimeWarning, match="Sick proposed NaN") as caught:
        out = ours.generate(ids, **options)
    assert "\n" not in str(caught[0].message) and len(caught) == 1
    assert torch.equal(out, free) and drafter.calls == since + 1
    with warnings.catch_warnings():  # the next request asks the drafter anew
        warnings.simplefilter("error")
        drafter.calls = -1000
        assert torch.equal(ours.generate(ids, **options), free) and ours.stats.tau > 1.2


def test_12_broken_weights() -> None:
    ids, masked, free = greedy(LENGTHS)
    drafter = medusa()
    with torch.no_grad():
        drafter.weight.fill_(float("nan"))
    for tree in ("chain:4", "cartesian:3,2,1", "best-first:8,3,3", "beam:3,3"):
        with pytest.warns(RuntimeWarning, match="Medusa proposed NaN"):
            out = Speculator(tiny("llama"), drafter, tree=tree).generate(ids, **base(**masked))
        assert torch.equal(out, free)


@pytest.mark.parametrize("expansion", [None, "topk", "with_replacement", "without_replacement"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_12_one_broken_score(expansion: str | None, bad: float) -> None:
    """Of one token, in one row of the batch, however children are chosen when sampling."""
    ids, masked, _ = greedy(LENGTHS)
    rule = {"topk": "match", None: None}.get(expansion, "rejection")
    for name in ("medusa", "hydra"):
        drafter = families.drafter(name, "tiny")
        for method in ("begin", "extend"):
            true = getattr(drafter, method)

            def spoilt(*given: Any, true: Any = true) -> Any:
                step = true(*given)
                step.logits[1, :, 7] = bad
                return step

            vars(drafter)[method] = spoilt
        try:
            ours = Speculator(
                tiny("llama"), drafter, tree="[[0],[1],[0,0]]", rule=rule, expansion=expansion
            )
            with pytest.warns(RuntimeWarning, match="proposed NaN"):
                ours.generate(ids, seed=1, top_k=0, **base(do_sample=True, **masked))
        finally:
            for method in ("begin", "extend"):
                vars(drafter).pop(method)


def test_12_a_mask_of_minus_infinity_is_no_fault() -> None:
    """Tokens that a drafter never proposes are ruled out this way."""
    ids, masked, free = greedy(LENGTHS)
    drafter = Sick(tiny("llama"), Script(pad(free[:, 9:], (0, 8))))
    drafter.bad, drafter.whole = -float("inf"), False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = Speculator(tiny("llama"), drafter, tree="chain:4").generate(ids, **base(**masked))
    assert torch.equal(out, free) and drafter.calls > 3


class Poison:
    """A hook that spoils the target's logits from some forward on, in some row."""

    def __init__(self, forward: int, bad: float = float("nan"), row: int = 0):
        self.forward, self.bad, self.row, self.calls = forward, bad, row, 0

    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.forward:
            output = output.clone()
            output[self.row, :, 7] = self.bad
        return output


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 1, "top_k": 0},
    "penalty": {"repetition_penalty": 1.3},
    "criteria": {"stop_strings": ["Zq0Zq0"], "tokenizer": letters()},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize(
    ("forward", "how", "tree"),
    covering([*product((0, 1, 3), HOW, ("plain", "chain:4", "cartesian:3,2,1"))]),
)
def test_13_nan_in_the_targets_logits(forward: int, how: str, tree: str) -> None:
    """An error that names the token and the row, in the round in which plain decoding meets it."""
    ids, masked, free = greedy(LENGTHS)
    ours = speculator(free, 9, "never" if how != "greedy" else "sometimes", tree=tree)
    handle = ours.model.lm_head.register_forward_hook(Poison(forward, row=1))
    with pytest.raises(DecodingError, match=r"new token \d+ of row 1 .*NaN") as caught:
        ours.generate(ids, **base(**masked, **HOW[how]))
    handle.remove()
    assert f"token {forward + 1} " in one_line(caught.value) or how == "greedy"


@pytest.mark.filterwarnings("ignore:Medusa proposed NaN")  # it borrows the spoilt output layer
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_13_scores_that_are_no_distribution(bad: float) -> None:
    """Sampling from them raises in `generate` too; greedy decoding takes an infinity as the best.

    A rule that allows nothing leaves nothing to draw from either.
    """
    ids, masked, _ = greedy(LENGTHS)
    ours = Speculator(tiny("llama"), medusa())
    sampled = base(**masked, do_sample=True, top_k=0)
    handle = ours.model.lm_head.register_forward_hook(Poison(2, bad))
    with pytest.raises(RuntimeError):
        tiny("llama").generate(ids, **sampled)
    handle.remove()
    handle = ours.model.lm_head.register_forward_hook(Poison(2, bad))
    with pytest.raises(DecodingError, match="NaN or infinite"):
        ours.generate(ids, **sampled)
    handle.remove()
    if bad == float("inf"):
        handle = ours.model.lm_head.register_forward_hook(Poison(0, bad))
        out = ours.generate(ids, **base(**masked))
        assert (out[0, 9:] == 7).all()
        handle.remove()
    nothing = {"suppress_tokens": list(range(VOCAB))}
    with pytest.raises(DecodingError, match="NaN or infinite"):
        ours.generate(ids, **sampled, **nothing)


@pytest.mark.filterwarnings("ignore:Medusa proposed NaN")
def test_13_invalid_values_may_be_removed() -> None:
    """`remove_invalid_values` asks for going on, and the text is `generate`'s."""
    ids, masked, _ = greedy(LENGTHS)
    ours = Speculator(tiny("llama"), medusa())
    options = base(**masked, remove_invalid_values=True)
    texts = []
    for decode in (tiny("llama").generate, ours.generate):
        handle = ours.model.lm_head.register_forward_hook(Poison(0))
        texts.append(decode(ids, **options))
        handle.remove()
    assert torch.equal(*texts)


def test_15_padded_vocabulary() -> None:
    """Rows of the output layer beyond the tokenizer's: drafted on purpose, never emitted."""
    model = short("llama", 64)
    known = VOCAB - 14
    with torch.no_grad():
        model.lm_head.weight[known:] = 0  # logits of 0, below the best true ones
    ids, mask = prompts(LENGTHS)
    ids = ids % known
    plain: dict[str, Any] = {"do_sample": False}
    drawn: dict[str, Any] = {"do_sample": True, "seed": 5, "top_k": 4}
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    for sampled in (plain, drawn):
        expected = Speculator(model).generate(ids, **options, **sampled)
        if sampled is plain:
            assert torch.equal(expected, model.generate(ids, **options))
        script = torch.full((3, NEW + 8), known + 3)  # nothing but padding tokens
        drafter = make("cached", model, script, "always", scale=50.0)
        ours = Speculator(model, drafter, tree="cartesian:3,2,1")
        out = ours.generate(ids, **options, **sampled)
        assert torch.equal(out, expected) and (out[:, 9:] < known).all()


def test_18_empty_prompt() -> None:
    ours = Speculator(tiny("llama"), medusa())
    for shape in ([2, 0], [0, 3]):
        with pytest.raises(OptionError, match="empty") as caught:
            ours.generate(torch.zeros(shape, dtype=torch.long), **base())
        one_line(caught.value)
    ids, mask = prompts([4, 2])
    mask[1] = 0
    with pytest.raises(OptionError, match="all padding") as caught:
        ours.generate(ids, attention_mask=mask, **base())
    one_line(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_18_one_token_prompts(name: str) -> None:
    """Alone, and beside longer ones."""
    for lengths in ([1], [1, 1], [6, 1, 3]):
        ids, masked, free = greedy(lengths, name)
        ours = speculator(free, ids.shape[1], name=name, shape="cached", tree="cartesian:2,2")
        assert torch.equal(ours.generate(ids, **base(**masked)), free)


def test_18_no_prompt_at_all_starts_from_the_bos_token() -> None:
    for decode in (tiny("llama").generate, Speculator(tiny("llama"), medusa()).generate):
        out = decode(**base(bos_token_id=6))
        assert out[0, 0] == 6 and out.shape == (1, 1 + NEW)
    with pytest.raises(ValueError, match="bos_token_id"):
        Speculator(tiny("llama")).generate(**base())


def test_19_ids_outside_the_vocabulary() -> None:
    """Token ids from a wrong tokenizer: an error in a line, not an index error of the embedding."""
    ids, masked, _ = greedy(LENGTHS)
    for wrong in (VOCAB, -3):
        bad = ids.clone()
        bad[1, -2] = wrong
        with pytest.raises(OptionError, match=f"token {wrong}.* row 1") as caught:
            Speculator(tiny("llama")).generate(bad, **base(**masked))
        one_line(caught.value)


def test_20_end_tokens_outside_the_vocabulary_end_nothing() -> None:
    """They occur in published configs, and `generate` never meets them."""
    ids, masked, free = greedy(LENGTHS)
    ours = speculator(free, 9)
    for eos in (VOCAB, [VOCAB + 7, VOCAB + 9], -1):
        options = base(**masked, eos_token_id=eos)
        assert torch.equal(ours.generate(ids, **options), tiny("llama").generate(ids, **options))


def test_27_no_prompt_in_messages_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Errors, warnings, logs and representations tell numbers of tokens, never which."""
    secret = [61, 62, 59, 63, 60]
    ids = torch.tensor([secret])
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    drafter = Sick(tiny("llama"), Script(torch.zeros(1, 40, dtype=torch.long)))
    ours = Speculator(tiny("llama"), drafter, tree="chain:4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.generate(ids, **base())
        said += [str(item.message) for item in caught]
    handle = ours.model.lm_head.register_forward_hook(Poison(1))
    bad: list[dict[str, Any]] = [
        base(),
        base(num_beams=2),
        base(attention_mask=torch.tensor([[1, 1, 1, 1, 0]])),
        base(position_ids=ids),
        base(do_sample=True, seed=[1, 2]),
        base(max_new_tokens=-3),
        base(stop_strings=["the secret"]),
    ]
    for options in bad:
        with pytest.raises(ValueError) as error:
            ours.generate(ids, **options)
        said.append(str(error.value))
        assert isinstance(error.value, HeadstartError) or "-3" in said[-1]
    handle.remove()
    decoding = decoding_of(tiny("llama"), None, "plain")
    with torch.no_grad():
        decoding.prefill(ids, torch.ones_like(ids), 4)
    said += [repr(ours), repr(ours.stats), repr(decoding), caplog.text]
    assert len(said) > 10
    for text in said:
        assert not any(str(token) in text.split("at 0x")[0] for token in secret), text
        assert "the secret" not in text


def test_seeds_are_a_row_or_a_batch() -> None:
    """The same seeds as in plain decoding, whatever shape they come in."""
    ids, masked, _ = greedy(LENGTHS)
    ours = Speculator(tiny("llama"), medusa(), tree="cartesian:2,2")
    spread = row_seeds(9, 3).tolist()
    options = base(**masked, do_sample=True)
    assert torch.equal(
        ours.generate(ids, **options, seed=9), ours.generate(ids, **options, seed=spread)
    )
