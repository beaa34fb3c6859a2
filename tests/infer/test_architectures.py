"""Every architecture writes what `generate` writes, or is refused by name in one line."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from headstart.heads import DecodingError, UnsupportedTarget
from headstart.heads.core import CACHE, masks
from headstart.infer import Speculator, Target, target
from tests.support.architectures import ARCHITECTURES, PADDED_FROM
from tests.support.scripted import make
from tests.support.tiny import COMMON, VOCAB, config_of, one_line, prompts

NEW = 40
LENGTHS = [13, 7, 10, 3]  # around the window of 9, so that drafts cross it
TREE = "cartesian:3,2,1"
NAN_WHEN_PADDED = {"gemma2"}
"""Eager attention takes its softmax in float32, where float64's lowest value is minus infinity, so
rows of padding become NaN in `generate`; what it writes without padding is the measure then."""


@cache
def built(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """The family's tiny random model; the same object at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ARCHITECTURES[name]().to(dtype).eval()
    if dtype == torch.float64 and hasattr(model.config, "num_local_experts"):
        # Experts run in torch's grouped_mm, which takes float32 and narrower types only.
        model.set_experts_implementation("eager")
    return model


@pytest.fixture(autouse=True, scope="module")
def forget_models() -> Iterator[None]:
    yield
    built.cache_clear()


@cache
def reference(name: str, row: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts, mask, and what `generate` writes after them, [B, NEW]; of one row, or of all."""
    ids, mask = prompts(LENGTHS)
    if row is None and name in NAN_WHEN_PADDED:
        rows = [reference(name, alone)[2] for alone in range(len(LENGTHS))]
        return ids, mask, torch.cat(rows)
    if row is not None:
        length = LENGTHS[row]
        ids, mask = ids[row : row + 1, -length:], mask[row : row + 1, -length:]
    out = built(name).generate(ids, attention_mask=mask, **options())
    return ids, mask, out[:, ids.shape[1] :]


def options(new: int = NEW) -> dict[str, Any]:
    return {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}


def decode(
    name: str, row: int | None = None, new: int = NEW, **named: Any
) -> tuple[Tensor, Speculator]:
    """What the speculator writes with a drafter that is sometimes right, [B, new]."""
    ids, mask, expected = reference(name, row)
    model = built(name)
    speculator = Speculator(model, make("cached", model, expected), tree=TREE, **named)
    out = speculator.generate(ids, attention_mask=mask, **options(new))
    return out[:, ids.shape[1] :], speculator


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_batch_equals_generate(name: str) -> None:
    _, _, expected = reference(name)
    assert min(len(set(row.tolist())) for row in expected) > 5  # a constant text proves little
    out, speculator = decode(name)
    assert (out != expected).sum() == 0
    assert speculator.stats.tau > 1.5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_row_alone_equals_generate(name: str) -> None:
    """The shortest, which grows across the window."""
    out, speculator = decode(name, 3)
    assert (out != reference(name, 3)[2]).sum() == 0
    assert speculator.stats.tau > 1.5


@pytest.mark.proof
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_longest_row_alone_equals_generate(name: str) -> None:
    """It begins beyond the window."""
    out, _ = decode(name, 0)
    assert (out != reference(name, 0)[2]).sum() == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_decoding_equals_generate(name: str) -> None:
    """Without a drafter, and without a mask of ours."""
    ids, mask, expected = reference(name, 3)
    out = Speculator(built(name)).generate(ids, attention_mask=mask, **options(24))
    assert torch.equal(out[:, ids.shape[1] :], expected[:, :24])


def test_rows_of_the_padded_vocabulary_are_never_written() -> None:
    assert (reference("llama padded")[2] < PADDED_FROM).all()
    offered = make("cached", built("llama padded"), reference("llama padded")[2])
    place = torch.arange(NEW).expand(len(LENGTHS), -1)
    assert (offered.script.candidates(place) >= PADDED_FROM).any()  # and they are drafted
    assert (decode("llama padded")[0] < PADDED_FROM).all()


def break_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node sees the nodes of all branches before it."""
    true = masks.tree_mask

    def blind(lengths: Tensor, positions: Tensor, ancestors: Tensor, *rest, **named) -> Tensor:
        return true(lengths, positions, torch.ones_like(ancestors).tril(), *rest, **named)

    monkeypatch.setattr(masks, "tree_mask", blind)


def break_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are numbered by their slots, whatever their depth."""
    true = target.tree_forward

    def counted(model, cache, windows, tokens, lengths, positions, *rest) -> Tensor:
        positions = lengths.unsqueeze(1) + torch.arange(tokens.shape[1])
        return true(model, cache, windows, tokens, lengths, positions, *rest)

    monkeypatch.setattr(target, "tree_forward", counted)
    monkeypatch.setattr("headstart.heads.core.probe.tree_forward", counted)


NO_TREE_ATTENTION = {
    "falcon": "does not heed an explicit attention mask",  # it has no attention interface
    "gpt-oss": "attends with s_aux",
}


@pytest.mark.parametrize("name", NO_TREE_ATTENTION)
def test_where_tree_attention_is_refused_masks_are_not(name: str) -> None:
    message = f"{NO_TREE_ATTENTION[name]}.*use attention='masked'"
    with pytest.raises(UnsupportedTarget, match=message) as caught:
        Target(built(name), attention="tree")
    one_line(caught.value)
    assert not Target(built(name), attention="masked").windows.tree


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in NO_TREE_ATTENTION])
def test_tree_attention_equals_generate(name: str) -> None:
    if name == "gemma2" and built(name).config._attn_implementation == "sdpa":
        pytest.skip("this release of transformers runs gemma2 without its softcap")
    out, speculator = decode(name, attention="tree")
    assert speculator.target.windows.tree
    assert (out != reference(name)[2]).sum() == 0
    assert speculator.stats.tau > 1.5


def test_layers_that_read_the_keys_of_others_are_not_compiled() -> None:
    with pytest.raises(UnsupportedTarget, match=r"2 layers that read .*: leave compile out") as why:
        Target(built("gemma4"), compile="default")
    one_line(why.value)


BREAKS = {"mask": break_mask, "positions": break_positions}
WITHOUT_POSITIONS = {"kimi-linear", "nemotron-h"}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param(name, what, marks=pytest.mark.proof if (number + turn) % 2 else ())
        for number, name in enumerate(ARCHITECTURES)
        for turn, what in enumerate(BREAKS)
    ],
)
def test_what_is_broken_shows(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the text; and before the first token, for Target tries a small tree."""
    if what == "positions" and name in WITHOUT_POSITIONS:
        pytest.skip("its layers read no positions")
    expected = reference(name)[2]
    BREAKS[what](monkeypatch)
    with pytest.raises(UnsupportedTarget, match="does not heed an explicit attention mask"):
        Target(built(name))
    monkeypatch.setattr("headstart.heads.core.probe.check_tree", lambda *args: None)
    assert not torch.equal(decode(name, new=24)[0], expected[:, :24])


@pytest.mark.parametrize("name", ["mistral", "qwen2 window", "gemma2", "phi3", "starcoder2"])
def test_a_dropped_window_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(name)[2]
    true = masks.tree_mask
    monkeypatch.setattr(masks, "tree_mask", lambda *args: true(*args[:5], window=None))
    assert not torch.equal(decode(name)[0], expected)


class Deaf(tf.LlamaForCausalLM):
    """Ignores one of the two things that drive a tree, as models with masks of their own do."""

    ignored = "attention_mask"

    def forward(self, *args, **kwargs):
        if kwargs.get(CACHE) is not None:
            kwargs[self.ignored] = None
        return super().forward(*args, **kwargs)


class Counting(Deaf):
    ignored = "position_ids"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_that_ignores_mask_or_positions_is_refused(dtype: torch.dtype) -> None:
    """Whatever its name says, in any precision; the same model that listens is taken."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(**{**COMMON, "initializer_range": 0.2})
    deaf: list[Any] = [Deaf(config), Counting(config)]
    for model in deaf:
        with pytest.raises(UnsupportedTarget, match="llama does not heed") as caught:
            Target(model.to(dtype))
        assert "model.generate" in one_line(caught.value)
    for name in ("llama", "gemma3", "mixtral", "gpt2"):
        Target(built(name, dtype))


def test_the_trial_costs_two_small_forwards_and_leaves_no_trace() -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draws, tokens = torch.random.get_rng_state(), []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    Target(model)
    hook.remove()
    assert len(tokens) == 3 and sum(tokens) <= 70  # the first finds the shapes of the cache
    assert model.training and all(module.training for module in model.modules())
    assert torch.equal(draws, torch.random.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "init_std": 0.4,
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (
        lambda: tf.MambaForCausalLM(tf.MambaConfig(**SMALL, state_size=4)),
        r"mamba attends nowhere",
    ),
    "mamba2": (
        lambda: tf.Mamba2ForCausalLM(
            tf.Mamba2Config(**SMALL, state_size=8, num_heads=4, head_dim=16, n_groups=1)
        ),
        r"mamba2 attends nowhere",
    ),
    "jamba": (
        lambda: tf.JambaForCausalLM(
            tf.JambaConfig(**ATTENTION, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1)
        ),
        r"jamba keeps a state at layer 0 that cannot be rolled back",
    ),
    "recurrent-gemma": (
        lambda: tf.RecurrentGemmaForCausalLM(
            tf.RecurrentGemmaConfig(
                **ATTENTION,
                lru_width=32,
                attention_window_size=9,
                block_types=["recurrent", "attention"],
            )
        ),
        r"recurrent_gemma caches no",
    ),
    "rwkv": (
        lambda: tf.RwkvForCausalLM(tf.RwkvConfig(**SMALL, attention_hidden_size=32)),
        r"rwkv caches no keys and values",
    ),
    "openai-gpt": (
        lambda: tf.OpenAIGPTLMHeadModel(
            tf.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4)
        ),
        r"openai-gpt caches no keys and values",
    ),
    "bloom": (
        lambda: tf.BloomForCausalLM(
            tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
        ),
        r"bloom cannot run a token tree",
    ),
    "falcon alibi": (
        lambda: tf.FalconForCausalLM(
            tf.FalconConfig(**SMALL, num_attention_heads=4, alibi=True, initializer_range=0.4)
        ),
        r"falcon cannot run a token tree",
    ),
    "mpt": (
        lambda: tf.MptForCausalLM(
            tf.MptConfig(vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, initializer_range=0.4)
        ),
        r"mpt does not heed",
    ),
    "gpt-neo": (
        lambda: tf.GPTNeoForCausalLM(
            tf.GPTNeoConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                initializer_range=0.4,
            )
        ),
        r"gpt_neo does not heed .* by the length of the cache",
    ),
    "bart": (lambda: tf.BartForCausalLM(tf.BartConfig(**SEQ2SEQ)), r"bart does not heed"),
    "bart with its encoder": (
        lambda: tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ)),
        r"bart is an encoder-decoder",
    ),
    "moshi": (
        lambda: tf.MoshiForCausalLM(
            tf.MoshiConfig(**SMALL, num_attention_heads=4, ffn_dim=48, sliding_window=9)
        ),
        r"moshi does not heed .* window that its config declares",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_driven_is_refused_by_name(name: str) -> None:
    build, reason = REFUSED[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = build().eval()
    with pytest.raises(UnsupportedTarget, match=reason) as caught:
        Target(model)
    assert "model.generate" in one_line(caught.value)


@pytest.mark.parametrize("kind", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_attention_without_a_mask_is_refused(kind: str) -> None:
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**ATTENTION))
    model.config._attn_implementation = kind
    with pytest.raises(UnsupportedTarget) as caught:
        Target(model)
    message = one_line(caught.value)
    assert "qwen2" in message and kind in message and "set_attn_implementation('sdpa')" in message


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_moving_rotary_scaling_ends_at_its_trained_length(kind: str) -> None:
    """Up to it the frequencies stand still and the text is that of `generate`; then it is said."""
    trained = 40
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        scaling["original_max_position_embeddings"] = trained
    longest = 256 if kind == "longrope" else trained
    config = tf.LlamaConfig(
        **{**COMMON, "max_position_embeddings": longest}, rope_parameters=scaling
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = tf.LlamaForCausalLM(config).double().eval()
    ids, mask = prompts(LENGTHS)
    new = trained - max(LENGTHS) + 1  # the last token written is not read
    expected = model.generate(ids, attention_mask=mask, **options(new + 8))[:, ids.shape[1] :]
    speculator = Speculator(model, make("cached", model, expected), tree=TREE)
    out = speculator.generate(ids, attention_mask=mask, **options(new))[:, ids.shape[1] :]
    assert torch.equal(out, expected[:, :new])
    with pytest.raises(DecodingError, match=f"used all {trained} positions") as caught:
        speculator.generate(ids, attention_mask=mask, **options(new + 8))
    one_line(caught.value)


@pytest.mark.parametrize(("chunk", "scale", "last"), [(40, 8192, 40), (60, 38, 37)])
def test_texts_of_layers_with_chunks_end_with_the_first(chunk: int, scale: int, last: int) -> None:
    """Or where queries of layers without positions begin to be scaled by their place."""
    sizes: dict[str, Any] = {"attention_chunk_size": chunk, "floor_scale": scale}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = config_of(tf.Llama4TextConfig, num_local_experts=2, no_rope_layers=[1, 0], **sizes)
        model: Any = tf.Llama4ForCausalLM(config).double().eval()
    ids, mask = prompts(LENGTHS)
    new = last - max(LENGTHS) + 1  # the last token written is not read
    expected = model.generate(ids, attention_mask=mask, **options(new))[:, ids.shape[1] :]
    speculator = Speculator(model, make("cached", model, expected), tree=TREE)
    out = speculator.generate(ids, attention_mask=mask, **options(new))[:, ids.shape[1] :]
    assert torch.equal(out, expected)
    with pytest.raises(DecodingError, match=f"used all {last} positions"):
        speculator.generate(ids, attention_mask=mask, **options(new + 8))


def test_rotary_positions_go_on_past_the_trained_length() -> None:
    """As in `generate`, which warns: nothing is clamped there."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = tf.LlamaConfig(**{**COMMON, "max_position_embeddings": 24})
        model: Any = tf.LlamaForCausalLM(config).double().eval()
    ids, mask = prompts(LENGTHS)
    expected = model.generate(ids, attention_mask=mask, **options())[:, ids.shape[1] :]
    speculator = Speculator(model, make("cached", model, expected), tree=TREE)
    out = speculator.generate(ids, attention_mask=mask, **options())[:, ids.shape[1] :]
    assert torch.equal(out, expected)


PROOF_ROWS, PROOF_NEW = 48, 128


@dataclass
class Divergence:
    """The first token of a row that differs from `generate`'s."""

    family: str
    place: int
    margin: float  # between the two best logits of `generate`
    difference: float  # between its logits and the tree's

    @property
    def near_tie(self) -> bool:
        return self.margin <= 2 * self.difference


def record(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], Tensor]:
    """Collects the logits [V] that each token came from, keyed by row and place in the text."""
    seen: dict[tuple[int, int], Tensor] = {}
    latest: dict[str, Tensor] = {}
    prefill, verify, commit = Target.prefill, Target.verify, Target.commit

    def prefilled(self, tokens, counts, capacity):
        out = prefill(self, tokens, counts, capacity)
        seen.update({(row, count): out[0][row] for row, count in enumerate(counts)})
        return out

    def verified(self, tree, lengths, *rest):
        out = verify(self, tree, lengths, *rest)
        latest.update(logits=out[0], lengths=lengths)
        return out

    def committed(self, path):
        for row, nodes in enumerate(path.tolist()):
            for step, node in enumerate(nodes):  # a later round overwrites what was not accepted
                place = int(latest["lengths"][row]) + step + 1
                seen[row, place] = latest["logits"][row, node]
        commit(self, path)

    for name, wrapper in (("prefill", prefilled), ("verify", verified), ("commit", committed)):
        monkeypatch.setattr(Target, name, wrapper)
    return seen


def divergences(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Divergence]:
    """Where the speculator leaves the text of `generate`, in float32."""
    model = built(name, torch.float32)
    lengths = [3 + 5 * row % 29 for row in range(PROOF_ROWS)]
    ids, mask = prompts(lengths, seed=7)
    width, chosen = ids.shape[1], options(PROOF_NEW)
    plain = model.generate(
        ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **chosen
    )
    expected = plain.sequences[:, width:]
    with monkeypatch.context() as patch:
        seen = record(patch)
        speculator = Speculator(model, make("heads", model, expected), tree=TREE)
        out = speculator.generate(ids, attention_mask=mask, **chosen)[:, width:]
    assert out.shape == expected.shape == (PROOF_ROWS, PROOF_NEW)
    found = []
    for row, length in enumerate(lengths):
        differing = (out[row] != expected[row]).nonzero()
        if len(differing):
            place = int(differing[0])
            logits, tree = plain.logits[place][row].float(), seen[row, length + place].float()
            assert expected[row, place] == logits.argmax() and out[row, place] == tree.argmax()
            best = logits.topk(2).values
            difference = float((logits - tree).abs().max())
            found.append(Divergence(name, place, float(best[0] - best[1]), difference))
    return found


@pytest.mark.proof
def test_float32_differs_only_in_near_ties(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most two first differences per 100,000 tokens, all where the best two all but tie."""
    found = [one for name in ARCHITECTURES for one in divergences(name, monkeypatch)]
    tokens = len(ARCHITECTURES) * PROOF_ROWS * PROOF_NEW
    with capsys.disabled():
        print(f"\nfloat32: {len(found)} of {tokens} tokens differ; {found}")
    assert all(one.near_tie for one in found)
    assert len(found) <= 2 * tokens / 100_000


@pytest.mark.proof
def test_float32_shows_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measure with blind nodes: far too many differences."""
    break_mask(monkeypatch)
    monkeypatch.setattr("headstart.heads.core.probe.check_tree", lambda *args: None)
    assert len(divergences("llama", monkeypatch)) > PROOF_ROWS / 2
