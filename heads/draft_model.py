"""A draft model: any smaller causal language model with the target's tokenizer.

The drafter of the first speculative decoders (Leviathan et al. 2022, arXiv 2211.17192; Chen et al.
2023, arXiv 2302.01318). It reads tokens alone, keeps its own cache, and runs every grown level of a
tree. A student is made of some layers of the target, or loaded, and may be distilled (DistillSpec,
Zhou et al. 2023, arXiv 2310.08461).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from .core import (
    AttentionWindows,
    OptionError,
    PositionLimit,
    SlabCache,
    UnsupportedTarget,
    choose_attention,
    in_steps,
    output_layer,
    prefill_forward,
    probe_layers,
    tree_forward,
)
from .core.cache import LayerShape
from .core.forward import decoder_layers
from .drafter import Drafter, DrafterConfig, Step, last_true

_ROOM = 512
"""Tokens beyond the prompt that the cache is first made for; later it grows by half."""


@strict
class DraftModelConfig(DrafterConfig):
    """Which student drafts. An artifact holds the student's own `config.json` instead of this one.

    Attributes:
        student: the student's config, as plain data.
        layers: which layers of the target the student starts from, or how many of them, spread
            evenly from the first to the last; with the target's embedding, norm and output layer.
        model: a folder or the Hub name of the student, in place of `layers`.
    """

    model_type = "headstart_draft_model"
    feature_layers: list[int] | tuple[int, ...] = ()
    student: dict[str, Any] | None = None
    layers: int | list[int] | None = None
    model: str | None = None

    OPTIONS: ClassVar[tuple[str, ...]] = ("layers", "model")

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        if (config.layers is None) == (config.model is None):
            raise OptionError(
                f"drafter.layers is {config.layers} and drafter.model {config.model}; expected one "
                "of them: layers of the target, or the folder or Hub name of a smaller model."
            )
        if config.model is None:
            config.student = layers_of(target.config, config.chosen(target)).to_dict()
        else:
            config.student = AutoConfig.from_pretrained(config.model).to_dict()
        return config

    def chosen(self, target: PreTrainedModel) -> list[int]:
        """The target's layers that the student is made of."""
        count = target.config.get_text_config(decoder=True).num_hidden_layers
        layers = self.layers
        if isinstance(layers, int) and 1 <= layers <= count:
            return [round(i * (count - 1) / max(layers - 1, 1)) for i in range(layers)]
        if isinstance(layers, list) and layers and all(0 <= layer < count for layer in layers):
            return layers
        raise OptionError(
            f"drafter.layers is {layers}; the target has {count} layers: expected how many of them "
            f"to keep, or a list of some of 0 … {count - 1}."
        )


def layers_of(config: PreTrainedConfig, chosen: Sequence[int]) -> PreTrainedConfig:
    """The config of a model made of some layers of another.

    Raises:
        OptionError: the model is more than its decoder.
    """
    if config.get_text_config(decoder=True) is not config:
        raise OptionError(
            f"{config.model_type} is more than a language model, so no student can be made of its "
            "layers; give drafter.model, a smaller model with the same tokenizer."
        )
    count, student = config.num_hidden_layers, copy.deepcopy(config)
    student.num_hidden_layers = len(chosen)
    for name, value in config.to_dict().items():
        if "layer" in name and isinstance(value, list) and len(value) == count:
            setattr(student, name, [value[layer] for layer in chosen])
    return student


@dataclass
class Drafted:
    """A request's state.

    Attributes:
        slab: keys and values; slot s of the committed text holds position s, and the nodes grown in
            this round stand after it.
        longest: a bound on any row's committed tokens, on the host.
        told: the largest root position, where the loop tells it before a round.
        lengths: [B] committed tokens.
        ancestors: [B, G, G] bool, of the nodes grown in this round; depth: [B, G], theirs.
    """

    slab: SlabCache
    longest: int
    lengths: Tensor
    told: int | None = None
    ancestors: Tensor = field(init=False)
    depth: Tensor = field(init=False)

    def reserve(self, slots: int) -> int:
        """Make room for so many slots a row; returns them rounded up, to be attended to."""
        live = in_steps(slots)
        if live > self.slab.capacity:
            grown = self.slab.capacity + self.slab.capacity // 2
            self.slab.reserve(max(live, in_steps(grown)))
        return live


@dataclass(frozen=True)
class _Driven:
    """What the student's forwards need to know about it, and where that holds."""

    place: tuple[torch.device, torch.dtype]
    windows: AttentionWindows
    shapes: list[LayerShape]
    limit: PositionLimit | None


class _Answer(BaseModelOutputWithPast):
    """A decoder's answer that has nothing but final states, whatever a model may look for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class DraftModel(Drafter):
    """A causal language model as the drafter.

    Args:
        config: where the student comes from.
        model: the student; made from `config`, with random weights, when None.
    """

    config_class = DraftModelConfig
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, model: PreTrainedModel | None = None):
        super().__init__(config)
        student: Any = model
        if student is None:
            own = AutoConfig.for_model(**(config.student or {}))
            student = AutoModelForCausalLM.from_config(own)
        self.model: PreTrainedModel = student
        self._driven: _Driven | None = None
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The student initialises its own."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The drafter around a loaded student."""
        text = model.config.get_text_config(decoder=True)
        sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
        return cls(DraftModelConfig(**sizes, student=model.config.to_dict()), model)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Load the student as transformers does, with the same options."""
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, *args, **options)
        if isinstance(loaded, tuple):
            return cls.of(loaded[0]), *loaded[1:]
        return cls.of(loaded)

    def save_pretrained(self, folder: Any, **options: Any) -> None:  # type: ignore[override]
        """Save the student alone, as the ordinary model that it is, in one file of weights."""
        self.model.save_pretrained(folder, **{"max_shard_size": "1TB", **options})
        # transformers derives the same from the config.
        (Path(folder) / "generation_config.json").unlink(missing_ok=True)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take a state dict of the drafter, or one of the student as it is saved."""
        if self.state_dict().keys() & state_dict.keys():
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        tied = self.model.all_tied_weights_keys  # one of each pair is saved
        missing = {name: state_dict[twin] for name, twin in tied.items() if name not in state_dict}
        return self.model.load_state_dict({**state_dict, **missing}, strict=strict, assign=assign)

    def bind(self, target: PreTrainedModel) -> Self:
        text = target.config.get_text_config(decoder=True)
        # The student's own sizes are free: text alone passes between the two.
        self.config.hidden_size, self.config.vocab_size = text.hidden_size, text.vocab_size
        return super().bind(target)

    @torch.no_grad()
    def start_from_target(self, token_counts: Tensor | None = None) -> None:
        """Give the student its first weights: the target's chosen layers, or the model named."""
        if self.config.model is not None:
            loaded = AutoModelForCausalLM.from_pretrained(self.config.model, dtype=self.dtype)
            self.model.load_state_dict(loaded.state_dict())
            return
        if self.config.layers is None:
            return
        chosen, layers = self.config.chosen(self.target), decoder_layers(self.target)
        prefix = next(name for name, module in self.target.named_modules() if module is layers)
        source = self.target.state_dict()
        for name, tensor in self.model.state_dict().items():
            if name.startswith(f"{prefix}."):
                layer, _, rest = name.removeprefix(f"{prefix}.").partition(".")
                name = f"{prefix}.{chosen[int(layer)]}.{rest}"
            tensor.copy_(source[name])

    def start(self, batch: int, capacity: int) -> Drafted:
        shapes = self._drive().shapes
        lengths = torch.zeros(batch, dtype=torch.long, device=self.device)
        return Drafted(SlabCache(shapes, batch, 0), 0, lengths)

    def tell(self, state: Drafted, longest: int, room: int) -> None:
        state.told = longest
        state.reserve(longest + 1 + room)

    def prefill(self, state: Drafted, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        batch, length = tokens.shape
        limit = self._drive().limit
        if limit is not None and length > limit.positions:
            raise OptionError(
                f"the longest prompt has {length} tokens and the draft model {limit.positions} "
                f"positions ({limit.reason}); shorten it, or use another drafter."
            )
        state.slab.clear()
        state.slab.reserve(in_steps(length + _ROOM))
        # Nobody reads the logits, so any place will do for them.
        prefill_forward(self.model, state.slab, self._known(tokens), [length] * batch)
        state.longest, state.lengths, state.told = length, count, None

    def begin(self, state: Drafted, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        batch, added = tokens.shape
        longest = state.longest if state.told is None else state.told + 1
        live = state.reserve(longest + added)
        state.longest = longest + (added if state.told is None else 0)
        state.told = None
        steps = torch.arange(added, device=tokens.device)
        ancestors = (steps.unsqueeze(1) >= steps).expand(batch, -1, -1)  # a chain
        depth = (steps + 1).expand(batch, -1)
        logits = self._run(state, tokens, depth, ancestors, live)  # [B, A, V]
        # What the padding wrote lies behind the text, where this round's nodes are written.
        state.lengths = state.lengths + count
        state.ancestors = ancestors[:, :0, :0]
        state.depth = depth[:, :0]
        return self._step(last_true(logits, count).unsqueeze(1))

    def extend(self, state: Drafted, tokens: Tensor, parent: Tensor) -> Step:
        width, grown = tokens.shape[1], state.depth.shape[1]
        pad = torch.nn.functional.pad
        above = pad(state.ancestors, (0, 0, 1, 0))  # entry 0 is the root, which has none here
        above = above.gather(1, (parent + 1).unsqueeze(-1).expand(-1, -1, grown))  # [B, W, G]
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        state.ancestors = torch.cat(
            [pad(state.ancestors, (0, width)), torch.cat([above, own], 2)], 1
        )  # [B, G+W, G+W]
        depth = pad(state.depth, (1, 0)).gather(1, parent + 1) + 1  # [B, W]
        state.depth = torch.cat([state.depth, depth], 1)
        live = state.reserve(state.longest + grown + width)
        return self._step(self._run(state, tokens, state.depth, state.ancestors, live))

    def _run(
        self, state: Drafted, tokens: Tensor, depth: Tensor, ancestors: Tensor, live: int
    ) -> Tensor:
        """Run the last W of G nodes that stand after the committed text; logits [B, W, V].

        Args:
            depth: [B, G], 1 at the first position after the text; ancestors: [B, G, G].
        """
        driven, lengths = self._drive(), state.lengths
        positions = lengths.unsqueeze(1) + depth - 1  # [B, G]
        if driven.limit is not None:
            # What is drafted past the limit is any token; it must only stay legal to run.
            positions = positions.clamp(max=driven.limit.positions - 1)
        tokens = self._known(tokens)
        return tree_forward(
            self.model, state.slab, driven.windows, tokens, lengths, positions, ancestors, live
        )

    def _drive(self) -> _Driven:
        place = (self.device, self.dtype)
        if self._driven is None or self._driven.place != place:
            try:
                windows, shapes = AttentionWindows.of(self.model), probe_layers(self.model)
                windows = choose_attention(self.model, windows, shapes, "auto")
            except UnsupportedTarget as error:
                raise OptionError(f"no draft model: {error}") from error
            self._driven = _Driven(place, windows, shapes, PositionLimit.of(self.model))
        return self._driven

    def _known(self, tokens: Tensor) -> Tensor:
        """Target ids as the student's; padding rows of a larger target are beyond its table."""
        embedding: Any = self.model.get_input_embeddings()
        known = embedding.weight.shape[0]
        return tokens if known >= self.config.vocab_size else tokens.clamp(max=known - 1)

    def _step(self, logits: Tensor) -> Step:
        return Step(logits[..., : self.config.vocab_size], self.draft_vocabulary)

    @property
    def draft_vocabulary(self) -> Tensor | None:
        """[Vd] the ids 0 … Vd - 1, where the student has fewer than the target; None otherwise."""
        layer = output_layer(self.model)
        known = layer.weight.shape[0]
        if known >= self.config.vocab_size:
            return None
        return torch.arange(known, device=layer.weight.device)

    @property
    def writer(self) -> PreTrainedModel | None:
        return self.model

    @property
    def taught_depths(self) -> int:
        return 1

    def states(self, features: Tensor, tokens: Tensor, where: Tensor, depths: int) -> Tensor:
        """Depth k at position t is the student's final hidden state at t + k: [depths, M, D]."""
        hidden = self.model.get_decoder()(input_ids=self._known(tokens), use_cache=False)[0]
        shifted = [hidden.roll(-depth, 1)[where] for depth in range(1, depths + 1)]
        return torch.stack(shifted)

    def readout(self, depth: int) -> Callable[[Tensor], Tensor]:
        decoder = self.model.get_decoder()

        def logits(states: Tensor) -> Tensor:
            # Models scale or cap their logits in ways of their own, so the student's own forward
            # runs, and finds these states where its layers would have answered.
            answer = _Answer(last_hidden_state=states.unsqueeze(0))  # type: ignore[arg-type]
            decoder.forward = lambda *args, **options: answer
            try:
                nothing = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
                out = self.model(input_ids=nothing, use_cache=False).logits[0]
            finally:
                del decoder.forward
            return out[:, : self.config.vocab_size]

        return logits
