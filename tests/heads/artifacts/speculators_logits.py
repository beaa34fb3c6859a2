"""Run by an interpreter that has speculators: logits of exported heads, and heads of its own.

    speculators_logits.py eagle|eagle3 FOLDER

Of each folder FOLDER/read/NAME, the head in `out` gets the features and tokens of `in.pt`, as T
pairs; the logits [T, Vd] are written to `logits.pt`. For each config FOLDER/write/NAME.json, of the
fields of the library's own config class, a head with random weights is saved in FOLDER/write/NAME,
with what `read` has beside it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def logits_of(
    family: str, model: Any, features: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """What its output layer gives for T pairs, [T, Vd]."""
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: found.append(output))
    if family == "eagle3":
        model(features, tokens, torch.zeros_like(tokens), ttt_steps=1)
    else:
        # Its layer is used outside of a model, which would choose.
        model.config.transformer_layer_config._attn_implementation = "eager"
        model(tokens, features, attention_mask=torch.ones_like(tokens), return_dict=False)
    hook.remove()
    return found[0].flatten(0, -2)


def loaded(cls: Any, folder: Path, family: str) -> Any:
    """A saved head, with its target where it needs one to run."""
    if family == "eagle3":
        return cls.from_pretrained(folder).eval()
    # While a model is loaded its target would be made without memory.
    return attached(cls.from_pretrained(folder, verifier_attachment_mode="detached").eval())


def attached(model: Any) -> Any:
    """An EAGLE-1 head with the target that its config names."""
    model.attach_verifier(model.config.speculators_config.verifier.name_or_path)
    return model


def own_head(family: str, config: dict[str, Any]) -> Any:
    """A head of the library's own with random weights."""
    torch.manual_seed(0)
    if family == "eagle":
        from speculators.models.eagle import (  # type: ignore[import-not-found]
            EagleSpeculator,
            EagleSpeculatorConfig,
        )

        model = EagleSpeculator(
            EagleSpeculatorConfig(**config), verifier_attachment_mode="detached"
        )
    else:
        from speculators.models import (  # type: ignore[import-not-found]
            Eagle3DraftModel,
            Eagle3SpeculatorConfig,
        )

        model = Eagle3DraftModel(Eagle3SpeculatorConfig(**config))
        kept, vocabulary = config["draft_vocab_size"], model.verifier_vocab_size
        if kept != vocabulary:
            ids = torch.randperm(vocabulary)[:kept].sort().values
            model.load_vocab_mappings(
                torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True),
                ids - torch.arange(kept),
            )
        model.load_verifier_weights()
    for name, parameter in model.named_parameters():
        if "norm" in name and "verifier" not in name:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return attached(model.eval()) if family == "eagle" else model.eval()


@torch.no_grad()
def main(family: str, folder: Path) -> None:
    if family == "eagle":
        from speculators.models.eagle import EagleSpeculator as Model  # type: ignore
    else:
        from speculators import SpeculatorModel as Model  # type: ignore
    for case in sorted((folder / "read").iterdir()):
        given = torch.load(case / "in.pt")
        model = loaded(Model, case / "out", family)
        torch.save(logits_of(family, model, **given), case / "logits.pt")
    for path in sorted((folder / "write").glob("*.json")):
        model, case = own_head(family, json.loads(path.read_text())), path.with_suffix("")
        model.save_pretrained(case / "out")
        inner = model.config.transformer_layer_config
        layers = 1 if family == "eagle" else 3
        given = {
            "features": torch.randn(1, 9, layers * inner.hidden_size),
            "tokens": torch.randint(inner.vocab_size, (1, 9)),
        }
        torch.save(given, case / "in.pt")
        torch.save(logits_of(family, model, **given), case / "logits.pt")


main(sys.argv[1], Path(sys.argv[2]))
