"""Decoding on packed weights writes the same text, and changes nothing of what was passed in."""

import copy
import gc
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters

import headstart
from headstart.heads import DrafterGroup
from headstart.heads.artifacts.manifest import fingerprint
from headstart.heads.core import (
    CpuLinear,
    OnlyPacked,
    PackedLinear,
    Packing,
    packing,
    said_of_busy_cores,
    use_physical_cores,
)
from headstart.heads.core.cpu_compile import kernels
from headstart.infer import Speculator
from headstart.infer.measure.lossless_greedy import compare_greedy
from headstart.infer.target import way_to_run
from tests.support.families import TREES, UNIONS, drafter
from tests.support.tiny import COMMON, letters, prompts, tiny

IDS, _ = prompts([7, 7, 7])
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
FAMILIES = [
    "medusa", "medusa2", "redrafter", "hydra", "eagle", "eagle3", "dflash", "mtp", "draft_model",
    "pard", "mlp_speculator", "lookup", "recycling",
    *UNIONS,
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_layers_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By oneDNN; the kernels have tests of their own, and take no layer that is so small."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 0))
    monkeypatch.setattr(packing, "_LEAST_OF_KERNELS", {**packing._LEAST_OF_KERNELS})


def own(name: str | None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A target and drafters that no other test shares."""
    model = copy.deepcopy(tiny("llama")).to(dtype)
    if name is None:
        return model, None
    given: Any = DrafterGroup.of(drafter(name, "tiny")).drafters
    found = [copy.deepcopy(each).to(dtype) for each in given]
    group = DrafterGroup(found)
    group.bind(model)
    return model, group


def packs(dtype: torch.dtype) -> bool:
    """Whether layers too small for the kernels are packed; in float32 on all processors."""
    assert packing.onednn_packs(torch.float32)
    return packing.onednn_packs(dtype)


def packed_in(module: Any) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, PackedLinear | CpuLinear)]


def state(module: Any) -> list[Any]:
    """What a packed copy could change of a module."""
    parts = [(name, type(part), vars(part).keys()) for name, part in module.named_modules()]
    hooks = [len(part._forward_hooks) for part in module.modules()]
    weights = [(name, w.data_ptr(), w._version) for name, w in module.named_parameters()]
    return [parts, hooks, weights]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_that_of_generate(name: str) -> None:
    model, group = own(name)
    before = [state(each) for each in (model, *group.drafters)]
    tree = "+".join([TREES[0]] * len(group.drafters)) if name in UNIONS else TREES[1]
    ours = Speculator(model, group, tree=tree, compile=True)
    assert torch.equal(ours.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
    eager = Speculator(model, group, tree=tree)
    for options in (GREEDY, {**GREEDY, "do_sample": True, "seed": 3}):
        text = ours.generate(IDS, **options)
        assert torch.equal(text, eager.generate(IDS, **options))
        assert ours.stats.counts.tolist() == eager.stats.counts.tolist()
    del eager
    if "draft" in name or "eagle" in name:
        assert any(packed_in(each) for each in ours.decoding_drafters.drafters)
    after = [state(each) for each in (model, *group.drafters)]
    assert before == after
    assert not any(map(packed_in, (model, *group.drafters)))


def test_every_linear_layer_of_the_target_runs_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of them as it was: the text does not come from the model's own layers."""
    model, _ = own(None)
    ours, expected = Speculator(model, compile=True), model.generate(IDS, **GREEDY)
    called = list[torch.nn.Module]()

    def refuse(self: Any, input: Tensor) -> Tensor:
        called.append(self)
        raise AssertionError("a layer that is not packed")

    monkeypatch.setattr(torch.nn.Linear, "forward", refuse)
    assert torch.equal(ours.generate(IDS, **GREEDY), expected) and not called
    with pytest.raises(AssertionError, match="not packed"):
        Speculator(model, compile=False)


def test_a_trained_weight_and_a_moved_model_are_packed_anew() -> None:
    model, group = own("eagle3")
    ours = Speculator(model, group, tree="chain:2", compile=True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for each in (model, *group.drafters):
            each.to(dtype)
        text, eager = (
            each.generate(IDS, **GREEDY)
            for each in (ours, Speculator(model, group, tree="chain:2"))
        )
        assert torch.equal(text, eager)
        copies = packed_in(ours.target.runner)
        assert bool(copies) == packing.packable(model.lm_head) == packs(dtype)
        assert all(each.weight.dtype == dtype for each in copies)


@pytest.mark.parametrize("name", ["medusa", "draft_model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_differs_from_generate_is_a_near_tie(name: str, dtype: torch.dtype) -> None:
    """As `headstart verify-lossless --compile` judges it; a wrong layer is none."""
    if not packs(dtype):
        pytest.skip(f"this processor packs no {dtype}")
    model, group = own(name, dtype)
    ours = Speculator(model, group, tree=TREES[1], compile=True)
    rows = [row.unsqueeze(0) for row in prompts([9] * 3, seed=5)[0]]
    assert compare_greedy(ours, rows, 24).holds
    head, wrong = packed_in(ours.target.runner)[-1], model.lm_head.weight.detach().flip(0)
    if isinstance(head, CpuLinear):
        head.weight = torch.nn.Parameter(wrong, requires_grad=False)
    else:
        head._packed = packing._pack(wrong)
    assert not compare_greedy(ours, rows, 24).holds


def test_nothing_is_packed_or_compiled_in_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model, group = own("draft_model")
    ours = Speculator(model, group, tree=TREES[1], compile=True)
    monkeypatch.setattr(packing, "_pack", lambda weight: pytest.fail("it packs"))
    counters.clear()
    for length in (3, 40):
        ours.generate(prompts([length])[0], **{**GREEDY, "max_new_tokens": 70})
    assert not counters["stats"]


def test_float64_is_run_as_it_is() -> None:
    model, group = own("medusa", torch.float64)
    ours = Speculator(model, group, compile=True)
    assert ours.target.runner is model and ours.decoding_drafters.drafters == group.drafters


def test_a_layer_that_errs_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: with products that lose some digits, the trial leaves every layer as it is."""
    model, _ = own(None)
    true = packing._product
    monkeypatch.setattr(packing, "_product", lambda x, *rest: true(x.bfloat16().float(), *rest))
    assert not packed_in(Packing().copy(model))
    monkeypatch.setattr(packing, "_product", true)
    assert len(packed_in(Packing().copy(model))) == sum(
        type(part) is torch.nn.Linear for part in model.modules()
    )


@pytest.mark.skipif(kernels(torch.float32) is None, reason="needs our kernels")
def test_a_layer_runs_by_kernels_else_packed_else_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What errs gives way to the next; float32, which all processors pack."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(250, 250))
    found = [type(part) for part in Packing().copy(model)]
    assert found == [CpuLinear, PackedLinear]  # whose sizes the kernels do not take
    true, packed = CpuLinear.forward, packing._product
    monkeypatch.setattr(CpuLinear, "forward", lambda self, x: true(self, x.bfloat16().float()))
    assert type(Packing().copy(model)[0]) is PackedLinear
    monkeypatch.setattr(packing, "_product", lambda x, *rest: packed(x.bfloat16().float(), *rest))
    assert type(Packing().copy(model)[0]) is torch.nn.Linear


def test_a_layer_whose_call_costs_more_than_its_product_is_not_packed() -> None:
    sizes = {torch.float32: 384, torch.bfloat16: 128}
    for least in (packing._LEAST, packing._LEAST_OF_KERNELS):
        others = packing._LEAST if least is packing._LEAST_OF_KERNELS else packing._LEAST_OF_KERNELS
        for dtype, size in sizes.items():
            least[dtype], others[dtype] = size * 128 * dtype.itemsize, 1 << 30
            own = [torch.nn.Linear(128, n, dtype=dtype) for n in (size, size - 16)]
            known = packs(dtype) if least is packing._LEAST else kernels(dtype) is not None
            assert packing.packable(own[0]) == known
            assert not packing.packable(own[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_layer_is_as_exact(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 200, dtype=dtype)
    if not packing.packable(layer):
        pytest.skip(f"this processor packs no {dtype}")
    ours = PackedLinear(layer)
    assert ours.weight is layer.weight and ours.bias is layer.bias
    with torch.no_grad():
        for shape in ((96,), (1, 96), (3, 5, 96), (0, 96)):
            rows = torch.randn(shape).to(dtype)
            true = torch.nn.functional.linear(
                rows.double(), layer.weight.double(), layer.bias.double()
            )
            found = ours(rows)
            assert found.shape == true.shape and found.dtype == dtype
            close = torch.finfo(dtype).eps
            torch.testing.assert_close(found.double(), true, rtol=4 * close, atol=4 * close)


def resident() -> int:
    """Bytes of this process that lie in memory, its mapped files counted in."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def saved(tmp_path: Path, **sizes: Any) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**COMMON, "eos_token_id": None, **sizes})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    Path(tmp_path / "tokenizer_config.json").write_text("{}")
    return str(tmp_path)


def loaded(name: str, **options: Any) -> Speculator:
    return headstart.load(name, tokenizer=letters(), compile=True, **options)


def test_a_target_that_is_loaded_by_name_has_each_weight_once(tmp_path: Path) -> None:
    """Also while it is packed, but for one layer; measured, and counted."""
    name = saved(tmp_path, hidden_size=512, intermediate_size=8192, vocab_size=512)
    layer = 512 * 8192 * 4
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
    for weight in model.parameters():
        weight.data = weight.data.clone()  # not a mapped file
    whole = sum(weight.nbytes for weight in model.parameters())
    with torch.no_grad():
        before = model(IDS).logits
    gc.collect()
    peaks, start, true = list[int](), resident(), packing._pack
    with pytest.MonkeyPatch.context() as patch:

        def measured(weight: Tensor) -> Tensor:
            found = true(weight)
            peaks.append(resident() - start)
            return found

        patch.setattr(packing, "_pack", measured)
        Packing().pack_in_place(model)
    gc.collect()
    assert max(peaks) < 2.5 * layer < 0.5 * whole
    assert resident() - start < layer
    own = [part for part in model.modules() if isinstance(part, OnlyPacked)]
    assert sum(part.nbytes for part in own) + sum(w.nbytes for w in model.parameters()) == whole
    with torch.no_grad():
        off = (model(IDS).logits - before).abs().max()
    assert off < 1e-4 * before.abs().max()


def test_plain_calls_of_a_loaded_target_run_packed(tmp_path: Path) -> None:
    name = saved(tmp_path)
    eager: Any = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
    ours: Any = loaded(name)
    assert ours.target.runner is ours.model
    linear = [part for part in ours.model.modules() if isinstance(part, torch.nn.Linear)]
    assert linear and all(type(part) is OnlyPacked for part in linear)
    for decode in (ours.generate, ours.model.generate):
        assert torch.equal(decode(IDS, **GREEDY), eager.generate(IDS, **GREEDY))
    # What is saved is what was loaded, bit for bit.
    assert fingerprint(ours.model) == fingerprint(eager)
    ours.model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    expected = eager.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[key], expected[key]) for key in expected)
    beside = loaded(name, in_place=False)
    assert not packed_in(beside.model) and packed_in(beside.target.runner)


def test_a_tied_output_layer_keeps_the_embedding(tmp_path: Path) -> None:
    ours = loaded(saved(tmp_path, tie_word_embeddings=True))
    head, embedding = ours.model.lm_head, ours.model.get_input_embeddings()
    assert type(head) is PackedLinear and head.weight is embedding.weight
    kinds = [type(p) for p in ours.model.modules() if isinstance(p, torch.nn.Linear)]
    assert kinds.count(OnlyPacked) == len(kinds) - 1


def test_a_layer_that_is_packed_alone_can_be_copied_moved_and_loaded(tmp_path: Path) -> None:
    ours: Any = loaded(saved(tmp_path))
    state = {name: value.clone() for name, value in ours.model.state_dict().items()}
    text = ours.generate(IDS, **GREEDY)
    twin = copy.deepcopy(ours.model)
    assert len(packed_in(twin)) == len(packed_in(ours.model))
    assert torch.equal(twin.generate(IDS, **GREEDY), text)
    twin.double()
    assert not packed_in(twin) and twin.lm_head.weight.dtype == torch.float64
    assert torch.equal(twin.lm_head.weight.float(), state["lm_head.weight"])
    ours.model.load_state_dict({name: -value for name, value in state.items()})
    assert torch.equal(ours.model.lm_head.weight, -state["lm_head.weight"])
    assert type(ours.model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3", "draft_model", "redrafter"])
def test_drafters_that_share_layers_run_with_a_target_packed_in_place(name: str) -> None:
    model, group = own(name)
    expected = Speculator(model, group, tree=TREES[1]).generate(IDS, **GREEDY)
    counts = Speculator(model, group, tree=TREES[1])
    counts.generate(IDS, **GREEDY)
    both = Packing()
    for each in (model, *group.drafters):
        both.pack_in_place(each)
    ours = Speculator(model, group, tree=TREES[1], compile=True)
    assert ours.target.runner is model and ours.decoding_drafters.drafters == group.drafters
    assert torch.equal(ours.generate(IDS, **GREEDY), expected)
    assert ours.stats.counts.tolist() == counts.stats.counts.tolist()


def test_the_size_of_a_copy_is_said_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(packing, "_WORTH_SAYING", 0)
    model, _ = own(None)
    size = sum(p.weight.nbytes for p in model.modules() if isinstance(p, torch.nn.Linear))
    monkeypatch.setattr(packing, "_pack", lambda weight: pytest.fail(caplog.text))
    with pytest.raises(pytest.fail.Exception, match=f"takes {size / 1e6:.0f} MB beside"):
        Speculator(model, compile=True)
    monkeypatch.undo()
    caplog.clear()
    loaded(saved(tmp_path))
    assert not caplog.text


def test_auto_takes_what_a_trial_finds_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = own(None)
    true = PackedLinear.forward

    def slow(self: Any, input: Tensor) -> Tensor:
        time.sleep(1e-3)
        return true(self, input)

    with monkeypatch.context() as patch:
        patch.setattr(PackedLinear, "forward", slow)
        assert not packing.packing_pays(model)
        ours = Speculator(model, compile="auto")
        assert ours.target.runner is model and ours.target.compile is False
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", lambda self, x: time.sleep(1e-3))
        assert packing.packing_pays(model)
    monkeypatch.setattr("headstart.infer.target.packing_pays", lambda model: True)
    ours = Speculator(model, compile="auto")
    assert packed_in(ours.target.runner) and ours.target.compile == "packed"
    assert torch.equal(ours.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))


def test_what_is_loaded_by_name_is_tried_and_what_is_passed_in_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headstart.infer.target.packing_pays", lambda model: True)
    name = saved(tmp_path)
    ours = headstart.load(name, "lookup", tokenizer=letters())
    assert ours.target.runner is ours.model and ours.target.forwards == "packed weights"
    off = headstart.load(name, tokenizer=letters(), compile=False)
    assert not packed_in(off.model) and off.target.forwards == "torch"
    model, group = own("medusa")
    model.save_pretrained(tmp_path)
    before = [state(each)[::2] for each in (model, *group.drafters)]  # features have hooks
    for given in ((model, "lookup"), (model, *group.drafters)):
        passed = headstart.load(*given)
        assert passed.target.runner is model and passed.target.forwards == "torch"
    beside = headstart.load(str(tmp_path), group.drafters[0], tokenizer=letters())
    assert not packed_in(beside.model) and beside.target.compile is False
    assert [state(each)[::2] for each in (model, *group.drafters)] == before


def test_a_model_that_turns_a_part_of_each_head_runs_packed() -> None:
    """GPT-NeoX turns a part of each head alone."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"vocab_size": COMMON["vocab_size"], "hidden_size": 64, "intermediate_size": 96}
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(**sizes, **more, eos_token_id=None)
    model: Any = transformers.GPTNeoXForCausalLM(config).eval()
    ours = Speculator(model, compile=True)
    assert ours.target.forwards == "packed weights"
    assert torch.equal(ours.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))


def test_copies_of_a_model_share_what_is_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "_WORTH_SAYING", 1)
    model, _ = own(None)
    first = Speculator(model, compile=True)
    assert len(caplog.messages) == 1
    second = Speculator(model, compile=True)
    assert len(caplog.messages) == 1  # nothing more is taken
    pairs = zip(packed_in(first.target.runner), packed_in(second.target.runner), strict=True)
    assert all(one is not other and one._packed is other._packed for one, other in pairs)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    runners: list[Any] = [Speculator(model, compile=True).target.runner, first.target.runner]
    new, old = (each.lm_head._packed.to_dense() for each in runners)
    assert torch.equal(new, model.lm_head.weight) and torch.equal(old, -new)


def test_the_trial_is_not_led_astray_by_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, _), calls, packed_seconds = own(None), itertools.count(), 0.5

    def seconds(layers: list[Any], states: list[Tensor]) -> list[float]:
        """Packed layers wait for a core in three of four turns, never all in the same one."""
        turn = next(calls) // 2
        if not isinstance(layers[0], PackedLinear):
            return [1.0] * len(layers)
        return [packed_seconds + 9.0 * bool((turn + at) % 4) for at in range(len(layers))]

    monkeypatch.setattr(packing, "_seconds", seconds)
    assert packing.packing_pays(model)
    assert next(calls) == 2 * 4  # as soon as each layer had its turn
    packed_seconds = 2.0
    assert not packing.packing_pays(model)


def test_auto_makes_no_copy_that_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.infer.target.packing_pays", lambda model: True)
    model, _ = own(None)
    size = sum(layer.weight.nbytes for layer in model.modules() if packing.packable(layer))
    for free, packs in ((2 * size, True), (2 * size - 1, False)):
        there = SimpleNamespace(available=free)
        monkeypatch.setattr("psutil.virtual_memory", lambda there=there: there)
        assert way_to_run(model, "auto") == ("packed" if packs else None)
        assert way_to_run(model, "auto", in_place=True) == "packed"


def test_auto_leaves_weights_that_are_streamed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = own(None)
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: time.sleep(1e-3))
    assert way_to_run(model, "auto") == "packed"
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert way_to_run(model, "auto") is None


def test_auto_compiles_no_kernels_for_layers_too_small_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "_LEAST", {torch.float32: 1 << 40})
    monkeypatch.setattr("headstart.heads.core.cpu_kernels.kernels", lambda dtype: pytest.fail())
    model, _ = own(None)
    assert Speculator(model, compile="auto").target.forwards == "torch"


def test_a_faster_type_is_named_and_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = saved(tmp_path)
    monkeypatch.setattr("headstart.infer.loading._LARGE", 0)
    cases: list[tuple[bool, dict[str, Any], bool]] = [
        (True, {}, True),
        (False, {}, False),
        (True, {"dtype": "float32"}, False),
        (True, {"dtype": "bfloat16"}, False),
    ]
    for able, options, said in cases:
        monkeypatch.setattr("headstart.infer.loading.has_bfloat16", lambda able=able: able)
        caplog.clear()
        model = headstart.load(name, tokenizer=letters(), **options).model
        assert model.dtype == getattr(torch, options.get("dtype", "float32"))
        assert ("--dtype bfloat16" in caplog.text) == said


def test_it_is_said_what_helps_where_others_use_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("psutil.getloadavg", lambda: (7.0, 0.0, 0.0))
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert "(a load of 7 on 4)" in said_of_busy_cores()
    for change in (
        lambda own: own.setattr(torch, "get_num_threads", lambda: 1),
        lambda own: own.setenv("OMP_WAIT_POLICY", "passive"),
        lambda own: own.setattr("psutil.getloadavg", lambda: (5.0, 0.0, 0.0)),
    ):
        with monkeypatch.context() as own:
            change(own)
            assert not said_of_busy_cores()


def test_threads_are_physical_cores_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(8)})
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    use_physical_cores()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 2, 3})
    use_physical_cores()
    assert asked == [4, 3]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    use_physical_cores()
    assert asked == [4, 3]
