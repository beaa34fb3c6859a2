"""A model's hidden states, captured by hooks, and its logits, made from the last of them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import OptionError, UnsupportedTarget
from .final import FINAL
from .offload import offloaded, weight_of

_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""What models do to their output layer's logits, by the names in their configs."""

_Found = TypeVar("_Found")


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal language model that leaves its final hidden states.

    Of a few models `get_decoder` gives another one: Llama 4 itself, and ModernBERT's output layer.
    """
    decoder = cast(PreTrainedModel, model.get_decoder())
    if isinstance(decoder, PreTrainedModel) and decoder is not model:
        return decoder
    inner = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    return inner[0] if len(inner) == 1 else decoder


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers of a causal language model."""
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UnsupportedTarget(
        f"{model.config.model_type} has no list of {wanted} decoder layers to take features from; "
        "use a drafter that reads only the final hidden state."
    )


class _Captured(threading.local):
    def __init__(self) -> None:  # in each thread; compilers overlook what hides a class's own
        self.states: dict[int, Tensor] | None = None  # None: this thread's forwards are nobody's


class FeatureTap(AbstractContextManager):
    """Captures hidden states of a model by hooks, in the thread's forwards that it is meant for.

    Layer i ≥ 0 means the hidden state that enters decoder layer i or, for i = L of L layers, that
    leaves the last one; `FINAL` the one after the last norm. Hooks do not depend on the order of
    `output_hidden_states`, which differs by release. They stay until `close`, or until a `with`
    block ends, and pass over other threads' forwards.

    Args:
        listens: whether each forward of the thread that makes it is captured, for `take`; if not,
            those of `run` alone, in any thread.

    Raises:
        OptionError: the model has no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], listens: bool = True):
        self._captured = _Captured()
        self._captured.states = {} if listens else None
        self._order, self._handles = tuple(layers), []
        deep = any(layer != FINAL for layer in layers)
        stack = list(decoder_layers(model)) if deep else list[nn.Module]()
        for layer in set(layers):
            if layer == FINAL:
                hook = decoder_of(model).register_forward_hook(self._keep_output)
            elif 0 <= layer < len(stack):
                keep = partial(self._keep_input, layer)
                hook = stack[layer].register_forward_pre_hook(keep, with_kwargs=True)
            elif layer == len(stack):
                hook = stack[-1].register_forward_hook(partial(self._keep_last, layer))
            else:
                raise OptionError(
                    f"feature layer {layer} does not exist; expected 0 … {len(stack)}, or "
                    f"{FINAL} for the final hidden state."
                )
            self._handles.append(hook)

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _keep_output(self, module: nn.Module, args: tuple, output: Any) -> None:
        if (states := self._captured.states) is not None:
            states[FINAL] = output[0]

    def _keep_last(self, layer: int, module: nn.Module, args: tuple, output: Any) -> None:
        if (states := self._captured.states) is not None:
            states[layer] = output[0] if isinstance(output, tuple) else output

    def _keep_input(self, layer: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if (states := self._captured.states) is not None:
            states[layer] = args[0] if args else kwargs["hidden_states"]

    def run(self, forward: Callable[[], _Found]) -> tuple[_Found, Tensor]:
        """What a forward of the model returns, and its features, see `take`."""
        before, states = self._captured.states, dict[int, Tensor]()
        self._captured.states = states
        try:
            found = forward()
        finally:
            self._captured.states = before
        return found, self._joined(states)

    def take(self) -> Tensor:
        """Features [B, T, F] of the last forward, F = layers × D, in the order asked for."""
        assert self._captured.states is not None, "it listens to another thread"
        return self._joined(self._captured.states)

    def _joined(self, captured: dict[int, Tensor]) -> Tensor:
        states = [captured[layer] for layer in self._order]
        for layer, state in zip(self._order, states, strict=True):
            if state.dim() != 3:
                raise _not_of_tokens(layer, state)
        if len(states) == 1:
            return states[0]
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: hooks of a copied model pass over its forwards, as over other threads'."""
        return self

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _not_of_tokens(layer: int, states: Tensor) -> UnsupportedTarget:
    """The error for states that are not [B, T, D], as between the layers of Gemma 3n."""
    where, other = f"that enter layer {layer}", "reads only the final hidden state"
    if layer == FINAL:
        where, other = "after the last norm", "reads no hidden states"
    return UnsupportedTarget(
        f"the hidden states {where} have the shape {list(states.shape)}; expected [B, T, D]: use a "
        f"drafter that {other}."
    )


def capture(model: PreTrainedModel, layers: Sequence[int], tokens: Tensor) -> Tensor:
    """Features [B, T, F] of tokens [B, T], by one forward of the decoder; F is 0 for no layers."""
    if not layers:
        return torch.empty(*tokens.shape, 0, device=tokens.device)
    with FeatureTap(model, layers) as tap:
        decoder_of(model)(input_ids=tokens, use_cache=False)
        return tap.take()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model without gradients and dropout; it is in its own mode again afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The linear layer that reads the final hidden state; `UnsupportedTarget` without one."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise UnsupportedTarget(
            f"{model.config.model_type} has no output layer that a drafter could read; a target "
            "needs get_output_embeddings()."
        )
    return cast(nn.Linear, layer)


class OutputLayer:
    """A model's logits from its final hidden states, without a forward of the model.

    Args:
        model: its output layer is taken as it is now, also if it is wrapped by an adapter later.
        vocabulary: [Vd] the columns to return; all of them when None.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: Tensor | None = None):
        self.model, self.vocabulary = model, vocabulary
        self.layer = output_layer(model)

    def __call__(self, hidden: Tensor, layer: nn.Module | None = None) -> Tensor:
        """Final hidden states [..., D] -> logits [..., Vd], in the layer's dtype; see `finish`.

        Args:
            layer: used in place of the model's own, which it was made from.
        """
        logits = self.finish((layer or self.layer)(hidden))  # [..., V]
        return logits if self.vocabulary is None else logits.index_select(-1, self.vocabulary)

    def raw(self, hidden: Tensor) -> Tensor:
        """What the layer alone makes of states [..., D] of any dtype, as in training: [..., V].

        A quantised layer, whose weights are in whole numbers or 8 bits, reads the model's dtype.
        """
        layer: Any = self.layer
        dtype = layer.dtype if hasattr(layer, "dtype") else layer.weight.dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            dtype = self.model.dtype
        return self.layer(hidden.to(dtype))

    @property
    def is_linear(self) -> bool:
        """Whether logits are what a linear layer's weight and bias, which are here, make of it."""
        linear = type(self.layer) is nn.Linear and not offloaded(self.layer)
        return linear and self.vocabulary is None and self.finish == Finish()

    @cached_property
    def finish(self) -> "Finish":
        """What the model does to its output layer's logits: nothing, a factor, a soft cap, or both.

        Found when first used, by one forward over 8 tokens, since names in configs do not mean the
        same in every model.

        Raises:
            OptionError: the model does something else.
        """
        config: Any = self.model.config.get_text_config(decoder=True)
        if _is_sharded(self.layer):
            return finish_of_sharded(config)
        ids = torch.arange(8, device=self.model.device).unsqueeze(0) % config.vocab_size
        with eval_mode(self.model), FeatureTap(self.model, [FINAL]) as tap:
            expected = self.model(input_ids=ids, use_cache=False).logits.float()
            raw = self.layer(tap.take())
        tries = [Finish()]
        for name in _FACTORS:
            if factor := getattr(config, name, None):
                tries += [Finish(times=factor), Finish(over=factor)]
        caps = [cap for name in _CAPS if (cap := getattr(config, name, None))]
        tries += [replace(each, cap=cap) for cap in caps for each in tries]
        close = 1e-4 if raw.dtype in (torch.float32, torch.float64) else 3e-2
        # The best of them, since a cap hardly changes small logits.
        errors = [(finish(raw).float() - expected).abs().amax().item() for finish in tries]
        least = min(errors)
        if least <= close * expected.abs().amax():
            return tries[errors.index(least)]
        raise OptionError(
            f"{config.model_type} changes its output layer's logits in a way that train.loss does "
            "not know; expected a factor, a soft cap, both or none: use train.loss=cross_entropy, "
            "or another drafter if this is the draft model."
        )


@dataclass(frozen=True)
class Finish:
    """What a model does to its output layer's logits: a factor or a divisor, and a soft cap."""

    times: float = 1.0
    over: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.times != 1:
            logits = logits * self.times
        if self.over != 1:
            logits = logits / self.over
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _is_sharded(layer: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO-3 holds its weights; its model cannot run before the trainer does."""
    return any(hasattr(weight, "ds_id") for weight in layer.parameters())


def logit_factor(model: PreTrainedModel) -> float:
    """What a model multiplies its output layer's logits by: 1 for most, 1/16 for some of Granite.

    Found by a forward, see `OutputLayer.finish`, where the config names one. Where the model cannot
    run (in shards, or without weights), it is what that name means in most models; and 1 where the
    model changes its logits in an unknown way.
    """
    config: Any = model.config.get_text_config(decoder=True)
    named = {name: getattr(config, name, None) for name in _FACTORS}
    named = {name: factor for name, factor in named.items() if factor not in (None, 0, 1)}
    if not named:
        return 1.0
    layer = output_layer(model)
    empty = layer.weight.is_meta and not offloaded(layer)
    if empty or _is_sharded(layer):
        name, factor = next(iter(named.items()))
        return 1 / factor if name == "logits_scaling" else factor
    try:
        finish = OutputLayer(model).finish
    except OptionError:
        return 1.0
    return finish.times / finish.over


def output_rows(model: PreTrainedModel) -> Tensor:
    """A linear layer's weight [V, D] that gives a model's logits: its output layer's, times the
    `logit_factor`."""
    rows, factor = weight_of(output_layer(model)), logit_factor(model)
    return rows if factor == 1 else rows * factor


def finish_of_sharded(config: Any) -> Finish:
    """See `OutputLayer.finish`, of a model in shards, which cannot run before its trainer does.

    Args:
        config: of its language model.

    Raises:
        OptionError: its config names what it may do to its logits.
    """
    found = {name: getattr(config, name, None) for name in (*_FACTORS, *_CAPS)}
    changes = [name for name, by in found.items() if by and not (by == 1 and name in _FACTORS)]
    if changes:
        raise OptionError(
            f"{config.model_type} has {changes[0]} {found[changes[0]]} in its config, so its "
            "output layer's logits may be changed in a way that cannot be found out under "
            "DeepSpeed ZeRO-3; use ZeRO-2 or DDP, or train.loss=cross_entropy and a family other "
            "than medusa2."
        )
    return Finish()
