"""Recipes composed of parts: every shipped combination resolves and builds its drafter, empty."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headstart.heads.families import FAMILIES
from headstart.heads.parts.mask_blocks import depth_shares
from headstart.train.estimate import (
    Assumptions,
    estimate,
    meta_drafter,
    meta_target,
    training_flops,
)
from headstart.train.recipe import (
    Recipe,
    RecipeError,
    Train,
    load_recipe,
    parse_recipe,
    shipped_combinations,
    shipped_parts,
    shipped_recipes,
)
from headstart.train.recipe.files import KINDS, architectures

BY_KIND = {kind: [p.name for p in shipped_parts().values() if p.kind == kind] for kind in KINDS}

# As the models' own files of weights count them.
PARAMETERS = {
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "lmsys/vicuna-7b-v1.3": 6_738_415_616,
}


@cache
def target(model: str) -> Any:
    recipe = {"name": "r", "target": {"model": model}, "drafter": {"family": "medusa"}}
    return meta_target(parse_recipe(recipe))


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_there_is_a_part_for_every_family() -> None:
    families = {load_recipe(f"{name}+mistral-7b").drafter.family for name in BY_KIND["families"]}
    assert families == FAMILIES.keys()
    assert [len(names) for names in BY_KIND.values()] == [16, 4, 3]
    assert len(shipped_combinations()) == 192


def test_a_position_of_pard_counts_alike_at_every_depth() -> None:
    """A depth's mean is weighted by the share of the positions that are asked for it."""
    recipe = load_recipe("pard+llama-3.1-8b")
    options, decay = recipe.drafter.options, recipe.train.head_decay
    shares = depth_shares(options["depths"], options["kept"], options["least_kept"])
    assert shares.count(options["least_kept"]) == 3
    weights = [decay ** (k - 1) for k in range(1, options["depths"] + 1)]
    assert weights[:-3] == pytest.approx(shares[:-3])


@pytest.mark.parametrize("model", BY_KIND["models"])
@pytest.mark.parametrize("family", BY_KIND["families"])
def test_a_combination_builds_its_drafter_and_fits_its_hardware(family: str, model: str) -> None:
    recipes = [load_recipe(f"{family}+{model}+{machine}") for machine in BY_KIND["hardware"]]
    for recipe, machine in zip(recipes, BY_KIND["hardware"], strict=True):
        assert recipe.name == f"{family}+{model}+{machine}"
        assert recipe.target.model is not None and recipe.hardware is not None
        empty = target(recipe.target.model)
        drafter = meta_drafter(recipe, empty)
        assert {p.device.type for p in drafter.parameters()} <= {"meta"}
        assert recipe.train.accumulation(recipe.hardware.gpus) >= 1
        found = estimate(recipe, empty)
        assert found.parameters["target"] == PARAMETERS[recipe.target.model] == count(empty)
        assert found.fits, found.memory
        assert drafter.learns() == (found.hours["all"] > 0)
        assert drafter.trainable == (found.hours["training"] > 0)
    one, eight = (load_recipe(f"{family}+{model}+{n}x80gb").to_dict() for n in (1, 8))
    if family in ("hydra", "redrafter", "eagle3"):  # a vocabulary of 32,000 is not trimmed
        trimmed = recipes[1].drafter.options["draft_vocab_size"]
        assert trimmed == (0 if model == "vicuna-7b" else 32_000)
    differ = {key for key in one if one[key] != eight[key]} - {"name", "hardware"}
    assert differ <= {"train"}  # as many rows a step, in other micro-batches
    assert one["train"] | {"batch_size": 0} == eight["train"] | {"batch_size": 0}


def test_students_are_known_without_a_network() -> None:
    students = {
        "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
        "Qwen/Qwen3-0.6B": 596_049_920,
        "JackFram/llama-160m": 162_417_408,
    }
    assert architectures().keys() == PARAMETERS.keys() | students.keys()
    for model, name in (("llama-3.1-8b", "meta-llama/Llama-3.2-1B-Instruct"),
                        ("qwen3-8b", "Qwen/Qwen3-0.6B"),
                        ("vicuna-7b", "JackFram/llama-160m")):  # fmt: skip
        recipe = load_recipe(f"draft-model+{model}+1x80gb")
        assert recipe.drafter.options["model"] == name
        drafter = meta_drafter(recipe, target(str(recipe.target.model)))
        assert count(drafter) == students[name]


def test_later_parts_override_earlier_ones_and_conditions_all() -> None:
    recipe = load_recipe("medusa+llama-3.1-8b+1x80gb", ["train.batch_size=2"])
    assert (recipe.train.rows_per_step, recipe.train.batch_size) == (64, 2)
    assert recipe.target.dtype == "bfloat16" and recipe.distill.batch_size == 64
    assert recipe.corpus == load_recipe("own-model").corpus  # which the families are based on
    small = load_recipe("medusa+llama-3.1-8b+1x24gb")
    assert small.target.dtype == "bfloat16"  # the family says so for this hardware, which says 4bit
    assert load_recipe("eagle+llama-3.1-8b+1x24gb").target.dtype == "4bit"
    options = load_recipe("draft-model+qwen3-8b+1x24gb").drafter.options
    assert options == {"layers": None, "model": "Qwen/Qwen3-0.6B"}
    assert load_recipe("draft-model+mistral-7b+1x24gb").drafter.options == {"layers": 2}
    any_model = load_recipe("medusa+1x80gb", ["target.model=org/model"])
    assert (any_model.name, any_model.target.model) == ("medusa+1x80gb", "org/model")


def test_a_base_may_be_composed(tmp_path: Path) -> None:
    joined = load_recipe("eagle3+qwen3-8b+8x80gb").to_dict()
    for base in ("eagle3+qwen3-8b+8x80gb", "[eagle3, qwen3-8b, 8x80gb]"):
        (tmp_path / "r.yaml").write_text(f"base: {base}\nname: r\ndrafter: {{depths: 3}}\n")
        recipe = load_recipe(tmp_path / "r.yaml")
        assert recipe.drafter.options == {**joined["drafter"]["options"], "depths": 3}
        same = joined | {"name": "r", "drafter": recipe.to_dict()["drafter"]}
        assert recipe.to_dict() == same
    (tmp_path / "mine.yaml").write_text("target: {model: org/mine}\n")
    (tmp_path / "r.yaml").write_text("base: [eagle3, mine.yaml, 1x80gb]\nname: r\n")
    assert load_recipe(tmp_path / "r.yaml").target.model == "org/mine"
    assert load_recipe(f"eagle3+{tmp_path / 'mine.yaml'}+1x80gb").target.model == "org/mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.epochs=2", r"is a setting, and stands where .* e\.g\. own-model train\.epochs=2"),
        ("medusa", r"'medusa' is a part of recipes; join it .*e\.g\. medusa\+llama.*1x24gb"),
        ("medusa+llama-3.1-8", r"no part 'llama-3.1-8' \(did you mean 'llama-3.1-8b'\?\); parts:"),
        ("qwen3-8b+medusa", "family medusa stands after qwen3-8b.*write the family first"),
        ("medusa++1x80gb", "no part ''"),
        ("qwen3-8b+1x80gb", "drafter: missing"),
        ("medusas", "no recipe 'medusas'.*or parts joined by"),
    ],
)
def test_wrong_names_are_answered_on_one_line(name: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as error:
        load_recipe(name)
    assert "\n" not in str(error.value)


def test_parts_open_with_a_header() -> None:
    for part in shipped_parts().values():
        opening = part.path.read_text(encoding="utf-8").splitlines()[0]
        assert opening.startswith(f"# {part.name}: ") and len(opening) > 20, part.path
        assert part.name not in shipped_recipes() or part.kind == "families"


def test_a_step_has_the_same_rows_on_any_number_of_processes() -> None:
    spec = Train(batch_size=2, rows_per_step=24)
    assert [spec.accumulation(n) for n in (1, 3, 12)] == [12, 4, 1]
    assert Train(gradient_accumulation=5).accumulation(7) == 5
    with pytest.raises(RecipeError, match=r"^train\.rows_per_step is 24, and 5 processes"):
        spec.accumulation(5)


def by_hand(family: str, *overrides: str) -> tuple[Recipe, Any]:
    recipe = load_recipe(f"{family}+llama-3.1-8b+1x80gb", overrides)
    return recipe, estimate(recipe, target(str(recipe.target.model)))


def test_the_arithmetic_by_hand() -> None:
    recipe, found = by_hand("medusa", "distill.examples=1000", "train.max_steps=10")
    size, layers = 4096, 32
    heads = 5 * (size * size + size)
    assert found.parameters == {"target": 8_030_261_248, "drafter": heads}
    assert found.memory["target"] == pytest.approx(2 * 8_030_261_248 / 1e9)
    assert found.memory["training state"] == pytest.approx((16 + 2) * heads / 1e9)
    cache = 64 * 1024 * layers * 2 * 8 * 128 * 2  # rows, tokens, layers, K and V, heads, bfloat16
    assert found.memory["writing"] == pytest.approx(found.memory["target"] + cache / 1e9)
    training = sum(list(found.memory.values())[:3])
    peak = max(training, found.memory["writing"]) * 1.1 + 1
    assert found.memory["peak"] == pytest.approx(peak)
    tokens = 0.4 * 512 + 0.75 * 512
    assert found.disk["rows"] == pytest.approx(1000 * tokens * 5 / 1e9)
    matrices = layers * (2 * size * size + 2 * size * 1024 + 3 * size * 14336)
    supervised = 0.75 * 512 / tokens
    frozen = 2 * matrices + 2 * tokens * size * layers
    heads_flops = 6 * 5 * size * size + 4 * 5 * size * 128256 * supervised
    hours = 10 * 64 * tokens * (frozen + heads_flops) / (312e12 * 0.35) / 3600
    assert found.hours["training"] == pytest.approx(hours, rel=1e-4)  # biases are products too
    step = (found.memory["target"] * 1e9 + cache * tokens / 1024) / 2039e9 / 0.4
    assert found.hours["writing"] == pytest.approx(1000 * 0.75 * 512 / 64 * step / 3600)
    faster = estimate(recipe, target(str(recipe.target.model)), Assumptions(training=0.7))
    assert faster.hours["training"] == pytest.approx(found.hours["training"] / 2)


def test_what_changes_an_estimate() -> None:
    _, plain = by_hand("medusa2")
    _, small = by_hand("medusa2", "target.dtype=4bit")
    _, light = by_hand("medusa2", "train.optimizer=adamw_8bit")
    _, bigger = by_hand("medusa2", "train.batch_size=4")
    ratio = small.memory["target"] / plain.memory["target"]
    assert 0.3 < ratio < 0.4  # embedding and output layer stay in bfloat16
    learned = plain.parameters["drafter"] + plain.parameters["adapter"]
    rank = 32 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert plain.parameters["adapter"] == rank
    state = "training state"
    assert plain.memory[state] - light.memory[state] == pytest.approx(6 * learned / 1e9)
    assert 1.5 < bigger.memory["activations"] / plain.memory["activations"] < 2
    _, again = by_hand("medusa2", "train.activation_checkpointing=true")
    assert again.memory["activations"] < 0.3 * plain.memory["activations"]
    assert again.hours["training"] > plain.hours["training"]
    # Autocast's copies of what learns, but for output layers, of which medusa2 has none.
    assert plain.memory[state] - again.memory[state] == pytest.approx(2 * learned / 1e9)
    longer = "train.packing=true", "train.packed_length=4096"  # of rows of 1,024 tokens
    _, packed = by_hand("medusa2", *longer)
    assert 3.5 < packed.memory["activations"] / plain.memory["activations"] < 4
    assert packed.hours == plain.hours  # epochs end both
    bound = "train.epochs=null", "train.max_steps=100"
    (_, short), (_, full) = (by_hand("medusa2", *bound, *how) for how in ((), longer))
    ratio = 4096 / (0.4 * 512 + 0.75 * 512)  # a step has more rows
    assert full.hours["training"] == pytest.approx(ratio * short.hours["training"])
    _, alone = by_hand("medusa2", "hardware.memory_gb=30")
    assert plain.fits and not alone.fits
    with pytest.raises(ValueError, match="trains its own target"):
        meta_target(load_recipe("quickstart"))


def test_depths_use_one_output_layer_or_one_each() -> None:
    """Flops a depth more: of a shared layer, of heads' own, and of one layer for all depths."""
    size, vocab, trimmed, supervised = 4096, 128256, 32_000, 0.75 * 512 / (1.15 * 512)
    shared, own = (
        _per_token("medusa", f"drafter.output={output}", f"drafter.heads={heads}")
        - _per_token("medusa", f"drafter.output={output}", "drafter.heads=2")
        for output, heads in (("shared", 3), ("own", 3))
    )
    block = 6 * size * size
    assert shared == pytest.approx(block + 4 * size * vocab * supervised, rel=1e-4)  # and biases
    assert own == pytest.approx(block + 6 * size * vocab * supervised, rel=1e-4)
    cell = _per_token("redrafter", "drafter.depths=3") - _per_token("redrafter", "drafter.depths=2")
    inner = 2 * (2 * size) ** 2 + 2 * size * size
    assert cell == pytest.approx(6 * inner + 6 * 2 * size * trimmed * supervised)


def test_blocks_are_read_where_drafts_start() -> None:
    """A block drafter has logits where drafts start; a term of the token before comes on top."""
    size, vocab, row, rank = 4096, 128256, 1.15 * 512, 256
    supervised = 0.75 * 512 / row
    one = 4 * size * vocab  # of the target's output layer, for a depth
    more, few, few_more = (
        _per_token("dflash", "drafter.layers=1", f"drafter.anchors={a}", f"drafter.depths={k}")
        for a, k in ((512, 4), (64, 3), (64, 4))
    )
    layer = 2 * size**2 + 2 * size * 1024 + 3 * size * 14336  # and fc, of a single feature
    inner = 6 * (layer + size**2)
    assert few_more - few == pytest.approx(inner * 64 / row + one * 64 / row)
    assert more - few_more == pytest.approx(
        inner * 5 * (512 - 64) / row + 4 * one * (supervised - 64 / row)
    )
    term = _per_token("dflash", "drafter.layers=1", "drafter.anchors=64", "drafter.depths=4",
                      f"drafter.markov_rank={rank}")  # fmt: skip
    assert term - few_more == pytest.approx(6 * rank * vocab * 4 * 64 / row)
    among = "drafter.selector_rank=256", "drafter.selector_top_k=0"
    chosen = _per_token("dflash", among[0]) - _per_token("dflash", *among)
    drafted = min(supervised, 512 / row) * 15
    assert chosen == pytest.approx(6 * (size + rank) * vocab * drafted)
    weighted = _per_token("medusa", "train.position_weights=acceptance") - _per_token("medusa")
    assert weighted == pytest.approx(2 * size * vocab * 5 * supervised)


def _per_token(family: str, *overrides: str) -> float:
    recipe = load_recipe(f"{family}+llama-3.1-8b+1x80gb", overrides)
    empty = target(str(recipe.target.model))
    return training_flops(recipe, empty, meta_drafter(recipe, empty))


# As they were published, whatever the parts say that these recipes are made of.
PUBLISHED = {
    "hydra-vicuna-7b": {
        "drafter": {"heads": 4, "layers": 4, "prefix": True, "output": "own", "dropout": 0.2},
        "train": {"loss": "soft_cross_entropy", "learning_rate": 5e-4, "rows_per_step": 32,
                  "max_steps": 21250, "warmup_ratio": 0.0047, "weight_decay": 0.1,
                  "head_decay": 1.0},
    },
    "redrafter-vicuna-7b": {
        "drafter": {"depths": 5, "layers": 2, "exit_dim": 0, "output": "own"},
        "train": {"loss": "cross_entropy", "learning_rate": 1e-3, "rows_per_step": 128,
                  "max_steps": 1062, "warmup_ratio": 0.1, "weight_decay": 0.0, "head_decay": 1.0},
    },
    "medusa2-vicuna-7b": {
        "drafter": {"heads": 5, "layers": 1, "output": "own", "rank": 32, "alpha": 16,
                    "dropout": 0.05, "heads_first": 0.5, "head_weight": 0.2, "ramp": "constant",
                    "head_rate": 4.0},
        "train": {"loss": "cross_entropy", "learning_rate": 5e-4, "rows_per_step": 64,
                  "max_steps": 3124, "warmup_ratio": 0.0128, "weight_decay": 0.0,
                  "head_decay": 0.8},
    },
    "draft-model-vicuna-7b": {
        "drafter": {"model": "JackFram/llama-160m"},
        "train": {"loss": "forward_kl", "learning_rate": 2e-5, "rows_per_step": 128,
                  "max_steps": 1062, "warmup_ratio": 0.03, "weight_decay": 0.0},
    },
    "eagle3-llama-8b": {
        "drafter": {"depths": 7, "output": "trimmed", "draft_vocab_size": 32_000},
        "train": {"loss": "soft_cross_entropy", "learning_rate": 5e-5, "clip": 0.5,
                  "beta1": 0.9, "beta2": 0.95, "rows_per_step": 16, "max_steps": 800_000,
                  "warmup_ratio": 0.015, "weight_decay": 0.0, "head_decay": 0.8},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_stay(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.drafter.options.items() >= PUBLISHED[name]["drafter"].items()
    assert vars(recipe.train).items() >= PUBLISHED[name]["train"].items()
    assert recipe.train.epochs is None and recipe.train.accumulation(8) >= 1
    tokens = recipe.distill.prefix_tokens, recipe.distill.new_tokens
    assert tokens == ((384, 128) if name.startswith("draft-model") else (1024, 1024))
    assert recipe.corpus.source == "sharegpt.jsonl" and recipe.decode.prompts == 80
    assert recipe.target.dtype == "bfloat16" and recipe.hardware and recipe.hardware.gpus == 8
