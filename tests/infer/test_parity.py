"""What `generate` of transformers honours is honoured alike; what cannot be is refused by name."""

import itertools
import threading
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from headstart.heads import OptionError
from headstart.heads.core import CACHE
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Batcher, Speculator, target
from headstart.infer.rules.registry import RULES
from tests.support.covering import covering
from tests.support.scripted import make
from tests.support.tiny import CONFIGS, VOCAB, letters, one_line, prompts, tiny

NEW = 20
EOS = 5
LENGTHS = {1: [9], 3: [9, 4, 7]}
MODELS = ["llama", "gpt2"]


def base(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **more}


def inputs(batch: int) -> tuple[Tensor, dict[str, Any]]:
    ids, mask = prompts(LENGTHS[batch])
    return ids, {"attention_mask": mask}


def scripted(name: str, expected: Tensor, width: int, shape: str = "heads", **more: Any) -> Any:
    """A speculator whose drafter knows what `generate` wrote, but for some places."""
    new = expected[:, width:]
    return Speculator(
        tiny(name),
        make(shape, tiny(name), pad(new, (0, NEW + 8 - new.shape[1]), value=EOS)),
        tree=more.pop("tree", "cartesian:3,2,1"),
        **more,
    )


@cache
def medusa(name: str) -> Any:
    drafter = Medusa(MedusaConfig.for_target(tiny(name), heads=4)).double()
    return drafter.bind(tiny(name)).eval()


class Growing(LogitsProcessor):
    """A user's processor that counts its calls, writes in place, and trusts what it is shown."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        assert len(input_ids) > 1 or not self.seen or input_ids.shape[1] == self.seen + 1
        self.seen = input_ids.shape[1]
        scores[:, (self.seen * 7) % VOCAB] += 30.0
        return scores


class Ladder:
    """A prefix function that knows only texts that obey it: each token is 1, 2 or 3 above."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, row: int, text: Tensor) -> list[int]:
        new = text[self.width :].tolist()
        steps = [(b - a) % VOCAB for a, b in itertools.pairwise(new)]
        assert all(step in (1, 2, 3) for step in steps), "a text that was never written"
        return [(new[-1] + step) % VOCAB for step in (1, 2, 3)] if new else [10 + row]


PROCESSORS: dict[str, Any] = {
    "repetition_penalty": lambda: {"repetition_penalty": 1.7},
    "prompt_ignore_length": lambda: {
        "logits_processor": [tf.RepetitionPenaltyLogitsProcessor(1.7, 5)]
    },
    "two penalties": lambda: {
        "logits_processor": [
            tf.RepetitionPenaltyLogitsProcessor(1.7),
            tf.RepetitionPenaltyLogitsProcessor(1.4, 9),
        ]
    },
    "encoder_repetition_penalty": lambda: {"encoder_repetition_penalty": 1.8},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": lambda: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda: {"bad_words_ids": [[i] for i in range(20)] + [[21, 22], [40, 41, 42]]},
    "sequence_bias": lambda: {"sequence_bias": [[[30], 4.0], [[30, 31], 50.0], [[7], -9.0]]},
    "min_length": lambda: {"min_length": 15, "sequence_bias": [[[EOS], 60.0]]},
    "min_new_tokens": lambda: {"min_new_tokens": 9, "sequence_bias": [[[EOS], 60.0]]},
    "forced_eos_token_id": lambda: {"forced_eos_token_id": EOS},
    "suppress_tokens": lambda: {"suppress_tokens": list(range(0, VOCAB, 2))},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": list(range(32, VOCAB))},
    "exponential_decay_length_penalty": lambda: {"exponential_decay_length_penalty": (4, 1.6)},
    "watermarking_config": lambda: {
        "watermarking_config": tf.WatermarkingConfig(bias=12.0, greenlist_ratio=0.5)
    },
    "watermarking selfhash": lambda: {
        "watermarking_config": tf.WatermarkingConfig(
            bias=12.0, greenlist_ratio=0.5, seeding_scheme="selfhash", context_width=3
        )
    },
    "remove_invalid_values": lambda: {"remove_invalid_values": True, "repetition_penalty": 1.7},
    "renormalize_logits": lambda: {"renormalize_logits": True, "repetition_penalty": 1.7},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": Ladder(9)},
    "a user's": lambda: {"logits_processor": [Growing()]},
    "several": lambda: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "suppress_tokens": [1, 2, 3],
        "logits_processor": [Growing()],
    },
}


@pytest.mark.parametrize(
    ("processor", "name", "batch", "shape"),
    covering([*itertools.product(PROCESSORS, MODELS, LENGTHS, ("heads", "cached"))]),
)
def test_greedy_with_every_processor(processor: str, name: str, batch: int, shape: str) -> None:
    ids, more = inputs(batch)
    options = base(eos_token_id=EOS, **more)
    expected = tiny(name).generate(ids, **options, **PROCESSORS[processor]())
    free = tiny(name).generate(ids, **options)
    # It does something, or the test would prove nothing.
    assert not torch.equal(expected, free)
    ours = scripted(name, expected, ids.shape[1], shape)
    assert torch.equal(ours.generate(ids, **options, **PROCESSORS[processor]()), expected)
    assert ours.stats.rounds < (expected.shape[1] - 9) * batch
    plain = Speculator(tiny(name)).generate(ids, **options, **PROCESSORS[processor]())
    assert torch.equal(plain, expected)


SAMPLED: dict[str, Any] = {
    "typical_p": lambda: {"typical_p": 0.6},
    "epsilon_cutoff": lambda: {"epsilon_cutoff": 0.02},
    "eta_cutoff": lambda: {"eta_cutoff": 0.02},
    "min_p": lambda: {"min_p": 0.05},
    "top_h": lambda: {"top_h": 0.5},
    "top_p and top_k": lambda: {"top_p": 0.8, "top_k": 12},
    "temperature": lambda: {"temperature": 1.9, "top_k": 0},
    "repetition_penalty": lambda: {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 1},
    "suppress_tokens": lambda: {"suppress_tokens": list(range(0, VOCAB, 2))},
    "renormalize_logits": lambda: {"renormalize_logits": True, "top_p": 0.9, "typical_p": 0.9},
    "exponential_decay_length_penalty": lambda: {"exponential_decay_length_penalty": (4, 1.6)},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": Ladder(9)},
    "a user's": lambda: {"logits_processor": [Growing()], "temperature": 3.0},
}


@pytest.mark.parametrize(
    ("processor", "rule", "batch"),
    covering([*itertools.product(SAMPLED, ("coupled", "match"), LENGTHS)]),
)
def test_sampling_with_every_processor_equals_plain(processor: str, rule: str, batch: int) -> None:
    ids, more = inputs(batch)
    options = base(do_sample=True, seed=4, eos_token_id=EOS, **more)
    expected = Speculator(tiny("llama")).generate(ids, **options, **SAMPLED[processor]())
    free = Speculator(tiny("llama")).generate(ids, **options, top_k=0)
    assert not torch.equal(expected, free)
    ours = scripted("llama", expected, ids.shape[1], "cached", rule=rule)
    assert torch.equal(ours.generate(ids, **options, **SAMPLED[processor]()), expected)


def limit(freedom: int) -> float:
    """The chi-square quantile at 1 - 1e-6 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.753 * (2 / (9 * freedom)) ** 0.5) ** 3


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 3.0, "top_k": 6},
    "typical_p": {"typical_p": 0.7, "temperature": 3.0, "top_k": 0},
    "sequence_bias": {
        "sequence_bias": [[[a, b], 6.0] for a in range(0, VOCAB, 2) for b in (7, 8)],
        "temperature": 6.0,
        "top_k": 8,
    },
}


@pytest.mark.parametrize("what", DISTRIBUTIONS)
def test_two_tokens_follow_the_processed_softmax(what: str) -> None:
    """Pairs of first tokens over 3,000 rows, at alpha 1e-6, against processors applied by hand."""
    model, rows = tiny("llama"), 3000
    ids, _ = prompts([6], seed=4)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 3, **DISTRIBUTIONS[what]}
    ours = Speculator(model, medusa("llama"), tree="cartesian:2,2", rule="coupled")
    out = ours.generate(ids.expand(rows, -1), seed=6, **options)[:, 6:8]
    processors = model._get_logits_processor(
        ours_config(model, options), 6, ids, logits_processor=[], device="cpu", model_kwargs={}
    )

    def after(text: Tensor, wrong: bool = False) -> Tensor:
        logits = model(text, use_cache=False).logits[:, -1].float()
        seen = text[:, :-1] if wrong else text
        return processors(seen, logits).double().softmax(-1)

    with torch.no_grad():
        first = after(ids)[0]
        tokens = first.nonzero().flatten()
        second = after(torch.cat([ids.expand(len(tokens), -1), tokens[:, None]], 1))
        blind = after(torch.cat([ids.expand(len(tokens), -1), tokens[:, None]], 1), wrong=True)
    found = torch.zeros(VOCAB, VOCAB, dtype=torch.double)
    found.index_put_((out[:, 0], out[:, 1]), torch.ones(rows, dtype=torch.double), accumulate=True)

    def far(conditional: Tensor) -> bool:
        joint = torch.zeros(VOCAB, VOCAB, dtype=torch.double)
        joint[tokens] = first[tokens, None] * conditional
        if found[joint == 0].any():
            return True
        expected = joint * rows
        rare = expected < 5
        cells = [(f, e) for f, e in zip(found[~rare], expected[~rare], strict=True)]
        cells.append((found[rare].sum(), expected[rare].sum().clamp(min=1e-9)))
        statistic = sum(float((f - e) ** 2 / e) for f, e in cells if e > 1e-6)
        return statistic > limit(len(cells) - 1)

    assert not far(second)
    if what == "sequence_bias":
        assert far(blind)  # a prefix that lags by a token is seen


def ours_config(model: Any, options: dict[str, Any]) -> GenerationConfig:
    config, _ = model._prepare_generation_config(GenerationConfig(**options))
    model._prepare_special_tokens(config, device="cpu")
    return config


STATEFUL: dict[str, Any] = {
    "guidance": lambda: {"guidance_scale": 1.9},
    "negative prompt": lambda: {
        "guidance_scale": 1.9,
        "negative_prompt_ids": torch.tensor([[4, 9, 33]]),
    },
    "SynthID": lambda: {
        "watermarking_config": tf.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 8, 21])
    },
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", STATEFUL)
def test_processors_with_a_state(what: str, name: str) -> None:
    """They see each token once and in order, so one row is exact; rows apart are refused."""
    ids, more = inputs(1)
    expected = tiny(name).generate(ids, **base(**more), **STATEFUL[what]())
    assert what == "SynthID" or not torch.equal(expected, tiny(name).generate(ids, **base(**more)))
    ours = scripted(name, expected, ids.shape[1], "cached")
    assert torch.equal(ours.generate(ids, **base(**more), **STATEFUL[what]()), expected)
    assert ours.stats.tau > 1.2
    ids, more = inputs(3)
    with pytest.raises(OptionError, match=r"LogitsProcessor keeps a state .* 3 rows") as caught:
        ours.generate(ids, **base(**more), **STATEFUL[what]())
    one_line(caught.value)


def test_a_bias_of_a_token_that_there_is_not() -> None:
    ids, more = inputs(1)
    for name, value in (("sequence_bias", [[[VOCAB], 1.0]]), ("bad_words_ids", [[3], [VOCAB]])):
        with pytest.raises(OptionError, match=f"token {VOCAB} of {name} is not among") as caught:
            Speculator(tiny("llama")).generate(ids, **base(**more), **{name: value})
        one_line(caught.value)


@pytest.mark.parametrize("words", [[[EOS]], [[]], [[], [33]]], ids=str)
def test_bad_words_that_are_end_tokens_or_empty(words: list[list[int]]) -> None:
    """The former are left out by transformers, so that none may be left."""
    ids, more = inputs(1)
    options = base(eos_token_id=[EOS, 7], bad_words_ids=words, **more)
    expected, ours = tiny("llama").generate(ids, **options), Speculator(tiny("llama"))
    for decoder in (ours, Batcher(ours)):
        assert torch.equal(decoder.generate(ids, **options), expected)


def test_a_penalty_that_ignores_more_than_the_prompt() -> None:
    ids, more = inputs(3)
    for ignored in (9, torch.tensor([0, 5, 9])):
        options = base(logits_processor=[tf.RepetitionPenaltyLogitsProcessor(1.7, ignored)], **more)
        expected = tiny("llama").generate(ids, **options)
        assert torch.equal(Speculator(tiny("llama")).generate(ids, **options), expected)
    options["logits_processor"] = [tf.RepetitionPenaltyLogitsProcessor(1.7, ignored + 1)]
    with pytest.raises(OptionError, match=r"is 10 and the prompt has 9 tokens") as caught:
        Speculator(tiny("llama")).generate(ids, **options)
    one_line(caught.value)


def test_a_stateful_watermark_when_sampling() -> None:
    ids, more = inputs(1)
    options = base(do_sample=True, seed=3, **more)
    expected = Speculator(tiny("llama")).generate(ids, **options, **STATEFUL["SynthID"]())
    assert not torch.equal(expected, Speculator(tiny("llama")).generate(ids, **options))
    ours = scripted("llama", expected, ids.shape[1])
    assert torch.equal(ours.generate(ids, **options, **STATEFUL["SynthID"]()), expected)


@pytest.mark.parametrize("sampling", [False, True])
def test_forced_bos_of_a_one_token_prompt(sampling: bool) -> None:
    ids = torch.tensor([[3], [8]])
    options = base(forced_bos_token_id=17, begin_suppress_tokens=[2, 3], do_sample=sampling)
    if sampling:
        options["seed"] = 1
        expected = Speculator(tiny("llama")).generate(ids, **options)
    else:
        expected = tiny("llama").generate(ids, **options)
    assert (expected[:, 1] == 17).all()
    assert torch.equal(scripted("llama", expected, 1).generate(ids, **options), expected)


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize(
    "ends", [{"max_length": 21}, {"eos_token_id": 40}, {"eos_token_id": [40, 3, 51]}, {}]
)
def test_lengths_and_end_tokens(ends: dict[str, Any], batch: int) -> None:
    ids, more = inputs(batch)
    options = {**base(**more), **ends}
    if "max_length" in ends:
        del options["max_new_tokens"]
    config = GenerationConfig(**{k: v for k, v in options.items() if k != "attention_mask"})
    for source in (options, {"generation_config": config, **more}):
        expected = tiny("llama").generate(ids, **source)
        ours = scripted("llama", expected, ids.shape[1])
        assert torch.equal(ours.generate(ids, **source), expected)
        through = tiny("llama").generate(ids, custom_generate=ours, **source)
        assert torch.equal(through, expected)


def test_max_time_stops() -> None:
    ids, more = inputs(3)
    expected = tiny("llama").generate(ids, **base(**more), max_time=0.0)
    ours = scripted("llama", tiny("llama").generate(ids, **base(**more)), ids.shape[1])
    assert torch.equal(ours.generate(ids, **base(**more), max_time=0.0), expected)
    assert expected.shape[1] == 10


class AtSum(StoppingCriteria):
    """Stops a row when its last two tokens add up to more than a bound."""

    def __init__(self, bound: int):
        self.bound = bound

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -2:].sum(1) > self.bound


@pytest.mark.parametrize("eos", [None, VOCAB - 1])
@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("bound", [80, 95, 108])
def test_criteria_without_an_end_token(bound: int, batch: int, eos: int | None) -> None:
    """Then `generate` does not pad: rows write on until the criteria have held for all of them."""
    ids, more = inputs(batch)
    options = base(**more, stopping_criteria=[AtSum(bound)], eos_token_id=eos)
    expected = tiny("llama").generate(ids, **options)
    free = tiny("llama").generate(ids, **base(**more))
    for shape in ("heads", "cached"):
        ours = scripted("llama", free, ids.shape[1], shape, tree="chain:4")
        assert torch.equal(ours.generate(ids, **options), expected)


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("source", ["call", "speculator", "config", "model"])
def test_stop_strings(source: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an argument, in a config or as the model's default; the tokenizer from call or maker."""
    model, tokenizer = tiny("llama"), letters()
    ids, more = inputs(batch)
    free = model.generate(ids, **base(**more))
    ours = scripted("llama", free, ids.shape[1], tree="chain:4")
    strings = ["".join(chr(48 + t) for t in free[0, 9 + 7 : 9 + 9].tolist())]
    options = base(**more, eos_token_id=VOCAB - 1)
    expected = model.generate(ids, **options, stop_strings=strings, tokenizer=tokenizer)
    assert expected.shape[1] < free.shape[1] or batch > 1
    if source == "speculator":
        ours.tokenizer = tokenizer
        out = ours.generate(ids, **options, stop_strings=strings)
    elif source == "call":
        out = ours.generate(ids, **options, stop_strings=strings[0], tokenizer=tokenizer)
    elif source == "config":
        mask = options.pop("attention_mask")
        config = GenerationConfig(**options, stop_strings=strings)
        out = ours.generate(ids, generation_config=config, attention_mask=mask, tokenizer=tokenizer)
        assert config.stop_strings == strings
    else:
        monkeypatch.setattr(model.generation_config, "stop_strings", strings)
        out = ours.generate(ids, **options, tokenizer=tokenizer)
        assert model.generation_config.stop_strings == strings
        off = ours.generate(ids, **options, stop_strings=None)
        assert torch.equal(off, model.generate(ids, **options, stop_strings=None))
    assert torch.equal(out, expected)


def test_the_same_stop_strings_are_looked_for_in_the_vocabulary_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, true = [], tf.StopStringCriteria.__init__

    def init(self: Any, tokenizer: Any, strings: Any) -> None:
        made.append(strings)
        true(self, tokenizer, strings)

    monkeypatch.setattr(tf.StopStringCriteria, "__init__", init)
    ours, (ids, mask) = Speculator(tiny("llama"), tokenizer=letters()), inputs(1)
    for strings in (["Z"], ["Z"], ["Q"], ["Q"], "Q"):
        ours.generate(ids, **mask, **base(), stop_strings=strings)
    assert made == [["Z"], ["Q"], "Q"]
    ours.generate(ids, **mask, **base(), stop_strings="Q", tokenizer=letters())
    assert len(made) == 4  # another tokenizer


def test_stop_strings_without_a_tokenizer() -> None:
    ids, more = inputs(1)
    ours = Speculator(tiny("llama"))
    with pytest.raises(OptionError, match="tokenizer") as caught:
        ours.generate(ids, **base(**more), stop_strings=["a"])
    one_line(caught.value)


@pytest.mark.parametrize("batch", LENGTHS)
def test_a_mask_left_to_be_inferred(batch: int) -> None:
    """From the padding token, when it is known and no end token."""
    ids, _ = inputs(batch)
    expected = tiny("llama").generate(ids, **base())
    with_mask = tiny("llama").generate(ids, **base(**inputs(batch)[1]))
    assert torch.equal(expected, with_mask)
    assert torch.equal(scripted("llama", expected, 9).generate(ids, **base()), expected)
    unset = base(pad_token_id=None)
    expected = tiny("llama").generate(ids, **unset)
    assert torch.equal(scripted("llama", expected, 9).generate(ids, **unset), expected)


@pytest.mark.parametrize("what", ["attention_mask", "return_dict"])
def test_tokenizer_output_is_taken_whole(what: str) -> None:
    ids, more = inputs(3)
    ours = Speculator(tiny("llama"), medusa("llama"))
    expected = tiny("llama").generate(ids, **base(**more))
    batch = tf.BatchEncoding({"input_ids": ids, **more})
    if what == "return_dict":
        out = ours.generate(**batch, **base(return_dict_in_generate=True)).sequences
    else:
        out = ours.generate(**batch, **base())
    assert torch.equal(out, expected)
    assert torch.equal(ours.generate(inputs=ids, **base(**more)), expected)


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("how", ["plain", "warped", "text"])
def test_scores_and_logits(how: str, ends: bool, batch: int) -> None:
    ids, more = inputs(batch)
    adapter_loss_change = tiny("llama").generate(ids, **base(**more))
    eos = int(adapter_loss_change[0, 9 + 6]) if ends else None
    options = base(eos_token_id=eos, return_dict_in_generate=True, **more)
    options |= {"output_scores": True, "output_logits": True}
    options |= {
        "plain": {},
        "warped": {"suppress_tokens": [1, 9]},
        "text": {"repetition_penalty": 1.5},
    }[how]
    expected = tiny("llama").generate(ids, **options)
    ours = scripted("llama", expected.sequences, 9, "cached")
    out = ours.generate(ids, **options)
    assert torch.equal(out.sequences, expected.sequences) and ours.stats.tau > 1.2
    new = out.sequences[:, 9:]
    going = (new[:, :-1] != (-1 if eos is None else eos)).cumprod(1)
    running = torch.cat([torch.ones(batch, 1), going], 1).bool()
    for name in ("scores", "logits"):
        mine, theirs = getattr(out, name), getattr(expected, name)
        assert len(mine) == len(theirs) == new.shape[1]
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.dtype == b.dtype and a.shape == b.shape
            torch.testing.assert_close(a[running[:, step]], b[running[:, step]])
            done = a[~running[:, step]].softmax(-1)
            assert (done[:, 0] == 1).all()
    assert running.all() or ends
    transitions = tiny("llama").compute_transition_scores(
        out.sequences, out.scores, normalize_logits=True
    )
    assert torch.isfinite(transitions).all() and (transitions[~running] == 0).all()


def test_scores_alone_and_none() -> None:
    ids, more = inputs(1)
    ours = Speculator(tiny("llama"), medusa("llama"))
    both: dict[str, Any] = {"return_dict_in_generate": True, **base(**more)}
    out = ours.generate(ids, output_scores=True, **both)
    assert out.logits is None and len(out.scores) == NEW
    out = ours.generate(ids, **both)
    assert out.logits is None and out.scores is None
    # Without return_dict_in_generate `generate` ignores the wish.
    assert isinstance(ours.generate(ids, output_scores=True, **base(**more)), Tensor)


@pytest.mark.parametrize("pad", [VOCAB, -1, -100])
def test_scores_where_no_logit_is_the_padding_token_s(pad: int) -> None:
    """A row that has ended then has -inf alone."""
    ids, more = inputs(3)
    eos = int(tiny("llama").generate(ids, **base(**more))[0, 11])
    options = base(**more) | {"eos_token_id": eos, "pad_token_id": 0}
    expected = tiny("llama").generate(ids, **options)
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options |= {"pad_token_id": pad}
    out = Speculator(tiny("llama"), medusa("llama")).generate(ids, **options)
    assert torch.equal(out.sequences.where(out.sequences != pad, 0), expected)
    assert out.sequences[0, -1] == pad and out.past_key_values is None
    for last in (out.scores[-1], out.logits[-1]):
        assert last[0].isneginf().all() and last[1:].isfinite().any()


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("since", [0, 14])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scores_of_another_type(dtype: torch.dtype, since: int, batch: int) -> None:
    """A processor that changes the type of scores, from some length of the text on."""

    class Casts(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores.to(dtype) if input_ids.shape[1] >= since else scores

    ids, more = inputs(batch)
    options = base(return_dict_in_generate=True, output_scores=True, output_logits=True, **more)
    expected = tiny("llama").generate(ids, **options, logits_processor=[Casts()])
    ours = scripted("llama", expected.sequences, 9, "cached")
    out = ours.generate(ids, **options, logits_processor=[Casts()])
    assert torch.equal(out.sequences, expected.sequences) and ours.stats.tau > 1.2
    for a, b in zip(out.scores, expected.scores, strict=True):
        assert a.dtype == (b.dtype if not since else torch.promote_types(dtype, torch.float32))
        torch.testing.assert_close(a.to(b.dtype), b)
    for a, b in zip(out.logits, expected.logits, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    options |= {"do_sample": True, "seed": 3, "logits_processor": [Casts()]}
    for rule in ("match", "coupled", "rejection"):
        out = scripted("llama", expected.sequences, 9, rule=rule).generate(ids, **options)
        assert len(out.scores) == NEW and all(torch.isfinite(s).all() for s in out.logits)


TREES = ("plain", "chain:3", "cartesian:3,2,1", "best-first:8,3,3")


@pytest.mark.parametrize(
    ("rule", "tree", "batch"), covering([*itertools.product(sorted(RULES), TREES, LENGTHS)])
)
def test_every_rule_keeps_scores_and_logits(rule: str, tree: str, batch: int) -> None:
    """They are the target's on the text that was written."""
    if rule == "block" and tree not in ("plain", "chain:3"):
        tree = "chain:4"
    ids, more = inputs(batch)
    options = base(do_sample=rule != "greedy", return_dict_in_generate=True, **more)
    options |= {"seed": 3} if rule != "greedy" else {}
    options |= {"output_scores": True, "output_logits": True, "suppress_tokens": [1, 9]}
    drafter = None if tree == "plain" else medusa("llama")
    expansion = (
        "topk" if tree == "best-first:8,3,3" and rule in ("rejection", "traversal") else None
    )
    ours = Speculator(tiny("llama"), drafter, tree=tree, rule=rule, expansion=expansion)
    out = ours.generate(ids, **options)
    mask = torch.cat([more["attention_mask"], torch.ones(batch, NEW, dtype=torch.long)], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = tiny("llama")(out.sequences, attention_mask=mask, position_ids=places).logits
    logits = logits[:, 8:-1].float()
    torch.testing.assert_close(torch.stack(out.logits, 1), logits, rtol=1e-4, atol=1e-4)
    logits[..., [1, 9]] = -torch.inf
    scores = torch.stack(out.scores, 1)
    logits = logits.masked_fill(scores.isinf(), -torch.inf)  # by the default top-k
    torch.testing.assert_close(scores, logits, rtol=1e-4, atol=1e-4)
    chosen = scores.gather(2, out.sequences[:, 9:, None])
    assert chosen.isfinite().all() and scores.isinf()[..., [1, 9]].all()


def test_scores_when_sampling_are_those_of_plain() -> None:
    ids, more = inputs(3)
    options = base(do_sample=True, seed=2, top_p=0.9, eos_token_id=EOS, **more)
    options |= {"return_dict_in_generate": True, "output_scores": True}
    expected = Speculator(tiny("llama")).generate(ids, **options)
    ours = scripted("llama", expected.sequences, 9, "cached")
    out = ours.generate(ids, **options)
    assert torch.equal(out.sequences, expected.sequences)
    for a, b in zip(out.scores, expected.scores, strict=True):
        torch.testing.assert_close(a, b)


def test_the_iterator_streamer() -> None:
    """The text comes in pieces, on another thread, and is the text."""
    ids, more = inputs(1)
    tokenizer = letters()
    expected = tiny("llama").generate(ids, **base(**more))
    ours = scripted("llama", expected, 9)
    streamer = tf.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    options = base(**more, streamer=streamer)
    worker = threading.Thread(target=lambda: ours.generate(ids, **options))
    worker.start()
    pieces = list(streamer)
    worker.join()
    assert "".join(pieces) == tokenizer.decode(expected[0, 9:])


def test_a_streamer_takes_one_row() -> None:
    ids, more = inputs(3)
    streamer = tf.TextStreamer(letters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch size 1"):
        tiny("llama").generate(ids, **base(**more), streamer=streamer)
    with pytest.raises(OptionError, match="one row, found 3") as caught:
        Speculator(tiny("llama")).generate(ids, **base(**more), streamer=streamer)
    one_line(caught.value)


def test_several_sequences_a_prompt_with_padding() -> None:
    ids, more = inputs(3)
    options = base(do_sample=True, num_return_sequences=2, seed=7, eos_token_id=EOS, **more)
    expected = Speculator(tiny("llama")).generate(ids, **options)
    out = scripted("llama", expected, 9, "cached").generate(ids, **options)
    assert out.shape[0] == 6 and torch.equal(out, expected)


def cached() -> Any:
    cache = tf.DynamicCache(config=tiny("llama").config)
    with torch.no_grad():
        tiny("llama")(inputs(1)[0][:, :3], **{CACHE: cache})
    return cache


@pytest.mark.parametrize("new", [3.0, 2.5, 0.3, 3, torch.tensor(3)])
def test_a_length_that_is_no_whole_number(new: Any) -> None:
    """As in `generate`, which writes until there are no fewer tokens."""
    ids, more = inputs(3)
    expected = tiny("llama").generate(ids, **base(**more) | {"max_new_tokens": new})
    ours = Speculator(tiny("llama"), medusa("llama"))
    out = ours.generate(ids, **base(**more) | {"max_new_tokens": new})
    assert torch.equal(out, expected)


@pytest.mark.parametrize("new", [float("inf"), float("nan")])
def test_a_length_without_end_is_refused(new: float) -> None:
    ids, more = inputs(3)
    with pytest.raises(OptionError, match="max_new_tokens") as caught:
        Speculator(tiny("llama")).generate(ids, **base(**more) | {"max_new_tokens": new})
    one_line(caught.value)


def test_an_assistant_that_transformers_drops() -> None:
    """`generate` hands no assistant to a callable, so it is not seen and changes nothing."""
    ids, more = inputs(1)
    expected = tiny("llama").generate(ids, **base(**more))
    ours = scripted("llama", expected, 9)
    options = base(assistant_model=tiny("llama", seed=2), **more)
    assert torch.equal(tiny("llama").generate(ids, custom_generate=ours, **options), expected)
    with pytest.raises(OptionError, match="assistant_model") as caught:
        ours.generate(ids, **options)
    one_line(caught.value)


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "force_words_ids": {"force_words_ids": [[3]]},
    "assistant_model": {"assistant_model": True},
    "custom_generate": {"custom_generate": "a/b"},
    "synced_gpus": {"synced_gpus": True},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "output_hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 9, 32, dtype=torch.float64)},
    f"{CACHE} was given": {CACHE: cached},
    "position_ids": {"position_ids": torch.arange(1, 10).unsqueeze(0)},
    "cache_implementation": {"cache_implementation": "offloaded"},
    "'offloaded_static'": {"cache_implementation": "offloaded_static"},
    "'offloaded_hybrid'": {"cache_implementation": "offloaded_hybrid"},
    "attention_mask hides": {"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1]])},
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str) -> None:
    ids, more = inputs(1)
    options = {k: v() if callable(v) else v for k, v in REFUSED[what].items()}
    ours = Speculator(tiny("llama"), medusa("llama"))
    with pytest.raises(OptionError, match=what) as caught:
        ours.generate(None if "inputs_embeds" in options else ids, **base(**more) | options)
    one_line(caught.value)


def test_token_types_are_refused() -> None:
    ids, more = inputs(1)
    with pytest.raises(OptionError, match="token_type_ids") as caught:
        Speculator(tiny("gpt2")).generate(ids, **base(**more), token_type_ids=torch.zeros_like(ids))
    one_line(caught.value)


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"disable_compile": True},
        {"compile_config": tf.CompileConfig()},
        {"prefill_chunk_size": 4},
        {"low_memory": True},
        {"logits_to_keep": 2},
        {"num_beams": 1},
        {"guidance_scale": 1.0},
        {"position_ids": torch.arange(9).unsqueeze(0)},
        {"output_hidden_states": True},
    ],
    ids=str,
)
def test_what_does_not_change_the_text_is_allowed(harmless: dict[str, Any]) -> None:
    ids, more = inputs(1)
    expected = tiny("llama").generate(ids, **base(**more))
    ours = scripted("llama", expected, 9)
    assert torch.equal(ours.generate(ids, **base(**more), **harmless), expected)


def test_unknown_arguments_are_refused_as_in_generate() -> None:
    ids, more = inputs(1)
    for decode in (tiny("llama").generate, Speculator(tiny("llama")).generate):
        with pytest.raises(ValueError, match="top_kk"):
            decode(ids, **base(**more), top_kk=3)


@pytest.mark.parametrize("ours", [False, True])
def test_warnings_of_generate_stay(ours: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Lengths that cannot be met, and a rotary model past its trained length: it goes on."""
    config = CONFIGS["llama"]()
    config.max_position_embeddings = 16
    model: Any = tf.LlamaForCausalLM(config).double().eval()
    ids, more = inputs(1)
    reference = model.generate(ids, **base(**more))
    assert len(reference[0]) == 9 + NEW
    decode = model.generate
    if ours:
        drafter = make("heads", model, pad(reference[:, 9:], (0, 8)))
        decode = Speculator(model, drafter, tree="chain:4").generate
    tf.logging.warning_once.cache_clear()
    tf.logging.enable_propagation()
    with pytest.warns(UserWarning, match="Unfeasible length"):
        out = decode(ids, **base(**more), min_new_tokens=NEW + 1, eos_token_id=EOS)
    assert "maximum length (16)" in caplog.text
    assert torch.equal(decode(ids, **base(**more)), reference) and out.shape == reference.shape


def test_the_models_defaults() -> None:
    """A model's own generation config counts like a call's, and is left as it was."""
    ids, more = inputs(3)
    model = tiny("llama")
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig(
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=[40, 3],
            repetition_penalty=1.4,
            no_repeat_ngram_size=2,
        )
        expected = model.generate(ids, **more)
        saved = model.generation_config.to_dict()
        assert torch.equal(scripted("llama", expected, 9).generate(ids, **more), expected)
        assert model.generation_config.to_dict() == saved
        # A call's own value wins over the model's.
        options = {"repetition_penalty": 1.0, "eos_token_id": 51, **more}
        expected = model.generate(ids, **options)
        assert torch.equal(scripted("llama", expected, 9).generate(ids, **options), expected)
    finally:
        model.generation_config = before


@pytest.mark.parametrize("shape", ["heads", "cached"])
def test_a_long_answer_grows_its_memory(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generous limit allocates little; what is then needed is added in few steps."""
    from headstart.infer import request

    config = CONFIGS["llama"]()
    config.max_position_embeddings = 200_000
    model = tf.LlamaForCausalLM(config).double().eval()
    ids, mask = prompts([9, 3])
    reserved: list[int] = []
    true = target.SlabCache.reserve

    def counted(self: Any, capacity: int) -> None:
        if capacity > self.capacity:
            reserved.append(capacity)
        true(self, capacity)

    monkeypatch.setattr(target.SlabCache, "reserve", counted)
    monkeypatch.setattr(request, "FIRST_TOKENS", 16)
    free = model.generate(ids, attention_mask=mask, **base(max_new_tokens=230))  # type: ignore[operator]
    end = int(free[0, 9 + 200])
    script = pad(free[:, 9:], (0, 8))
    options = base(attention_mask=mask, max_new_tokens=100_000, eos_token_id=end)
    stop = {"stopping_criteria": [Longer(9 + 220)]}
    expected = model.generate(ids, **options, **stop)  # type: ignore[operator]
    reserved.clear()
    ours = Speculator(model, make(shape, model, script), tree="cartesian:3,2,1")
    assert torch.equal(ours.generate(ids, **options, **stop), expected)
    assert reserved[0] <= 64 and reserved[-1] <= 512
    assert len(reserved) <= 8 and reserved == sorted(reserved)


class Longer(StoppingCriteria):
    """A length limit that the loop cannot plan for."""

    def __init__(self, most: int):
        self.most = most

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.most)


def test_a_huge_limit_costs_nothing() -> None:
    """Neither cache nor text is made for it at once."""
    ids, more = inputs(1)
    ours = Speculator(tiny("llama"), medusa("llama"))
    free = tiny("llama").generate(ids, **base(**more))
    options = base(max_new_tokens=10**12, eos_token_id=int(free[0, 15]), **more)
    out = ours.generate(ids, **options)
    assert torch.equal(out, tiny("llama").generate(ids, **options))
    assert ours.target.cache.capacity < 1000


class Cooling(tf.TemperatureLogitsWarper):
    """A subclass of a row-wise processor that reads the text and counts its calls."""

    def __init__(self, temperature: float) -> None:
        super().__init__(temperature)
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        scores = super().__call__(input_ids, scores).clone()
        scores.scatter_add_(1, input_ids[:, -3:], torch.full_like(scores[:, :3], -20.0))
        scores[:, self.calls % VOCAB] += 9.0
        return scores


class Fading(tf.RepetitionPenaltyLogitsProcessor):
    """A repetition penalty of the user's own, for the last tokens alone."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return super().__call__(input_ids[:, -4:], scores)


class Climbing(tf.PrefixConstrainedLogitsProcessor):
    """A subclass that adds to what its function allows."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return super().__call__(input_ids, scores) + 30.0 * (torch.arange(VOCAB) == VOCAB - 1)


SUBCLASSES: dict[str, Any] = {
    "warper": lambda: Cooling(0.9),
    "penalty": lambda: Fading(3.0),
    "prefix": lambda: Climbing(lambda row, text: [int(text[-1]) * 5 % VOCAB, VOCAB - 1, 3], 1),
}


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("shape", ["heads", "cached"])
@pytest.mark.parametrize("what", SUBCLASSES)
def test_a_subclass_of_a_known_processor_is_a_users_own(
    what: str, shape: str, sampling: bool
) -> None:
    """What it reads is not known, so it is called as `generate` calls it."""
    ids, more = inputs(1)
    options = base(do_sample=sampling, **more) | ({"seed": 4} if sampling else {})

    def write(decode: Any) -> Tensor:
        return decode.generate(ids, **options, logits_processor=[SUBCLASSES[what]()])

    expected = write(Speculator(tiny("llama")) if sampling else tiny("llama"))
    if sampling:  # the same processor under a class that nobody knows
        unknown = Outer(SUBCLASSES[what]())
        again = Speculator(tiny("llama")).generate(ids, **options, logits_processor=[unknown])
        assert torch.equal(again, expected)
    ours = scripted("llama", expected, 9, shape)
    assert torch.equal(write(ours), expected) and ours.stats.tau > 1.2
    if sampling:
        with pytest.raises(OptionError, match=type(SUBCLASSES[what]()).__name__):
            write(scripted("llama", expected, 9, shape, rule="traversal"))


class Outer(LogitsProcessor):
    """Calls another processor."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return self.inner(input_ids, scores)
