"""How large everything is that the suite measures: `full`; `short`, which trains and decodes less;
and `toy`, to see that it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        dtype: of the models, where float32 is not what is tested.
        shapes: the random targets of the cost parts, by part.
        copies: MiB, what is copied.
        context, long_context: tokens in the cache of the random targets.
        tokens: decoded behind them; repeats: turns of each; turns: of the baselines, with the
            trained target.
        trees: nodes of the trees verified; long_trees: behind the long context.
        nodes, depth: the largest and deepest tree planned.
        prompts, written: of the trained target's decoding: how many, and how long their answers.
        batches: rows decoded at once.
        recipe: overrides of recipe.yaml.
    """

    dtype: str = "bfloat16"
    shapes: Mapping[str, str] = field(
        default_factory=lambda: {"costs-1b": "1b", "costs-8b": "8b", "batches-8b": "8b"}
    )
    copies: tuple[int, ...] = (64, 256, 1024, 4096)
    context: int = 2048
    long_context: int = 32_768
    tokens: int = 48
    repeats: int = 5
    turns: int = 3
    trees: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128)
    long_trees: tuple[int, ...] = (1, 16, 64)
    nodes: int = 64
    depth: int = 8
    prompts: int = 24
    written: int = 128
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    recipe: tuple[str, ...] = ()


_FULL = Scale()

SCALES = {
    "full": _FULL,
    "short": replace(
        _FULL,
        repeats=3,
        turns=2,
        prompts=12,
        batches=(1, 2, 4, 8),
        recipe=(
            *("target.scratch.max_seconds=60", "distill.max_seconds=35", "train.max_seconds=40"),
            *("decode.prompts=8", "decode.validation_prompts=8"),
        ),
    ),
    "toy": Scale(
        dtype="float32",
        shapes={"costs-1b": "toy", "costs-8b": "toy", "batches-8b": "toy"},
        copies=(1, 4),
        context=96,
        long_context=192,
        tokens=8,
        repeats=2,
        turns=1,
        trees=(1, 64, 128),
        long_trees=(1, 64),
        nodes=6,
        depth=3,
        prompts=4,
        written=12,
        batches=(2,),
        recipe=(
            *("corpus.source=stdlib", "corpus.max_bytes=120000", "corpus.held_out=0.4"),
            *("target.dtype=float32", "target.scratch.vocab_size=300"),
            *("target.scratch.hidden_size=32", "target.scratch.layers=2"),
            *("target.scratch.heads=2", "target.scratch.intermediate_size=64"),
            *("target.scratch.context=128", "target.scratch.sequence_length=32"),
            *("target.scratch.batch_size=8", "target.scratch.max_seconds=null"),
            *("target.scratch.max_tokens=6000", "distill.examples=24"),
            *("distill.prefix_tokens=16", "distill.new_tokens=16", "distill.batch_size=8"),
            *("distill.shards=4", "distill.max_seconds=null", "train.batch_size=4"),
            *("train.max_steps=8", "train.max_seconds=null", "decode.tree=sparse:4"),
            *("decode.prefix_tokens=16", "decode.new_tokens=12", "decode.validation_prompts=2"),
        ),
    ),
}
