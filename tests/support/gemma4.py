"""Tiny random Gemma 4 targets in float64, and their assistants as transformers has them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from headstart.heads.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from headstart.heads.parts.shared_keys import storing_layers
from tests.support.tiny import COMMON

SIZES: dict[str, Any] = {**COMMON, "global_head_dim": 16, "sliding_window": 6}
TARGET: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 4,
}
ASSISTANT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
}


_made: dict[str, Any] = {}  # targets, by what they were asked for


def target(kind: str = "Gemma4", **changes: Any) -> Any:
    """A target whose last layers share keys and values, with embeddings for each layer; the same
    object at every call. `Gemma4Unified` has no such embeddings."""
    key = f"{kind} {changes}"
    if key not in _made:
        given = _of_kind(kind, {**SIZES, **TARGET, **changes})
        with torch.random.fork_rng():
            torch.manual_seed(1)
            config = getattr(tf, f"{kind}TextConfig")(**given)
            made = getattr(tf, f"{kind}ForCausalLM")(config).double().eval()
        for number in storing_layers(made).values():  # 5.23 gives keys to none if none are shared
            made.model.layers[number].self_attn.store_full_length_kv = True
        _made[key] = made
    return _made[key]


def with_images(text: Any) -> Any:
    """The model that also reads images, around the layers of a target."""
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    tokens: dict[str, Any] = {"image_token_id": 61, "video_token_id": 62, "audio_token_id": 63}
    own = copy.deepcopy(text.config)
    own.pad_token_id = 0
    more: dict[str, Any] = {"audio_config": None, "tie_word_embeddings": False, **tokens}
    config = tf.Gemma4Config(text_config=own, vision_config=vision, **more)
    made: Any = tf.Gemma4ForConditionalGeneration(config).double().eval()
    made.model.language_model.load_state_dict(text.model.state_dict())
    made.lm_head.load_state_dict(text.lm_head.state_dict())
    return made


def _of_kind(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    unified = kind == "Gemma4Unified"
    return {k: v for k, v in given.items() if not (unified and "per_layer_input" in k)}


@contextmanager
def queries_alone() -> Iterator[None]:
    """Let transformers make models all of whose layers share keys and values: 5.23 refuses them."""
    with torch.random.fork_rng():
        kinds: list[Any] = [tf.Gemma4TextConfig, tf.Gemma4UnifiedTextConfig]
        before = [getattr(kind, "kv_sharing_modes", None) for kind in kinds]
        for kind in kinds:
            kind.kv_sharing_modes = property(lambda own: ["reuse"] * own.num_hidden_layers)
        try:
            yield
        finally:
            for kind, own in zip(kinds, before, strict=True):
                if own is None:
                    del kind.kv_sharing_modes
                else:
                    kind.kv_sharing_modes = own


def assistant(kind: str = "Gemma4", groups: int = 8, **changes: Any) -> Any:
    """An assistant of a target, with random norms; `groups` are its centroids, 0 for none."""
    with queries_alone():
        torch.manual_seed(4)
        given = _of_kind(kind, {**SIZES, **ASSISTANT, **changes})
        config = getattr(tf, f"{kind}AssistantConfig")(
            text_config=getattr(tf, f"{kind}TextConfig")(**given),
            backbone_hidden_size=32,
            use_ordered_embeddings=bool(groups),
            num_centroids=groups,
            centroid_intermediate_top_k=3,
        )
        made: Any = getattr(tf, f"{kind}AssistantForCausalLM")(config).double().eval()
        tensors = [*made.named_parameters(), *made.named_buffers()]
        for name, tensor in tensors:  # else ones, which hide what is left out
            if "norm" in name or "layer_scalar" in name:
                tensor.data = torch.rand(tensor.shape).add(0.5).double()
        if groups:
            made.masked_embedding.token_ordering.copy_(torch.randperm(given["vocab_size"]))
        return made


def drafter(model: Any, **options: Any) -> Gemma4Assistant:
    """An assistant of headstart's own class, with random weights."""
    given = {"width": 16, "inner_dim": 24, "centroids": 8, "top_centroids": 3} | options
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = Gemma4Assistant(Gemma4AssistantConfig.for_target(model, **given)).double()
        for parameter in made.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
        return made.bind(model).eval()


def steps_of(made: Any, model: Any, ids: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """What transformers drafts after a text [1, T], step by step: logits [1, 1, V] and tokens.

    As `SinglePositionMultiTokenCandidateGenerator` drives an assistant after a prompt.
    """
    found = model(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    read = dict(found.shared_kv_states)
    hidden, token = found.hidden_states[-1][:, -1:], ids[:, -1:]
    position = torch.tensor([[ids.shape[1] - 1]])
    logits, tokens = [], []
    for _ in range(count):
        pairs = torch.cat([model.get_input_embeddings()(token), hidden], -1)
        step = made(
            inputs_embeds=pairs,
            attention_mask=torch.ones_like(ids),
            position_ids=position,
            shared_kv_states=read,
        )
        token, hidden = step.logits.argmax(-1), step.last_hidden_state
        logits.append(step.logits)
        tokens.append(token)
    return logits, tokens
