"""What a recipe takes, by arithmetic: memory of a GPU, disk and hours.

Nothing is loaded and nothing measured: the target and the drafter are built on the `meta` device,
which has shapes and no data, and counted. Memory and time follow from the counts, the recipe's
settings, the data sheet in its `hardware` section and the `Assumptions`, which are guesses; so the
figures are estimates, and are called that wherever they are shown.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from headstart.heads import Drafter, DrafterConfig, TrainableDrafter, family
from headstart.heads.artifacts.hub import model_commit, target_options
from headstart.heads.core import LayerShape, causal_class, decoder_of, load_pretrained
from headstart.heads.core.layer_sizes import inner_size, layer_configs
from headstart.heads.parts.own_layers import attending_layers

from .losses import loss_of
from .losses.comparisons import GPU_BYTES
from .recipe import Hardware, Recipe
from .recipe.files import architectures
from .sizes import (
    ARTIFACT,
    ROW_TOKEN,
    STORED,
    adapter_parameters,
    cache_bytes,
    collected_bytes,
    feature_bytes,
    matrix_shape,
    packed_tokens,
    parameters_of,
    recurrent_shapes,
    state_bytes,
    weight_bytes,
)


@dataclass(frozen=True)
class Assumptions:
    """What the arithmetic cannot know.

    Attributes:
        training: share of the GPU's peak products that training reaches.
        writing: share of the memory's bandwidth that decoding reaches, and of the peak products.
        quantized: how many times as long a forward of a 4-bit target takes.
        answers: share of `distill.new_tokens` that an answer has, up to its end.
        prompts: share of `distill.prefix_tokens` that a prompt has.
        context_gb: what the device's libraries take, in 1e9 bytes.
        slack: share by which the allocator's memory exceeds what is in use.
    """

    training: float = 0.35
    writing: float = 0.4
    quantized: float = 1.5
    answers: float = 0.75
    prompts: float = 0.4
    context_gb: float = 1.0
    slack: float = 0.1


@dataclass(frozen=True)
class Estimate:
    """What a run takes; memory and disk in 1e9 bytes, times in hours.

    Attributes:
        parameters: of `target`, `drafter`, and `adapter` where there is one.
        memory: of each GPU while training, by what it holds (`training state`: weights that learn,
            their gradients, the optimizer, and copies in bfloat16 for products), and `writing`,
            all of it while the target writes; `peak`, the larger of both sums.
        disk: `model` (as downloaded), `rows`, `features` of rows, `checkpoints`, `artifact`.
        hours: `writing` and `training` on all GPUs, and `all`; none for text that others write.
        fits: whether the peak fits the GPU's memory.
    """

    parameters: dict[str, int]
    memory: dict[str, float]
    disk: dict[str, float]
    hours: dict[str, float]
    fits: bool
    assumed: dict[str, float] = field(default_factory=dict)


def model_config(name: str) -> PreTrainedConfig:
    """The config of a model: one that shipped recipes know, or read as transformers does.

    Raises:
        ArtifactError: there is no such model.
    """
    known = architectures()
    if name not in known:
        if Path(name).is_dir():
            target_options(name)  # the folder of a drafter or of a run
        else:
            model_commit(name, None)
        return load_pretrained(AutoConfig, name)
    sizes = dict(known[name])
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def meta_target(recipe: Recipe) -> PreTrainedModel:
    """The recipe's target without data; its weights have the dtype of the config."""
    name = recipe.target.model
    if name is None:
        raise ValueError("the recipe trains its own target, which is not known yet")
    with torch.device("meta"):
        config = model_config(name)
        return causal_class(config).from_config(config, trust_remote_code=False).eval()


def meta_drafter(recipe: Recipe, target: PreTrainedModel) -> Drafter:
    """The recipe's drafter without data, bound to a target of `meta_target`.

    Raises OptionError for options that the family does not take, or that do not fit the target.
    """
    kind = family(recipe.drafter.family)
    assert kind.config_class is not None and issubclass(kind.config_class, DrafterConfig)
    options = dict(recipe.drafter.options)
    with tempfile.TemporaryDirectory() as folder:
        if options.get("model") in architectures():  # its config is known, and need not be fetched
            config = model_config(options["model"]).to_dict()
            (Path(folder) / "config.json").write_text(json.dumps(config))
            options["model"] = folder
        config = kind.config_class.for_target(target, **options)
    with torch.device("meta"):
        return kind(config).float().bind(target)  # type: ignore[arg-type]


def estimate(
    recipe: Recipe,
    target: PreTrainedModel | None = None,
    assumed: Assumptions | None = None,
) -> Estimate:
    """The arithmetic for a recipe on its hardware; on one GPU of 80 GB where it names none.

    Args:
        target: what `meta_target` gives for the recipe, where it was made before.
    """
    assumed = assumed or Assumptions()
    target = target or meta_target(recipe)
    drafter = meta_drafter(recipe, target)
    return _Arithmetic(recipe, target, drafter, assumed).estimate()


def training_flops(recipe: Recipe, target: PreTrainedModel, drafter: Drafter) -> float:
    """Products of a training step for each token of a row, of target and drafter together."""
    return sum(_Arithmetic(recipe, target, drafter, Assumptions()).flops_per_token())


class _Arithmetic:
    """One recipe's figures. Bytes and products ("flops") are of one GPU where nothing is said."""

    def __init__(
        self, recipe: Recipe, target: PreTrainedModel, drafter: Drafter, assumed: Assumptions
    ):
        self.recipe, self.drafter, self.assumed = recipe, drafter, assumed
        self.hardware = recipe.hardware or Hardware()
        self.text: Any = target.config.get_text_config(decoder=True)
        self.model, self.target = target, parameters_of(target)
        self.weight_bytes = weight_bytes(target, recipe.target.dtype)
        named = decoder_of(target).named_modules()
        self.matrices = {name: size for name, m in named if (size := matrix_shape(m))}
        self.layers = sum(inputs * outputs for inputs, outputs in self.matrices.values())
        self.trained = parameters_of(drafter) if drafter.trainable else 0
        self.outputs = _outputs(drafter)  # parameters of the drafter's own output layers
        self.adapter = adapter_parameters(target, drafter)
        distill = recipe.distill
        self.row = (  # tokens of a row as they are expected, and as they may be at most
            assumed.prompts * distill.prefix_tokens + assumed.answers * distill.new_tokens
        )
        self.longest = distill.row_tokens
        self.room = self.longest  # of a row of a batch
        if recipe.train.packing is not False:
            self.room = packed_tokens(recipe.train, self.longest)

    def estimate(self) -> Estimate:
        parameters = {"target": self.target, "drafter": self.trained}
        if self.adapter:
            parameters["adapter"] = self.adapter
        memory, hours = self._memory(), self._hours()
        limit = self.hardware.memory_gb * 1e9
        return Estimate(
            parameters=parameters,
            memory={name: value / 1e9 for name, value in memory.items()},
            disk={name: value / 1e9 for name, value in self._disk().items()},
            hours=hours | {"all": sum(hours.values())},
            fits=memory["peak"] <= limit,
            assumed=asdict(self.assumed),
        )

    def _memory(self) -> dict[str, float]:
        train, weights = self.recipe.train, self.weight_bytes
        tokens = train.batch_size * self.room
        state = state_bytes(train)
        state += 4 if self.hardware.gpus > 1 else 0  # what is exchanged of the gradients
        learned = self.trained + self.adapter
        copied = self.outputs if train.activation_checkpointing else learned
        found = {"target": weights, "training state": float(state * learned + 2 * copied)}
        if learned:
            found["activations"] = self._activations(tokens) + GPU_BYTES  # and a chunk of logits
        training = sum(found.values()) if learned else 0.0
        writing = weights + self._cache_bytes(self.longest)
        rest = self.assumed.context_gb * 1e9
        peak = max(training, writing) * (1 + self.assumed.slack) + rest
        return found | {"writing": writing, "peak": peak}

    def _activations(self, tokens: int) -> float:
        """What is kept for the backward pass, and the largest that a frozen forward holds."""
        text: Any = self.text
        size = text.hidden_size
        wide = max(map(inner_size, layer_configs(text)))
        features = (len(self.drafter.config.feature_layers) + 1) * size * 2 * tokens
        frozen = (4 * size + 3 * wide) * 2 * tokens
        # Every matrix keeps its input and output, in the drafter in float32.
        student = getattr(self.drafter.config, "student", None) or {}
        kept = self._kept(_widths(self.drafter), student) * 4 * self._passes(self.room) * tokens
        if self.adapter:
            sizes = {"num_hidden_layers": text.num_hidden_layers, "hidden_size": size}
            kept += self._kept(sum(map(sum, self.matrices.values())), sizes) * 2 * tokens
        return float(features + frozen + kept)

    def _kept(self, widths: int, config: Mapping[str, Any]) -> float:
        """What layers keep a position; with checkpointing that of one, and all layers' inputs."""
        layers = config.get("num_hidden_layers", 1)
        if not self.recipe.train.activation_checkpointing or layers == 1:
            return widths
        return widths / layers + layers * config["hidden_size"]

    @cached_property
    def shapes(self) -> list[LayerShape]:
        return recurrent_shapes(self.model)

    def _cache_bytes(self, tokens: float) -> float:
        """What the target caches while it writes rows of so many tokens."""
        return cache_bytes(self.shapes, self.text, self.recipe.distill.batch_size, tokens)

    def _disk(self) -> dict[str, float]:
        distill = self.recipe.distill
        learned = self.trained + self.adapter
        tokens = distill.examples * self.row
        rows = tokens * ROW_TOKEN if self.drafter.learns() else 0.0
        return {
            "model": 2.0 * self.target,
            "rows": rows,
            "features": feature_bytes(self.recipe, self.model, self.drafter, tokens),
            "checkpoints": float(STORED * learned),
            "artifact": float(ARTIFACT * learned) + collected_bytes(self.drafter, tokens),
        }

    def _hours(self) -> dict[str, float]:
        assumed, hardware, train = self.assumed, self.hardware, self.recipe.train
        slower = assumed.quantized if self.recipe.target.dtype == "4bit" else 1.0
        if not self.drafter.learns():
            return {"writing": 0.0, "training": 0.0}
        distill, peak = self.recipe.distill, hardware.tflops * 1e12
        # Each step of decoding reads all weights and the cache, and computes a token of each row.
        read = self.weight_bytes + self._cache_bytes(self.row)
        products = 2.0 * self.target * distill.batch_size
        step = max(read / (hardware.bandwidth * 1e9), products / peak) * slower / assumed.writing
        steps = distill.examples * assumed.answers * distill.new_tokens / distill.batch_size
        writing = steps * step / hardware.gpus if distill.writer == "own" else 0.0
        if not self.trained:
            return {"writing": writing / 3600, "training": 0.0}
        frozen, learned = self.flops_per_token()
        each_step = train.gradient_accumulation * train.batch_size * hardware.gpus
        rows = float(train.max_steps * (train.rows_per_step or each_step))
        if train.packing is not False:
            rows *= self.room / self.row
        if train.epochs is not None:
            rows = min(rows, train.epochs * distill.examples)
        each = (frozen * slower + learned) / (peak * assumed.training)
        training = rows * self.row * each / hardware.gpus
        return {"writing": writing / 3600, "training": training / 3600}

    def flops_per_token(self) -> tuple[float, float]:
        """Products of a training step a token: the frozen target's, and those of what is learned.

        A forward is 2 a parameter and token, a backward pass 4, or 2 where only what is below
        learns. Logits are computed where tokens are supervised. What recurrent layers compute
        beside their matrices is a few per cent and not counted.
        """
        config: Any = self.drafter.config
        supervised = self.assumed.answers * self.recipe.distill.new_tokens / self.row
        size, vocab = self.text.hidden_size, self.text.vocab_size
        attention = 2.0 * self.row * size * len(attending_layers(self.text, alone=False))
        soft = loss_of(self.recipe.train.loss).divergence is not None
        weights = self.recipe.train.position_weights
        confident = weights == "confidence"
        reads = config.feature_layers or soft or confident
        frozen = 2.0 * self.layers + attention if reads else 0.0
        teacher = 2.0 * size * (getattr(config, "draft_vocab_size", 0) or vocab) * supervised
        frozen += teacher * (soft + confident)
        depths = self.drafter.train_depths if isinstance(self.drafter, TrainableDrafter) else 1
        inner = sum(p.numel() for p in _inner(self.drafter))
        again = 2.0 if self.recipe.train.activation_checkpointing else 0.0
        passes = self._passes(self.row)
        learned = (6.0 + again) * inner * passes
        first = 2.0 if weights == "acceptance" else 0.0  # logits, for the weights
        if isinstance(self.drafter, TrainableDrafter) and self.drafter.draft_choice(1) is not None:
            first += 6.0  # and for the choice: which labels are candidates, and its own loss
        # Heads have a matrix each; others have one, which is applied to every depth.
        applied, drafted = min(passes, float(depths)), supervised
        if most := self._starts():
            applied, drafted = float(depths), min(supervised, most / self.row)
        learned += (6.0 + first) * self.outputs * applied * drafted
        if not self.outputs or getattr(config, "output", None) == "shared":
            # the target's, for every depth, which does not learn
            learned += (4.0 + first) * size * vocab * depths * drafted
        if self.adapter:
            share = 1 - config.heads_first
            learned += share * ((4.0 + again) * self.layers + 6.0 * self.adapter + 2 * attention)
            learned += share * 6.0 * size * vocab * supervised  # the divergence from the base
        return frozen, learned

    def _passes(self, row: float) -> float:
        """How often the drafter's layers are applied to a position of a row of so many tokens."""
        assert isinstance(self.drafter, TrainableDrafter)
        return self.drafter.passes(row)

    def _starts(self) -> int | None:
        """Of how many positions of a row a step drafts at most; None for all."""
        return self.drafter.starts_a_row if isinstance(self.drafter, TrainableDrafter) else None


def _outputs(drafter: Drafter) -> int:
    """Parameters of the drafter's own output layers: matrices as high as its vocabulary."""
    return sum(p.numel() for p in _products(drafter) if _is_output(drafter, p))


def _inner(drafter: Drafter) -> list[nn.Parameter]:
    """The drafter's matrices but for output layers."""
    return [p for p in _products(drafter) if not _is_output(drafter, p)]


def _is_output(drafter: Drafter, parameter: nn.Parameter) -> bool:
    config: Any = drafter.config
    return parameter.shape[-2] == getattr(config, "output_size", config.vocab_size)


def _products(drafter: Drafter) -> list[nn.Parameter]:
    """The parameters that are multiplied with: not vectors, nor embeddings that nothing is tied to.

    A parameter may hold several matrices, [..., outputs, inputs].
    """
    linear = {id(m.weight) for m in drafter.modules() if isinstance(m, nn.Linear)}
    looked_up = {id(m.weight) for m in drafter.modules() if isinstance(m, nn.Embedding)} - linear
    return [p for p in drafter.parameters() if p.ndim > 1 and id(p) not in looked_up]


def _widths(drafter: Drafter) -> int:
    """What the drafter's inner matrices read and write at one position."""
    return sum(math.prod(p.shape[:-2]) * (p.shape[-1] + p.shape[-2]) for p in _inner(drafter))
