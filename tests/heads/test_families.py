"""The records of the families, and what their classes declare."""

from typing import Any

import pytest
from torch import nn

from headstart.heads import FAMILIES, Drafter, OptionError, TrainableDrafter, family
from headstart.heads.families import with_article
from tests.support.families import drafter
from tests.support.tiny import one_line, tiny


@pytest.mark.parametrize("name", FAMILIES)
def test_a_record_fits_its_class(name: str) -> None:
    kind: Any = family(name)
    assert FAMILIES[name].name == name == kind.config_class.family_name()
    assert set(FAMILIES[name].large) <= set(kind.config_class.OPTIONS)
    kind.config_class.for_target(tiny("llama"), **FAMILIES[name].small)
    assert issubclass(kind, TrainableDrafter) == kind.trainable
    assert kind.collects == kind.config_class.collects
    assert kind.learns() == (kind.trainable or kind.collects) == (not kind.weightless)


@pytest.mark.parametrize("name", FAMILIES)
def test_linear_layers_are_torchs_own(name: str) -> None:
    """No others run by the kernels of a CPU, or packed."""
    for part in drafter(name, "tiny").modules():
        assert not isinstance(part, nn.Linear) or type(part) is nn.Linear


def test_what_is_particular_is_declared() -> None:
    def those(fact: str) -> set[str]:
        return {name for name in FAMILIES if getattr(family(name), fact)}

    assert those("weightless") == {"lookup", "recycling", "suffix"}
    assert those("observes") == {"recycling"}
    assert those("remembers") == {"suffix"}
    assert those("collects") == {"retrieval"}
    assert those("in_target") == {"mtp", "early_exit"}
    assert those("after_name") == {"early_exit"}
    language_models = {"draft_model", "pard"}
    assert those("saved_as_language_model") == those("writes_text") == language_models
    assert those("independent") == {"medusa", "medusa2", "pard"}
    assert not issubclass(Drafter, TrainableDrafter)


def test_families_have_an_article() -> None:
    found = {with_article(name).split()[0] for name in ("eagle", "eagle3", "mtp", "mlp_speculator")}
    others = {with_article(name).split()[0] for name in ("medusa", "dflash", "redrafter", "hydra")}
    assert (found, others) == ({"an"}, {"a"})


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("dflash", {"selector_top_k": 4}, {"selector_rank": 2}),
        ("dflash", {"conv_group_size": 8}, {"conv_kernel_size": 2}),
        ("dflash", {"causal_windows": False}, {"window": 4}),
        ("eagle3", {"kept": 0.5}, {"mask_token_id": 0}),
        ("pard", {"feature_scale": 0.5, "feature_layers": []}, {"feature_layers": [1]}),
        ("pard", {"feature_dropout": 0.5}, {"feature_layers": [1]}),
    ],
)
def test_an_option_without_effect_is_refused(
    name: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    make: Any = family(name).config_class
    (option, *_), (other, *_) = options, more
    small = dict(FAMILIES[name].small) | {"layers": 2}
    with pytest.raises(OptionError, match=rf"{option} is .* without drafter.{other}") as caught:
        make.for_target(tiny("llama"), **small, **options)
    one_line(caught.value)
    make.for_target(tiny("llama"), **small | options | more)
    make.for_target(tiny("llama"), **small | {option: getattr(make, option)})


def test_an_unknown_family_is_one_line() -> None:
    with pytest.raises(OptionError, match=r"'medsua'; expected one of: .*medusa") as caught:
        family("medsua")
    one_line(caught.value)
