"""The public face: what `generate` hands over is obeyed; what cannot be is refused in a line."""

import copy
import gc
import pickle
import threading
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, TextStreamer
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import headstart
from headstart.heads import (
    ArtifactError,
    Drafter,
    HeadstartError,
    Manifest,
    OptionError,
    UnsupportedTarget,
    fingerprint,
    save_drafter,
)
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Speculator, StaticTree, load
from tests.support.bytewise import save_target
from tests.support.covering import covering
from tests.support.scripted import make
from tests.support.tiny import CONFIGS, VOCAB, one_line, prompts, tiny

NEW = 12


def greedy(ids: Tensor, mask: Tensor | None = None, new: int = NEW) -> Tensor:
    return tiny("llama").generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
    )


def speculator(ids: Tensor, mask: Tensor | None = None, **options: Any) -> Speculator:
    """Over a scripted drafter for these prompts."""
    script = greedy(ids, mask, NEW + 8)[:, ids.shape[1] :]
    options = {"tree": "cartesian:3,2,1", **options}
    return Speculator(tiny("llama"), make("cached", tiny("llama"), script), **options)


def medusa(heads: int = 4) -> Medusa:
    drafter = Medusa(MedusaConfig.for_target(tiny("llama"), heads=heads)).double()
    drafter.bind(tiny("llama"))
    return drafter.eval()


def test_both_ways_of_calling_are_one() -> None:
    ids, mask = prompts([8, 5])
    ours = speculator(ids, mask)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = greedy(ids, mask)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **options), expected)
    model: Any = tiny("llama")
    through = model.generate(ids, attention_mask=mask, custom_generate=ours, **options)
    assert torch.equal(through, expected)
    assert ours.model is model and ours.stats.tau > 1


def test_unpadded_prompts_need_no_mask() -> None:
    ids, _ = prompts([8, 8])
    out = speculator(ids).generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert torch.equal(out, greedy(ids))


def test_return_dict() -> None:
    ids, _ = prompts([6])
    out = speculator(ids).generate(
        ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, greedy(ids))


def test_a_generation_config() -> None:
    ids, _ = prompts([6])
    eos = int(greedy(ids)[0, 6 + 7])
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0)
    ours = speculator(ids)
    out = ours.generate(ids, generation_config=config)
    expected = tiny("llama").generate(ids, generation_config=config)
    assert torch.equal(out, expected) and out.shape[1] < 6 + NEW
    shorter = ours.generate(ids, generation_config=config, max_new_tokens=3)
    assert torch.equal(shorter, expected[:, :9])
    by_length = ours.generate(ids, max_length=10, do_sample=False)
    assert torch.equal(by_length, greedy(ids)[:, :10])


def test_the_models_own_generation_config() -> None:
    ids, _ = prompts([6])
    model = tiny("llama")
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig(
            max_new_tokens=NEW, repetition_penalty=1.5, do_sample=False, pad_token_id=0
        )
        expected = model.generate(ids)
        assert torch.equal(speculator(ids).generate(ids), expected)
    finally:
        model.generation_config = before
    assert not torch.equal(expected, greedy(ids))


class Calls(StoppingCriteria):
    """Calls a function once, when so many tokens are written."""

    def __init__(self, function: Any, at: int = 9):
        self.function, self.at = function, at

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] >= self.at and self.function is not None:
            function, self.function = self.function, None
            function()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("how", ["criterion", "processor", "streamer", "generate", "no token"])
def test_a_call_from_within_a_request_is_refused(how: str, graphs: bool) -> None:
    """The text that is being written stays as it is."""
    ids, _ = prompts([6])
    ours = Speculator(tiny("llama"), medusa(), tree="cartesian:2,2", graphs=graphs)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found: list[str] = []

    def inner(*values: Any) -> None:
        short: dict[str, Any] = options | {"max_new_tokens": 0 if how == "no token" else 2}
        with pytest.raises(OptionError, match="within its own request") as caught:
            if how == "generate":
                tiny("llama").generate(ids[:, :3], custom_generate=ours, **short)
            else:
                ours.generate(ids[:, :3], **short)
        found.append(one_line(caught.value))

    class Puts(Collects):
        def put(self, value: Tensor) -> None:
            inner()

    class Asks(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            inner()
            return scores

    more: dict[str, Any] = {"stopping_criteria": [Calls(inner)]}
    if how == "processor":
        more = {"logits_processor": [Asks()]}
    elif how == "streamer":
        more = {"streamer": Puts()}
    assert torch.equal(ours.generate(ids, **options, **more), greedy(ids)) and found
    assert ours.stats.tokens == NEW - 1
    assert torch.equal(ours.generate(ids, **options), greedy(ids))  # and it is free again

    def fails() -> None:
        raise RuntimeError("a user's fault")

    with pytest.raises(RuntimeError, match="user's fault"):
        ours.generate(ids, **options, stopping_criteria=[Calls(fails)])
    assert torch.equal(ours.generate(ids, **options), greedy(ids))


def test_another_speculator_may_be_called_from_within() -> None:
    ids, _ = prompts([6])
    ours, other = speculator(ids), Speculator(tiny("llama"), medusa())
    texts: list[Tensor] = []

    def inner() -> None:
        texts.append(other.generate(ids, max_new_tokens=NEW, do_sample=False))

    criteria = [Calls(inner)]
    out = ours.generate(ids, max_new_tokens=NEW, do_sample=False, stopping_criteria=criteria)
    assert torch.equal(out, greedy(ids)) and torch.equal(texts[0], greedy(ids))


@pytest.mark.parametrize("graphs", [False, True])
def test_threads_wait_for_each_other(graphs: bool) -> None:
    """A second thread calls in the middle of the first one's request."""
    ids, _ = prompts([6])
    others, _ = prompts([5], seed=3)
    ours = Speculator(tiny("llama"), medusa(), tree="cartesian:2,2", graphs=graphs)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    texts: list[Tensor] = []
    second = threading.Thread(target=lambda: texts.append(ours.generate(others, **options)))

    def starts() -> None:
        second.start()
        second.join(0.3)
        assert second.is_alive() and not texts

    out = ours.generate(ids, **options, stopping_criteria=[Calls(starts)])
    second.join(60)
    assert torch.equal(out, greedy(ids)) and torch.equal(texts[0], greedy(others))


TREES = ("cartesian:2,2", "chain:3", "best-first:6,2,3", "plain")


@pytest.mark.parametrize(
    ("sampling", "tree", "graphs", "rows"),
    covering([*product((False, True), TREES, (False, True), (1, 2))]),
)
def test_inference_mode_around_a_call(sampling: bool, tree: str, graphs: bool, rows: int) -> None:
    """Inside, outside and inside again, made inside and outside."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": sampling, "pad_token_id": 0}
    options |= {"seed": 3, "repetition_penalty": 1.3} if sampling else {}
    expected = None
    for made in (True, False):
        with torch.inference_mode(made):
            drafter = None if tree == "plain" else medusa()
            ours = Speculator(tiny("llama"), drafter, tree=tree, graphs=graphs)
        for inside in (True, False, True, False):
            with torch.inference_mode(inside):
                ids, mask = prompts([6, 4][:rows])
                out = ours.generate(ids, attention_mask=mask, **options)
                through: Any = tiny("llama").generate
                again = through(ids, attention_mask=mask, custom_generate=ours, **options)
            expected = out if expected is None else expected
            assert torch.equal(out, expected) and torch.equal(again, expected)
            assert not out.requires_grad and not out.is_inference()


def test_layers_are_fused_inside_inference_mode() -> None:
    ids, _ = prompts([6])
    with torch.inference_mode():
        ours = Speculator(tiny("llama"), fused=True, attention="tree")
        assert torch.equal(ours.generate(ids, max_new_tokens=NEW, do_sample=False), greedy(ids))
    assert ours.target.fused is not None


class Collects(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert isinstance(value, Tensor) and value.device.type == "cpu"
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("stop", [False, True])
def test_a_streamer_sees_prompt_and_tokens_once(stop: bool) -> None:
    ids, _ = prompts([6])
    eos = int(greedy(ids)[0, 6 + 7]) if stop else None
    ours, streamer = speculator(ids), Collects()
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    out = ours.generate(ids, eos_token_id=eos, streamer=streamer, **options)
    assert streamer.pieces[0] == ids[0].tolist() and streamer.ended == 1
    assert [token for piece in streamer.pieces[1:] for token in piece] == out[0, 6:].tolist()
    # One piece from the prefill and one from each round.
    assert len(streamer.pieces) == 2 + ours.stats.rounds and all(streamer.pieces)


def test_the_text_streamer_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    class Numbers:
        def decode(self, tokens: list[int], **options: Any) -> str:
            return "".join(f"{token} " for token in tokens)

    ids, _ = prompts([6])
    streamer = TextStreamer(Numbers(), skip_prompt=True)  # type: ignore[arg-type]
    out = speculator(ids).generate(ids, max_new_tokens=NEW, do_sample=False, streamer=streamer)
    assert [int(word) for word in capsys.readouterr().out.split()] == out[0, 6:].tolist()


def test_several_samples_a_prompt() -> None:
    ids, mask = prompts([7, 4])
    ours = Speculator(tiny("llama"), medusa(), tree="cartesian:2,2")
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": NEW, "pad_token_id": 0}
    out = ours.generate(ids, attention_mask=mask, num_return_sequences=3, seed=5, **options)
    assert out.shape == (6, 7 + NEW)
    assert len({tuple(row) for row in out[:3].tolist()}) == 3
    again = Speculator(tiny("llama")).generate(
        ids.repeat_interleave(3, 0), attention_mask=mask.repeat_interleave(3, 0), seed=5, **options
    )
    assert torch.equal(out, again)


def test_the_defaults() -> None:
    ours = Speculator(tiny("llama"), medusa(3))
    assert str(ours.tree) == "chain:3"
    assert str(Speculator(tiny("llama")).tree) == "plain"
    tree = StaticTree.cartesian([2, 1])
    assert Speculator(tiny("llama"), medusa(3), tree=tree).tree is tree


@pytest.mark.parametrize(
    ("tree", "children"),
    [
        ("cartesian:2,2", "without_replacement"),
        ("[[0],[1],[1,1]]", "topk"),
        ("best-first:6,3,3", "topk"),
    ],
)
def test_children_are_drawn_by_default_where_the_tree_allows_it(tree: str, children: str) -> None:
    ids, _ = prompts([9])
    for rule in ("rejection", "traversal"):
        ours = Speculator(tiny("llama"), medusa(), tree=tree, rule=rule)
        assert ours.expansion == children
        ours.generate(ids, max_new_tokens=6, do_sample=True, seed=0)
    if children == "topk":
        with pytest.raises(OptionError, match="biases children drawn without_replacement"):
            Speculator(
                tiny("llama"), medusa(), tree=tree, rule=rule, expansion="without_replacement"
            )


def test_greedy_ignores_the_noise_of_a_sampling_rule() -> None:
    ids, _ = prompts([6])
    for rule in ("match", "coupled", "greedy"):
        out = speculator(ids, rule=rule).generate(ids, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out, greedy(ids))


def call(**options: Any) -> Any:
    """One call that would work but for the options."""
    ids, _ = prompts([6])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
    ours = Speculator(tiny("llama"), medusa(), tree="chain:2", rule=options.pop("rule", None))
    return ours.generate(options.pop("ids", ids), **options)


REFUSED: dict[str, tuple[dict, str]] = {
    "beams": ({"num_beams": 2}, "num_beams"),
    "hidden": ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden_states"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "attentions"),
    "greedy sampling": ({"rule": "greedy", "do_sample": True}, "rule 'greedy' with do_sample"),
    "padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}, "padded on the right"),
    "mask of 2": ({"attention_mask": torch.full((1, 6), 2)}, "other numbers than 0 and 1"),
    "mask below 0": ({"attention_mask": torch.full((1, 6), -1)}, "other numbers than 0 and 1"),
    "mask between": ({"attention_mask": torch.full((1, 6), 0.5)}, "other numbers than 0 and 1"),
    "mask too short": (
        {"attention_mask": torch.ones(1, 5).long()},
        "attention_mask is of shape [1, 5]",
    ),
    "mask of 2 rows": (
        {"attention_mask": torch.ones(2, 6).long()},
        "expected a tensor of the shape of input_ids, [1, 6]",
    ),
    "mask of 1 axis": ({"attention_mask": torch.ones(6).long()}, "attention_mask is of shape [6]"),
    "mask in a list": ({"attention_mask": [[1] * 6]}, "attention_mask is list"),
    "prompts twice": ({"inputs": torch.ones(1, 6).long()}, "input_ids and inputs are both given"),
    "empty": ({"ids": torch.zeros(1, 0, dtype=torch.long)}, "empty"),
    "seeds": ({"do_sample": True, "seed": [1, 2]}, "2 seeds for 1 row;"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_one_line(what: str) -> None:
    options, named = REFUSED[what]
    with pytest.raises(OptionError) as caught:
        call(**options)
    assert named in one_line(caught.value)
    call()  # and nothing stays broken


def test_what_is_no_model_or_no_drafter() -> None:
    with pytest.raises(OptionError, match=r"target is of type str; .* takes names"):
        Speculator("ORG/MODEL")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="found a LlamaForCausalLM among the drafters") as caught:
        Speculator(tiny("gpt2"), tiny("llama"))  # type: ignore[arg-type]
    one_line(caught.value)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("through", [False, True])
def test_seeds_of_any_integer_type(rows: int, through: bool) -> None:
    ids, _ = prompts([6] * rows)
    ours = Speculator(tiny("llama"), medusa(), tree="chain:2")

    def write(seed: Any) -> list:
        options = {"max_new_tokens": 4, "do_sample": True, "pad_token_id": 0, "seed": seed}
        if through:
            return tiny("llama").generate(ids, custom_generate=ours, **options).tolist()
        return ours.generate(ids, **options).tolist()

    assert write(7) != write(8)
    for one in (np.int64(7), np.uint8(7), np.array(7), torch.tensor(7), torch.tensor(7).int()):
        assert write(one) == write(7)
    each = [7, 2**62 + 1][:rows]
    assert write(each) != write([9, 10][:rows])
    for several in (tuple(each), np.array(each), torch.tensor(each), [np.int64(s) for s in each]):
        assert write(several) == write(each)


@pytest.mark.parametrize(
    "seed",
    [
        *(3.0, "a", "", [3.5], [2**63], [None], {3}, [[3]], torch.Generator()),
        *(np.float32(3), torch.tensor(3.0), torch.rand(1), torch.tensor([[3]]), torch.tensor([])),
    ],
    ids=lambda seed: type(seed).__name__,
)
def test_seeds_that_are_none(seed: Any) -> None:
    with pytest.raises(OptionError, match="seed") as caught:
        call(do_sample=True, seed=seed)
    one_line(caught.value)


@pytest.mark.parametrize("streamer", [object(), TextStreamer, print])
def test_streamers_that_are_none(streamer: Any) -> None:
    with pytest.raises(OptionError, match=r"streamer is .*; expected an object with put") as caught:
        call(streamer=streamer)
    one_line(caught.value)


def test_no_new_token_is_an_error_as_in_generate() -> None:
    ids, _ = prompts([6])
    with pytest.raises(ValueError):
        tiny("llama").generate(ids, max_new_tokens=0)
    with pytest.raises(ValueError):
        tiny("llama").generate(ids, max_new_tokens=0, custom_generate=Speculator(tiny("llama")))
    assert torch.equal(call(max_new_tokens=0), ids)


def test_another_model_is_refused() -> None:
    ids, _ = prompts([6])
    other: Any = tiny("llama", seed=2)
    with pytest.raises(OptionError, match="another model") as caught:
        other.generate(ids, max_new_tokens=2, custom_generate=Speculator(tiny("llama")))
    one_line(caught.value)


def test_training_mode_is_refused() -> None:
    model = tf.LlamaForCausalLM(CONFIGS["llama"]()).train()
    ids, _ = prompts([6])
    with pytest.raises(OptionError, match=r"training mode.*model\.eval\(\)") as caught:
        Speculator(model).generate(ids, max_new_tokens=2, do_sample=False)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tree": "chain:5"}, "5 deep"),
        ({"tree": "bush"}, "bush"),
        ({"rule": "typicall"}, "typicall"),
        ({"rule": ""}, "rule is ''"),
        ({"rule": []}, "rule is []; expected one of: greedy"),
    ],
)
def test_a_speculator_that_cannot_be_made(options: dict, named: str) -> None:
    with pytest.raises(OptionError) as caught:
        Speculator(tiny("llama"), medusa(), **options)
    assert named in one_line(caught.value)


def test_a_drafter_of_another_shape_is_refused() -> None:
    drafter = Medusa(MedusaConfig(hidden_size=16, vocab_size=VOCAB))
    with pytest.raises(HeadstartError) as caught:
        Speculator(tiny("llama"), drafter)
    assert "hidden size 16" in one_line(caught.value)


def test_an_unbound_drafter_is_bound() -> None:
    drafter = Medusa(MedusaConfig.for_target(tiny("llama"))).double().eval()
    ids, _ = prompts([6])
    ours = Speculator(tiny("llama"), drafter)
    assert drafter.target is tiny("llama")
    assert torch.equal(ours.generate(ids, max_new_tokens=NEW, do_sample=False), greedy(ids))


def test_a_state_space_target_is_refused() -> None:
    config = tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(UnsupportedTarget, match="mamba") as caught:
        Speculator(tf.MambaForCausalLM(config).eval())
    one_line(caught.value)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    manifest = Manifest("medusa", "tiny", fingerprint(tiny("llama")))
    return save_drafter(medusa(), tmp_path / "head", manifest)


def test_load(artifact: Path) -> None:
    ids, _ = prompts([6])
    ours = load(tiny("llama"), artifact, tree="cartesian:2,2")
    out = ours.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert torch.equal(out, greedy(ids)) and isinstance(ours.drafter, Medusa)
    assert load(tiny("llama")).drafter is None
    assert headstart.load is load and headstart.Speculator is Speculator


def test_load_from_folders(artifact: Path, tmp_path: Path) -> None:
    """The target from disk too, in float32 as it was not saved; the drafter takes its type."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path / "target"
    tiny("llama").save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    ours = load(str(folder), str(artifact), dtype=torch.float32)
    assert ours.model.dtype == torch.float32 and not ours.model.training
    assert isinstance(ours.drafter, Drafter) and ours.drafter.dtype == torch.float32
    assert ours.tokenizer is not None and len(ours.tokenizer) == VOCAB
    ids, _ = prompts([6])
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **options), ours.model.generate(ids, **options))  # type: ignore[operator]


@pytest.mark.parametrize(
    "options", [{"dtype": "float64"}, {"revision": "v1", "in_plce": True}, {"device": "cpu"}]
)
def test_load_refuses_what_a_loaded_target_would_leave_unread(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"^{' and '.join(options)} given beside") as caught:
        load(tiny("llama"), "lookup", **options)
    one_line(caught.value)


def test_load_takes_a_device_and_refuses_what_there_is_not(tmp_path: Path) -> None:
    save_target(tmp_path)
    ours = load(tmp_path, device="cpu", dtype="float32")
    assert ours.device == torch.device("cpu")
    assert repr(ours.target) == "Target(LlamaForCausalLM, float32, cpu, forwards by torch)"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"device": "gpu"}, "device is 'gpu'; expected cpu, cuda"),
        ({"device": "cuda:99"}, "device is 'cuda:99', and torch .* finds .* GPUs here"),
        ({"device": "cpu", "device_map": "auto"}, "leave one out"),
        ({"tre": "chain:3"}, "tre is no option that loading .* takes; check the spelling"),
    ]
    for options, said in wrong:
        with pytest.raises(OptionError, match=said) as caught:
            load(tmp_path, **options)
        one_line(caught.value)


def test_load_fuses() -> None:
    ours = load(tiny("llama"), "lookup", fused=True)
    assert ours.target.fused is not None and load(tiny("llama"), "lookup").target.fused is None


def test_load_refuses_another_target(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match="another target") as caught:
        load(tiny("llama", seed=2), artifact)
    one_line(caught.value)


def test_float16_that_rounds_otherwise_is_named(artifact: Path) -> None:
    target = copy.deepcopy(tiny("llama")).half()
    with torch.no_grad():
        target.get_input_embeddings().weight.mul_(1.001)
    with pytest.raises(ArtifactError, match=r"float16 rounds .* load it as bfloat16") as caught:
        load(target, artifact)
    one_line(caught.value)


def test_load_finds_the_drafters_own_target(tmp_path: Path) -> None:
    folder, ids = tmp_path / "target", prompts([6])[0]
    save_target(folder)
    target = tf.AutoModelForCausalLM.from_pretrained(folder)
    drafter = Medusa(MedusaConfig.for_target(target, heads=2))
    save_drafter(drafter, tmp_path / "head", Manifest("medusa", str(folder), fingerprint(target)))
    ours = load(drafter=tmp_path / "head")
    assert isinstance(ours.drafter, Medusa) and ours.tokenizer is not None
    assert ours.generate(ids, max_new_tokens=4).shape == (1, 10)
    with pytest.raises(OptionError, match="name the target"):
        load(drafter=tmp_path / "head", trust_remote_code=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None, None), "no target is given"),
        ((None, "lookup"), "no target is given"),
        ((tiny("llama"), tiny("llama")), "drafter is of type LlamaForCausalLM; expected"),
        ((tiny("llama"), ["lookup", 3]), "drafter is of type int; expected"),
    ],
)
def test_load_refuses_what_it_cannot_use(arguments: tuple[Any, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        load(*arguments)
    one_line(caught.value)


@pytest.mark.parametrize("name", ["fp16", "half precision", "int8", "nn"])
def test_load_refuses_a_type_that_there_is_not(name: str) -> None:
    with pytest.raises(OptionError, match=f"dtype is '{name}'; expected 'auto'"):
        load("somewhere", dtype=name)


@pytest.mark.parametrize(
    "ids", ["a text", [[1, 2]], {"input_ids": 1}, torch.ones(3), torch.ones(1, 3)]
)
def test_prompts_that_are_no_token_ids_are_refused(ids: Any) -> None:
    with pytest.raises(OptionError, match="expected token ids") as caught:
        Speculator(tiny("llama")).generate(ids)
    one_line(caught.value)


def test_prompts_of_32_bits_are_those_of_64() -> None:
    ids, _ = prompts([6])
    ours = load(tiny("llama"), "lookup")
    out = ours.generate(ids.int(), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert torch.equal(out, greedy(ids))


def test_a_mask_of_another_shape_is_refused_through_generate_of_transformers() -> None:
    ids, _ = prompts([6])
    with pytest.raises(OptionError, match=r"attention_mask is of shape \[1, 5\]"):
        tiny("llama").generate(
            ids,
            attention_mask=torch.ones(1, 5).long(),
            custom_generate=Speculator(tiny("llama")),
            max_new_tokens=NEW,
        )


def test_a_generation_config_is_the_second_argument_as_in_transformers() -> None:
    ids, _ = prompts([6])
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert torch.equal(speculator(ids).generate(ids, config), greedy(ids))


def test_stats_are_of_the_last_call() -> None:
    ids, _ = prompts([6])
    ours = speculator(ids)
    for new in (9, 4):
        ours.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
        assert ours.stats.tokens == new - 1
        assert np.isfinite(ours.stats.acceptance_by_depth[0])
    assert repr(ours.stats).startswith(f"Stats(tau={ours.stats.tau:.2f}, tokens=3, rounds=")
    assert repr(ours).startswith("Speculator(LlamaForCausalLM, ")
    assert "tree='cartesian:3,2,1'" in repr(ours)
    assert repr(ours.tree) == "StaticTree('cartesian:3,2,1', nodes=16)"


def test_no_gradient_and_no_change_to_the_target() -> None:
    ids, _ = prompts([6])
    before = {name: value.clone() for name, value in tiny("llama").state_dict().items()}
    out = speculator(ids).generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert not out.requires_grad
    assert all(torch.equal(before[k], v) for k, v in tiny("llama").state_dict().items())


def test_a_dropped_speculator_leaves_no_hook_on_the_target() -> None:
    ids, _ = prompts([6])
    model = tiny("llama")
    kinds = ("_forward_hooks", "_forward_pre_hooks")

    def hooks() -> int:
        return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)

    assert hooks() == 0
    ours = speculator(ids)
    ours.generate(ids, max_new_tokens=4, do_sample=False)
    assert hooks() == 2  # one for each feature layer of the drafter
    del ours
    gc.collect()
    assert hooks() == 0


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy])
def test_it_says_that_it_cannot_be_sent_to_another_process(take: Any) -> None:
    with pytest.raises(TypeError, match=r"load it in each process with headstart\.load") as caught:
        take(speculator(prompts([6])[0]))
    one_line(caught.value)
