"""A draft model: a smaller causal language model with the target's tokenizer.

The drafter of the first speculative decoders (Leviathan et al. 2022, arXiv 2211.17192; Chen et al.
2023, arXiv 2302.01318). It reads tokens alone and keeps a cache of its own. The model, called the
student, is made of some layers of the target, or loaded, and may be distilled (DistillSpec, Zhou et
al. 2023, arXiv 2310.08461).
"""

import logging
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .core import (
    OptionError,
    OutputLayer,
    decoder_layers,
    decoder_of,
    device_of,
    load_pretrained,
    output_layer,
)
from .drafter import DrafterConfig, Step, last_true
from .parts.adapter import Adapter
from .parts.cached_layers import CachedLayers, DraftCache
from .parts.own_layers import compute_experts_alike, copy_layers, layers_of
from .parts.recompute import compute_again
from .parts.student import KEPT, check_kept, load_student, put_rows, whole_state
from .trainable import DraftLogits, TrainableDrafter

logger = logging.getLogger(__name__)


@strict
class DraftModelConfig(DrafterConfig):
    """Which student drafts. An artifact holds the student's own `config.json` instead of this one.

    Attributes:
        student: the student's config, as plain data.
        layers: which layers of the target the student starts from, or how many of them, spread
            evenly from the first to the last; with the target's embedding, norm and output layer.
        model: a folder or the Hub name of the student, in place of `layers`.
        lora: train factors of the student's linear layers instead of its weights, into which they
            are merged when it is saved: `rank`, and as for Medusa-2 `alpha`, `dropout`, `modules`.
    """

    model_type = "headstart_draft_model"
    feature_layers: list[int] | tuple[int, ...] = ()
    student: dict[str, Any] | None = None
    layers: int | list[int] | None = None
    model: str | None = None
    lora: dict[str, Any] | None = None

    OPTIONS = ("layers", "model", "lora")

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        if (config.layers is None) == (config.model is None):
            raise OptionError(
                f"drafter.layers is {config.layers} and drafter.model {config.model}; expected one "
                "of them: layers of the target, or the folder or Hub name of a smaller model."
            )
        own_adapter(config.lora)
        if config.model is None:
            config.student = layers_of(target.config, config.chosen(target)).to_dict()
        else:
            config.student = load_pretrained(AutoConfig, config.model).to_dict()
        return config

    def chosen(self, target: PreTrainedModel) -> list[int]:
        """The target's layers that the student is made of."""
        count = target.config.get_text_config(decoder=True).num_hidden_layers
        layers = self.layers
        if isinstance(layers, int) and 1 <= layers <= count:
            return [round(i * (count - 1) / max(layers - 1, 1)) for i in range(layers)]
        if isinstance(layers, list) and (
            1 <= len(layers) <= count and all(0 <= layer < count for layer in layers)
        ):
            return layers
        raise OptionError(
            f"drafter.layers is {layers}; the target has {count} layers: expected how many of them "
            f"to keep, or a list of some of 0 … {count - 1}."
        )


def own_adapter(lora: dict[str, Any] | None) -> Adapter | None:
    """The student's adapter by the option `lora`; an OptionError for what it cannot mean."""
    if lora is None:
        return None
    known = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "modules": []}
    whole = {**known, **lora}
    rank, alpha, dropout, modules = (whole[name] for name in known)
    fits = all(isinstance(number, int | float) for number in (alpha, dropout))
    fits = fits and isinstance(rank, int) and rank >= 1 and alpha > 0 and 0 <= dropout < 1
    if whole.keys() != known.keys() or not fits or not isinstance(modules, list):
        raise OptionError(
            f"drafter.lora is {lora}; expected rank (at least 1), alpha (more than 0), dropout "
            "(0 … 1, 1 excluded) and modules (a list of names), or some of them."
        )
    return Adapter(rank, alpha, dropout, modules)


class DraftModel(TrainableDrafter):
    """A causal language model as the drafter: `model`, or else a new one by `config`."""

    config_class = DraftModelConfig
    config: DraftModelConfig
    saved_as_language_model = True
    writes_text = True

    def __init__(self, config: DraftModelConfig, model: PreTrainedModel | None = None):
        super().__init__(config)
        if model is None:
            own = AutoConfig.for_model(**(config.student or {}))
            model = AutoModelForCausalLM.from_config(own, trust_remote_code=False)
        self.model: Any = model
        self._layers = CachedLayers(self.model)
        self._inputs = self._outputs = config.vocab_size  # its token ids, counted by `bind`
        self._whole_output: tuple[torch.nn.Linear, ...] = ()  # unregistered, see `keep_tokens`
        self._lora = own_adapter(config.lora)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The student initialises its own."""

    @classmethod
    def of(cls, model: PreTrainedModel, **fields: Any) -> Self:
        """The drafter around a loaded student, with other fields of its config."""
        text, kind = model.config.get_text_config(decoder=True), cast(Any, cls.config_class)
        sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, **fields}
        return cls(kind(**sizes, student=model.config.to_dict()), model)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Load the student as transformers does, with the same options; it never runs own code."""
        model, report, beside = load_student(name, args, options, [KEPT])
        drafter = cls.of(model)
        if KEPT in beside:
            drafter.keep_tokens(beside[KEPT])
        return (drafter, *report) if report else drafter

    def keep_tokens(self, ids: Tensor) -> None:
        """Propose the tokens of ascending ids [Vd] alone, and compute no other logits.

        The student is still saved whole, with these ids beside it; it cannot be trained like this.

        Raises:
            ArtifactError: see `put_rows` and `check_kept`.
        """
        check_kept(ids, self.whole_output)
        self._put_rows(ids)
        self.model.register_buffer(KEPT, ids.to(output_layer(self.model).weight.device))

    @property
    def whole_output(self) -> torch.nn.Linear:
        """The student's output layer, with the rows of all tokens."""
        return self._whole_output[0] if self._whole_output else output_layer(self.model)

    def _put_rows(self, ids: Tensor) -> None:
        """Compute the logits of tokens [Vd] alone, in this order."""
        whole = self.whole_output
        put_rows(self.model, whole, ids)
        self._whole_output, self._layers = (whole,), CachedLayers(self.model)
        self.__dict__.pop("_output", None)

    @property
    def trimmed(self) -> bool:
        """Whether it proposes some of its tokens alone, see `keep_tokens`."""
        return bool(self._whole_output)

    def save_pretrained(self, folder: Any, **options: Any) -> None:  # type: ignore[override]
        """Save the student alone, as the ordinary model that it is, in one file of weights.

        While factors are trained they are merged into it.
        """
        if self._lora is not None and self._lora.attached:
            options = {"state_dict": self._lora.merged_state(), **options}
        if self._whole_output:
            options = {"state_dict": self._whole_state(), **options}
        self.model.save_pretrained(folder, **{"max_shard_size": "1TB", **options})
        # transformers derives the same from the config.
        (Path(folder) / "generation_config.json").unlink(missing_ok=True)

    def _whole_state(self) -> dict[str, Tensor]:
        """What is saved of a student whose output layer has lost rows."""
        return whole_state(self.model, self.whole_output)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take a state dict of the drafter, or one of the student as it is saved.

        With the latter factors that are trained are dropped, since they are merged into it.
        """
        factors = any(".lora_" in name for name in state_dict)
        if self._lora is not None and self._lora.attached and not factors:
            self._lora.detach()
        if self.state_dict().keys() & state_dict.keys():
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        tied = self.model.all_tied_weights_keys  # one of each pair is saved
        missing = {name: state_dict[kept] for name, kept in tied.items() if name not in state_dict}
        return self.model.load_state_dict({**state_dict, **missing}, strict=strict, assign=assign)

    def bind(self, target: PreTrainedModel) -> Self:
        text = target.config.get_text_config(decoder=True)
        # The student's own sizes are free, since it reads only tokens.
        self.config.hidden_size, self.config.vocab_size = text.hidden_size, text.vocab_size
        self._inputs = self.model.get_input_embeddings().num_embeddings
        self._outputs = output_layer(self.model).out_features
        if self.config.layers is not None:  # it is made for this target
            compute_experts_alike(self.model, target)
        known = self.draft_vocabulary if self.trimmed else None
        if known is not None and known[-1] >= self.config.vocab_size:
            raise OptionError(
                f"the drafter proposes the token {known[-1].item()}, and the target has "
                f"{self.config.vocab_size}; load the target that it was trimmed for."
            )
        return super().bind(target)

    def shared_modules(self, target: PreTrainedModel) -> list[torch.nn.Module]:
        return []

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Give the student its first weights: the target's chosen layers, or the model named."""
        if self.config.model is not None:
            loaded = load_pretrained(AutoModelForCausalLM, self.config.model, dtype=self.dtype)
            self.model.load_state_dict(loaded.state_dict())
        elif self.config.layers is not None:
            copy_layers(self.target, self.model, self.config.chosen(self.target))
        if self._lora is not None:
            if left_out := self._lora.left_out(self.model):
                logger.warning("%s", left_out)
            self._lora.attach(self.model)

    def save_checkpoint(self, folder: Path) -> None:
        if self._lora is not None and self._lora.attached:
            self._lora.save(folder)
        # By the names of this model's parts, also where published files have others (experts).
        self.save_pretrained(folder, save_original_format=False)

    def load_checkpoint(self, folder: Path) -> None:
        if self._lora is None or not self._lora.attached:
            return super().load_checkpoint(folder)
        return self._lora.load(folder)  # its base is as it was at first

    @property
    def needs_length_bound(self) -> bool:
        return self._layers.needs_length_bound

    def start(self, batch: int, capacity: int) -> DraftCache:
        return self._layers.start(batch)

    def reserve(self, state: DraftCache, longest: int, room: int) -> None:
        self._layers.reserve(state, longest, room)

    def prefill(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        self._layers.prefill(state, count, input_ids=self._known(tokens))

    def begin(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        found = self._layers.begin(state, count, input_ids=self._known(tokens))
        return self._step(last_true(found.logits, count).unsqueeze(1))

    def extend(self, state: DraftCache, tokens: Tensor, parent: Tensor) -> Step:
        found = self._layers.extend(state, parent, input_ids=self._known(tokens))
        return self._step(found.logits)

    def _known(self, tokens: Tensor) -> Tensor:
        """Target ids, clamped to those of the student; ids beyond them are padding."""
        few = self._inputs < self.config.vocab_size
        return tokens.clamp(max=self._inputs - 1) if few else tokens

    def _step(self, logits: Tensor) -> Step:
        return Step(logits[..., : self.config.vocab_size], self.draft_vocabulary)

    @property
    def draft_vocabulary(self) -> Tensor | None:
        """[Vd] the ids that were kept; or 0 … Vd - 1, where the student has fewer than the target;
        None otherwise."""
        if self.trimmed:
            return self.model.draft_vocabulary
        if self._outputs >= self.config.vocab_size:
            return None
        return torch.arange(self._outputs, device=device_of(output_layer(self.model)))

    @property
    def language_model(self) -> PreTrainedModel | None:
        return None if self.trimmed else self.model

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Depth k at position t is the student's final hidden state at t + k: [depths, M, D]."""
        hidden = decoder_of(self.model)(
            input_ids=self._known(tokens), position_ids=positions, use_cache=False
        )[0]
        shifted = [hidden.roll(-depth, 1)[where] for depth in range(1, depths + 1)]
        return torch.stack(shifted)

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        return lambda states: self._output(states)[:, : self.config.vocab_size]

    def checkpoint_activations(self) -> bool:
        compute_again(decoder_layers(self.model))
        return True

    def draft_output(self, depth: int) -> DraftLogits:
        layer = self._output.layer
        if self._output.is_linear and layer.weight.shape[0] <= self.config.vocab_size:
            return DraftLogits(weight=layer.weight, bias=layer.bias)
        return DraftLogits(self.draft_logits(depth), (layer,))

    @cached_property
    def _output(self) -> OutputLayer:
        return OutputLayer(self.model)
