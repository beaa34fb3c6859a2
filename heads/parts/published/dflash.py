"""Block drafters of other projects: DFlash, DSpark and JetSpec.

All have the config of a Qwen3 of a few layers, in which `dflash_config` names the mask token and
the layers of the target (by their output), and tensors named as here but for the layers' prefix
(github.com/z-lab/dflash). There are no embeddings and no output layer: these are the target's.
vLLM and SGLang read the same files.
"""

from functools import partial
from typing import Any

from torch import Tensor

from ...checkpoint import Found
from ...core import ArtifactError
from .checkpoint import Checkpoint, cannot_be_written, llama_config
from .layer_ids import read_layer_ids
from .layers import layer_config, read_layers

_LAYERS, _MARKOV = "model.layers.", "markov_head.markov_w1.weight"
_DSPARK = "Qwen3DSparkModel"
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", _DSPARK)
"""What the architectures are called that are run here."""


def dflash(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' checkpoints, and those of others in their form.

    A head that predicts how likely its drafts are accepted (`confidence_head`) is left out: it
    decides how many drafts are verified, and nothing else.
    """
    architecture = next(iter(config.get("architectures") or [""]))
    named = architecture in ARCHITECTURES or "dflash_config" in config
    if not named or "hidden_norm.weight" not in tensors:
        return None
    said: dict[str, Any] = config | (config.get("dflash_config") or {})
    found = {
        (f"model.{name}" if name.startswith("layers.") else name): tensor
        for name, tensor in tensors.items()
        if not name.startswith("confidence_head.")
    }
    layer, read = read_layers(config, found), read_layer_ids(config)
    size = len(found["fc.weight"])
    if not layer.get("qk_norm") or layer.get("sliding_window"):
        what = "see a window alone" if layer.get("qk_norm") else "have no norms of queries and keys"
        raise ArtifactError(f"its layers {what}, which is not run here; expected Qwen3's layers.")
    token, block = said.get("mask_token_id"), said.get("block_size")
    if token is None or not block or found["fc.weight"].shape[1] != len(read) * size:
        raise ArtifactError(
            f"its config says mask_token_id {token}, block_size {block} and target_layer_ids for "
            f"{len(read)} layers, and fc reads {found['fc.weight'].shape[1]} entries; restore the "
            "config that was published."
        )
    from_anchor = bool(said.get("sample_from_anchor", architecture == _DSPARK))
    known = {
        "hidden_size": size, "vocab_size": layer_config(config).get("vocab_size"), "layer": layer,
        "layers": layer.get("num_hidden_layers", 1), "feature_layers": read,
        "mask_token_id": int(token), "causal": bool(said.get("causal", False)),
        "sample_from_anchor": from_anchor, "depths": int(block) - (not from_anchor),
    }  # fmt: skip
    if _MARKOV in found:
        known["markov_rank"] = found[_MARKOV].shape[1]
    return {name: value for name, value in known.items() if value is not None}, found


def _write(drafter: Any, form: str) -> Checkpoint:
    own, layer = drafter.config, drafter.config.layer
    if own.markov_rank:
        raise cannot_be_written(
            form, "it has no confidence_head, which drafters with a term of the token before "
            "(markov_rank) have there", "train it with drafter.markov_rank=0",
        )  # fmt: skip
    if own.embedding == "own":
        raise cannot_be_written(form, "its embeddings are not its target's", "decode with it here")
    config = llama_config(drafter, layer) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": own.depths + (not own.sample_from_anchor),
        "num_target_layers": drafter.target.config.get_text_config(decoder=True).num_hidden_layers,
        "dflash_config": {
            "mask_token_id": own.mask_token_id,
            "target_layer_ids": [number - 1 for number in own.feature_layers],
            "causal": own.causal, "sample_from_anchor": own.sample_from_anchor,
        },
    }  # fmt: skip
    tensors = {name.removeprefix("model."): t for name, t in drafter.state_dict().items()}
    return Checkpoint(config, tensors)


DFLASH = {form: partial(_write, form=form) for form in ("vllm", "sglang", "original")}
"""What writes a drafter in each format: the same for all."""
