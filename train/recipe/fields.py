"""The fields of a recipe's sections: numbers in ranges, choices, and what else is checked alone."""

import datetime
import difflib
import functools
import re
from collections.abc import Iterable
from math import inf, isfinite
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub.dataclasses import as_validated_field, validated_field

from headstart.infer.rules.registry import RULES
from headstart.infer.trees.paths import RankPaths
from headstart.infer.trees.texts import read_tree, sparse_nodes

from ..losses import LOSSES

COLUMNS = (  # that rows may have, for `columns`
    "messages", "conversations", "tools", "system", "prompt", "completion", "response",
    "instruction", "input", "output", "question", "answer", "text",
)  # fmt: skip

TRACKERS = ("tensorboard", "wandb", "trackio")
"""What `train.report_to` may name, which are also the packages."""


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key's path and what was expected."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the known name that is closest to `name`, or nothing.

    >>> nearest("learning_rat", ["learning_rate"]), nearest("lr", ["loss", "learning_rate"])
    (" (did you mean 'learning_rate'?)", " (did you mean 'learning_rate'?)")
    >>> nearest("temp", ["seed", "temperature"]), nearest("version", ["train", "generate"])
    (" (did you mean 'temperature'?)", '')
    """
    names = list(known)
    close = [each for each in names if "_" in each and name == _initials(each)]
    close = close or difflib.get_close_matches(name, names, n=1)
    close = close or [each for each in names if name and each.startswith(name)]
    return f" (did you mean {close[0]!r}?)" if close else ""


def _initials(name: str) -> str:
    return "".join(part[:1] for part in name.split("_"))


def number(
    default: Any, gt: float = -inf, ge: float = -inf, lt: float = inf, le: float = inf
) -> Any:
    """The field of a finite number that is greater than `gt`, at least `ge`, and so on."""
    bounds = {"greater than": gt, "at least": ge, "less than": lt, "at most": le}
    expected = " and ".join(f"{words} {n}" for words, n in bounds.items() if isfinite(n))

    def check(value: float | None) -> None:  # whether null is a value is said by the type
        if value is not None and not (gt < value < lt and ge <= value <= le):
            raise ValueError(f"found {value!r}, expected a finite number {expected}")

    return validated_field(check, default=default)


positive = functools.partial(number, gt=0)


def one_of(*choices: str) -> Any:
    """The field of a string that is one of `choices`, by default the first."""

    def check(value: str) -> None:
        if value not in choices:
            near = nearest(value, choices)
            raise ValueError(f"found {value!r}{near}; expected one of {', '.join(choices)}")

    return validated_field(check, default=choices[0])


def check_sampling(rule: str, **settings: float | None) -> None:
    """Raise RecipeError where `decode` has settings of sampling and a rule that does not sample."""
    given = [name for name, value in settings.items() if value is not None]
    if given and not RULES[rule].samples:
        values = ", ".join(f"decode.{name} {settings[name]}" for name in given)
        remove = " ".join(f"decode.{name}=null" for name in given)
        raise RecipeError(
            f"decode.rule: found {rule}, which does not sample, and {values}; set "
            f"decode.rule=coupled to validate by sampling, or {remove}"
        )


@as_validated_field
def tree_field(tree: str | list[Any]) -> None:
    for place, path in enumerate(tree if isinstance(tree, list) else []):
        if not isinstance(path, list) or any(type(index) is not int for index in path):
            raise ValueError(f"path {place} is {path!r}, expected a list of integers")
    if not isinstance(tree, str) or tree.endswith(".json") or sparse_nodes(tree):
        return
    if not isinstance(read_tree(tree), RankPaths):
        raise ValueError(
            f"found {tree}, which is no tree of one fixed shape; expected plain, chain:K, "
            "cartesian:A,B,…, sparse:N or rank paths (other trees are for decoding: --tree)"
        )


_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # of transformers' device maps
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|mlu|musa|sdaa|xla)(:\d+)?")


@as_validated_field
def device_map_field(places: str | dict[str, Any] | None) -> None:
    if isinstance(places, str) and places not in _SPREAD and not _DEVICE.fullmatch(places):
        raise ValueError(
            f"found {places!r}{nearest(places, _SPREAD)}; expected {', '.join(_SPREAD)}, a device "
            "such as cuda:0, or devices by the names of modules"
        )
    for name, place in (places if isinstance(places, dict) else {}).items():
        named = isinstance(place, str) and (place == "disk" or _DEVICE.fullmatch(place))
        if not named and not (type(place) is int and place >= 0):
            raise ValueError(
                f"found {place!r} for {name or 'all'}, expected a device such as cuda:0, the "
                "number of a GPU, cpu, or disk"
            )


@as_validated_field
def plan_field(plan: str | dict[str, Any] | None) -> None:
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(f"found {plan!r}, expected auto, or styles by the names of modules")
    for name, style in (plan if isinstance(plan, dict) else {}).items():
        if not isinstance(style, str):
            raise ValueError(f"found {style!r} for {name}, expected a style such as colwise")


@as_validated_field
def trackers_field(names: list[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"found {name!r}{nearest(name, TRACKERS)}; expected some of {', '.join(TRACKERS)}"
            )


@as_validated_field
def loss_field(loss: str | dict[Any, Any]) -> None:
    for name in [loss] if isinstance(loss, str) else loss:
        if name not in LOSSES:
            near = nearest(str(name), LOSSES)
            raise ValueError(f"found {name!r}{near}; expected one of {', '.join(LOSSES)}")
    if isinstance(loss, str):
        return
    for name, weight in loss.items():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not 0 < weight < inf:
            raise ValueError(
                f"found {weight!r} for {name}, expected a weight, a finite number greater than 0"
            )
    if all(LOSSES[name].divergence is None for name in loss):
        found = "cross_entropy alone" if loss else "no loss"
        raise ValueError(f"found weights of {found}; expected a name, or weights of several losses")


@as_validated_field
def columns_field(columns: dict[str, str] | None) -> None:
    for ours in columns or {}:
        if ours not in COLUMNS:
            near = nearest(ours, COLUMNS)
            raise ValueError(f"found {ours!r}{near}; expected names out of {', '.join(COLUMNS)}")


@as_validated_field
def date_field(date: str) -> None:
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        raise ValueError(f"found {date!r}, expected a date such as '2024-07-26'") from None


@as_validated_field
def url_field(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an address such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query:
        raise ValueError("it holds a secret or a query; name the key's variable in api_key_env")
