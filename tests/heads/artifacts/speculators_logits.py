"""Run by an interpreter that has speculators: logits of exported heads, and heads of its own.

It takes its work from standard input, a JSON list a line of a family (`eagle`, `eagle3`, `peagle`,
`dflash`, `dspark` or `mtp`) and a FOLDER, and writes a line when it is done: empty, or what failed.

Of each folder FOLDER/read/NAME, the head in `out` gets the features and tokens of `in.pt`, as T
pairs; the logits [N, Vd] are written to `logits.pt`, and [2, N] to `places.pt`: the pair at which
each begins, and how many tokens after its first draft it is, which is 0 but for P-EAGLE and blocks.
For each
config FOLDER/write/NAME.json, of the fields of the library's own config class, a head with random
weights is saved in FOLDER/write/NAME, with what `read` has beside it.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

DEPTHS = 3  # that P-EAGLE drafts
BLOCKS = ("dflash", "dspark")


def logits_of(
    family: str, model: Any, features: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What its output layer gives for T pairs, [N, Vd], and where, [2, N]."""
    if family in BLOCKS:
        return logits_of_blocks(family, model, features, tokens)
    found: list[torch.Tensor] = []
    places = torch.stack([torch.arange(tokens.shape[1]), torch.zeros(tokens.shape[1]).long()])
    hook = model.lm_head.register_forward_hook(lambda module, args, output: found.append(output))
    if family == "peagle":
        from speculators.losses import (  # type: ignore[import-not-found]
            resolve_loss_config,
        )
        from speculators.models.peagle import core  # type: ignore[import-not-found]

        drawn, draw = [], core.generate_cod_sample_indices

        def noted(*args: Any, **how: Any) -> Any:
            drawn.append(draw(*args, **how))
            return drawn[-1]

        core.generate_cod_sample_indices = noted  # what it draws is random
        size, last = model.config.transformer_layer_config.hidden_size, features.shape[:2]
        model(
            features, tokens, torch.zeros_like(tokens), num_depths=DEPTHS, down_sample_ratio=1.0,
            verifier_last_hidden_states=torch.zeros(*last, size),
            loss_config=resolve_loss_config("kl_div", "eager"),
        )  # fmt: skip
        core.generate_cod_sample_indices = draw
        places = torch.stack(drawn[0])
    elif family == "eagle3":
        model(features, tokens, torch.zeros_like(tokens), ttt_steps=1)
    elif family == "mtp":
        # Token t is fed with feature t here, and is the one after it there. What follows a first
        # draft sees other states than when it is decoded, and is left out.
        model(torch.cat([tokens[:, :1], tokens[:, :-1]], 1), features)
        places = places[:, : found[0].shape[1]]
    else:
        # Its layer is used outside of a model, which would choose.
        model.config.transformer_layer_config._attn_implementation = "eager"
        model(tokens, features, attention_mask=torch.ones_like(tokens), return_dict=False)
    hook.remove()
    return found[0].flatten(0, -2), places


def logits_of_blocks(
    family: str, model: Any, features: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of all blocks that a text has room for; what a block begins with is its anchor."""
    core: Any = importlib.import_module(f"speculators.models.{family}.core")
    blocks: Any = importlib.import_module("speculators.models.dflash.core")
    compare, select, found, anchors = core.compute_metrics, blocks.select_anchors, [], []

    def compared(logits: torch.Tensor, *args: Any, **how: Any) -> Any:
        found.append(logits)
        return torch.zeros(()), {}

    def selected(*args: Any) -> Any:
        anchors.append(select(*args))
        return anchors[-1]

    core.compute_metrics, blocks.select_anchors = compared, selected
    length, block = tokens.shape[1], model.block_size
    # Token t is fed with feature t here, and is the one after it there.
    fed = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    with torch.no_grad():
        model(
            features, fed, torch.ones_like(tokens), features[..., : model.hidden_size],
            torch.zeros_like(tokens), max_anchors=length - block,
        )  # fmt: skip
    core.compute_metrics, blocks.select_anchors = compare, select
    at, places = anchors[0][0], torch.arange(block)
    places = torch.stack(torch.broadcast_tensors(at.unsqueeze(1) - 1, places))  # [2, A, W]
    skipped = 0 if model.config.sample_from_anchor else 1
    places[1] -= skipped
    logits = found[0].unflatten(1, (-1, block))[0]
    return logits[:, skipped:].flatten(0, 1), places[:, :, skipped:].flatten(1)


def loaded(cls: Any, folder: Path, family: str) -> Any:
    """A saved head, with its target where it needs one to run."""
    if family != "eagle":
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
            PEagleDraftModel,
            PEagleSpeculatorConfig,
        )

        if family == "mtp":
            from speculators.models import mtp  # type: ignore[import-not-found]

            model = mtp.MTPDraftModel(mtp.MTPSpeculatorConfig(**config))
        elif family in BLOCKS:
            kind = "DFlash" if family == "dflash" else "DSpark"
            package: Any = importlib.import_module(f"speculators.models.{family}")
            made = getattr(package, f"{kind}SpeculatorConfig")(**config)
            made.transformer_layer_config._attn_implementation = "eager"
            model = getattr(package, f"{kind}DraftModel")(made)
        elif family == "peagle":
            model = PEagleDraftModel(PEagleSpeculatorConfig(**config))
        else:
            model = Eagle3DraftModel(Eagle3SpeculatorConfig(**config))
        vocabulary = model.verifier_vocab_size
        kept = config.get("draft_vocab_size", vocabulary)
        if kept != vocabulary:
            ids = torch.randperm(vocabulary)[:kept].sort().values
            model.load_vocab_mappings(
                torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True),
                ids - torch.arange(kept),
            )
        model.load_verifier_weights()
    for name, parameter in model.named_parameters():
        if ("norm" in name or family in BLOCKS) and parameter.requires_grad:
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
        save(case, *logits_of(family, model, **given))
    for path in sorted((folder / "write").glob("*.json")):
        model, case = own_head(family, json.loads(path.read_text())), path.with_suffix("")
        model.save_pretrained(case / "out")
        inner = model.config.transformer_layer_config
        layers = 1 if family in ("eagle", "mtp") else 3
        if family in BLOCKS:
            layers = len(model.target_layer_ids)
        given = {
            "features": torch.randn(1, 9, layers * inner.hidden_size),
            "tokens": torch.randint(inner.vocab_size, (1, 9)),
        }
        torch.save(given, case / "in.pt")
        save(case, *logits_of(family, model, **given))


def save(case: Path, logits: torch.Tensor, places: torch.Tensor) -> None:
    torch.save(logits, case / "logits.pt")
    torch.save(places, case / "places.pt")


said, sys.stdout = sys.stdout, sys.stderr  # where the library prints
for line in sys.stdin:
    try:
        family, folder = json.loads(line)
        main(family, Path(folder))
        failure = ""
    except Exception:
        failure = json.dumps(traceback.format_exc()[-3000:])
    print(failure, file=said, flush=True)
