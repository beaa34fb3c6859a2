"""MLP speculators of their authors (github.com/foundation-model-stack/fms-extras), and Arctic's.

Stage i, from 0, has `emb.{i}`, `proj.{i}`, `ln.{i}` and `head.{i}`, perhaps after `speculator.`. In
Arctic's layout (github.com/snowflakedb/ArcticTraining, `method: sum_rnn`) one more number, 0,
follows, since its stages may have several layers; its LSTMs (`sum_lstm`) have a projection for each
gate, and one embedding under four names. Of stages that share their weights a file may hold all or
only the first.
"""

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import Found
from ...core import ArtifactError
from .checkpoint import Checkpoint, cannot_be_written, refuse_trimmed

_TYPE, _PREFIX = "mlp_speculator", "speculator."
_FIRST = ("emb.0.weight", "emb.0.0.weight", "forget_emb.0.weight")
_PART = re.compile(r"(emb|proj|ln|head)\.(\d+)\.((?:\d+\.)?)(weight|bias)")
_GATES = ("forget", "input", "output", "cell")  # in the order of the one projection that we have


def mlp_speculator(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' drafters and Arctic's; sizes are the tensors'."""
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    if config.get("model_type") != _TYPE and not any(name in found for name in _FIRST):
        return None
    lstm = "forget_emb.0.weight" in found
    found = _one_projection(found) if lstm else _one_layer(found)
    tied = lstm or bool(config.get("tie_weights"))
    counted = 1 + max(_numbers(found, "head"), default=-1)
    heads = config.get("n_predict", counted) if tied else counted
    if type(heads) is not int or heads < 1:
        raise ArtifactError(
            f"its n_predict is {heads!r}, with {counted} output layers; expected how many tokens "
            "it drafts: correct its config.json."
        )
    if tied:
        found = _once(found, heads)
    output, reads = found.get("head.0.weight"), found.get("proj.0.weight")
    if output is None or reads is None:
        missing = "head.0.weight" if output is None else "proj.0.weight"
        raise ArtifactError(f"{missing} is missing; download it again.")
    known = {"heads": heads, "tied": tied, "cell": "lstm" if lstm else "mlp", "output": "own"}
    known |= {"scale_input": bool(config.get("scale_input")), "inner_dim": output.shape[1]}
    return known | {"hidden_size": reads.shape[1], "vocab_size": output.shape[0]}, found


def _numbers(found: dict[str, Tensor], kind: str) -> list[int]:
    """The stages that a kind of weights is there for, ascending."""
    parts = (_PART.fullmatch(name) for name in found)
    return sorted({int(part[2]) for part in parts if part and part[1] == kind})


def _one_layer(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of stages of one layer, by their names without Arctic's second number."""
    named: dict[str, Tensor] = {}
    for name, tensor in found.items():
        part = _PART.fullmatch(name)
        if part and part[3] not in ("", "0."):
            raise ArtifactError(
                f"its stages have several layers, such as {name}; expected one embedding, "
                "projection and norm a stage, as those of one width have."
            )
        named[f"{part[1]}.{part[2]}.{part[4]}" if part else name] = tensor
    return named


def _one_projection(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an LSTM by the names here, with one projection for all gates."""
    found = dict(found)
    emb = found.pop("forget_emb.0.weight")
    for gate in _GATES[1:]:
        other = found.pop(f"{gate}_emb.0.weight", emb)
        if other.shape != emb.shape or not torch.equal(other, emb):
            raise ArtifactError(
                f"its {gate} gate has embeddings of its own (tie_lstm_embs false); expected one "
                "embedding for all gates."
            )
    found["emb.0.weight"] = emb
    for number in range(2):
        gates = [found.pop(f"{gate}_proj.{number}.weight", None) for gate in _GATES]
        there = [gate for gate in gates if gate is not None]
        if len(there) == len(_GATES):
            found[f"proj.{number}.weight"] = torch.cat(there)  # [4 N, D or N]
    for part in ("weight", "bias"):
        if (tensor := found.pop(f"cell_ln.0.{part}", None)) is not None:
            found[f"ln.0.{part}"] = tensor
    return found


def _once(found: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The tensors of stages that share them, each once; the first projection is apart."""
    once: dict[str, Tensor] = {}
    for name in sorted(found):
        part = _PART.fullmatch(name)
        if part is None:
            once[name] = found[name]
            continue
        number = min(int(part[2]), 1) if part[1] == "proj" else 0
        if number >= heads:  # a projection that no stage reads
            continue
        kept = once.setdefault(f"{part[1]}.{number}.{part[4]}", found[name])
        if kept.shape != found[name].shape or not torch.equal(kept, found[name]):
            raise ArtifactError(
                f"its config sets tie_weights, and {name} is not what other stages have; download "
                "both again, or correct its config.json."
            )
    return once


def _write(drafter: Any, form: str) -> Checkpoint:
    """A drafter for its authors' code, or for vLLM with the plugin Arctic Inference."""
    own = drafter.config
    refuse_trimmed(drafter, form, "train it with drafter.output=own")
    lstm, found = own.cell == "lstm", dict(drafter.state_dict())
    if lstm and own.heads == 1:
        raise cannot_be_written(
            form, "its one stage has no second projection", "train it with drafter.heads=2 or more"
        )
    kind = "ArcticLSTM" if lstm else "ArcticMLP" if form == "vllm" else "MLP"
    config: dict[str, Any] = {
        "model_type": _TYPE, "architectures": [f"{kind}SpeculatorPreTrainedModel"],
        "emb_dim": own.hidden_size, "inner_dim": own.width,
        "vocab_size": own.vocab_size, "n_predict": own.heads,
        "tie_weights": own.tied and own.heads > 1, "scale_input": own.scale_input,
        "top_k_tokens_per_head": [1] * own.heads, "n_candidates": 1,
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
    }  # fmt: skip
    target = drafter.target
    config["base_model_name_or_path"] = target.name_or_path
    if form == "vllm":
        config["base_model_archs"] = list(target.config.architectures or [type(target).__name__])
    if not lstm:
        return Checkpoint(config, {_PREFIX + name: tensor for name, tensor in found.items()})
    widths = dict.fromkeys(("emb_dim", "inner_dim", "proj_dim"), str(own.width))
    config |= {"method": "sum_lstm", "tie_lstm_embs": True, "input_hidden_dim": own.hidden_size}
    return Checkpoint(config | widths, _arctic_names(found))


def _arctic_names(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """An LSTM's tensors by Arctic's names, all of which its readers ask for."""
    tensors = {"head.0.weight": found["head.0.weight"]}
    for number in range(2):
        gates = found[f"proj.{number}.weight"].chunk(len(_GATES))
        for gate, weight in zip(_GATES, gates, strict=True):
            tensors[f"{gate}_proj.{number}.weight"] = weight
    for gate in _GATES:
        tensors[f"{gate}_emb.0.weight"] = found["emb.0.weight"]
    for part in ("weight", "bias"):
        tensors[f"cell_ln.0.{part}"] = found[f"ln.0.{part}"]
        tensors[f"state_ln.0.{part}"] = found[f"state_ln.0.{part}"]
    return tensors


MLP_SPECULATOR = {form: partial(_write, form=form) for form in ("vllm", "original")}
"""What writes a drafter in each format."""
