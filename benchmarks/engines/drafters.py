"""The drafters that are tried: each family, and the variants that an engine runs."""

from __future__ import annotations

from typing import NamedTuple

_LAYERS = "drafter.feature_layers=[1,3,5]"  # sorted, without repetition, as the engines ask


class Tried(NamedTuple):
    """One drafter: the recipe that trains it, with settings, and whether for the hybrid target."""

    recipe: str
    settings: tuple[str, ...] = ()
    hybrid: bool = False


def _eagle3(*settings: str) -> Tried:
    return Tried("eagle3", (_LAYERS, *settings))


def _dflash(*settings: str) -> Tried:
    return Tried("dflash", (_LAYERS, *settings))


DRAFTERS: dict[str, Tried] = {
    "medusa": Tried("quickstart"),
    "eagle": Tried("eagle", ("drafter.bias=false",)),
    "draft_model": Tried("draft-model"),
    "pard": Tried("pard"),
    "eagle3": _eagle3(),
    "eagle3-two-features": Tried("eagle3", ("drafter.feature_layers=[2,5]",)),
    "eagle3-trimmed": _eagle3("drafter.output=trimmed", "drafter.draft_vocab_size=512"),
    "eagle3-norm-before-residual": _eagle3("drafter.norm_before_residual=true"),
    "eagle3-norm-before-fc": _eagle3("drafter.norm_before_fc=true"),
    "eagle3.1": _eagle3("drafter.fc_norm=true", "drafter.norm_output=true"),
    "eagle3-two-layers": _eagle3("drafter.layers=2"),
    "eagle3-share-of-heads": _eagle3("drafter.partial_rotary_factor=0.5"),
    "p-eagle": _eagle3("drafter.mask_token_id=1023", "drafter.depths=4"),
    "dflash": _dflash(),
    "dflash-trimmed": _dflash("drafter.output=trimmed", "drafter.draft_vocab_size=512"),
    "dflash-window": _dflash("drafter.layers=2", "drafter.window=32"),
    "dflash-window-both-ways": _dflash(
        "drafter.layers=2", "drafter.window=32", "drafter.causal_windows=false"
    ),
    "dflash-share-of-heads": _dflash("drafter.partial_rotary_factor=0.5"),
    "jetspec": _dflash("drafter.causal=true"),
    "dspark": _dflash("drafter.markov_rank=32", "drafter.sample_from_anchor=true"),
    "dspark-from-mask": _dflash("drafter.markov_rank=32"),
    "dflash2": _dflash("drafter.selector_rank=32", "drafter.conv_kernel_size=3"),
    "mtp": Tried("mtp", hybrid=True),
}
