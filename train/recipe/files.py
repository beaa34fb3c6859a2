"""Recipe files: YAML, what one is based on, and recipes composed of shipped parts.

A part is a file in a sub-folder of the shipped recipes: one of `families`, `models` or `hardware`.
Parts are joined by name, `medusa+llama-3.1-8b+1x80gb`, and later ones override earlier ones. Beside
sections of a recipe a part may have

    with:    by the name of another part (or of several, joined by +), sections that apply only in
             a recipe that has it; they override all parts
    architecture, students:  of a model, see `architectures`

Every mistake is one line that opens with the key's full path.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .fields import RecipeError, nearest

KINDS = ("families", "models", "hardware")
"""The folders of parts, in the order in which a recipe's name has them."""

_MOST_ALIASES, _MOST_BYTES = 20, 2**20

_OWN = ("with", "architecture", "students")  # keys of parts that no recipe has


@dataclass(frozen=True)
class Part:
    """A shipped part of recipes."""

    name: str
    kind: str  # its folder, of KINDS
    path: Path


def shipped_recipes() -> dict[str, Path]:
    """The whole recipes that come with the package: name to path."""
    return {path.stem: path for path in sorted(_folder().glob("*.yaml"), key=lambda p: p.stem)}


@cache
def shipped_parts() -> dict[str, Part]:
    """The parts that come with the package, by name: families, then models, then hardware."""
    files = ((kind, path) for kind in KINDS for path in sorted((_folder() / kind).glob("*.yaml")))
    return {path.stem: Part(path.stem, kind, path) for kind, path in files}


def own_settings(family: str) -> dict[str, Any]:
    """What the part of a family sets in `train`; nothing where there is no such part."""
    part = shipped_parts().get(family.replace("_", "-"))
    return {} if part is None else _load(part.path).get("train", {})


def shipped_combinations() -> list[str]:
    """The names of all recipes of a family, a model and a hardware profile."""
    kinds = ([p.name for p in shipped_parts().values() if p.kind == kind] for kind in KINDS)
    return ["+".join(names) for names in itertools.product(*kinds)]


def architectures() -> dict[str, dict[str, Any]]:
    """The published sizes of the models that parts name, as a `config.json` has them, by name.

    They make it possible to compute with a model, and to build it empty, without a network.
    """
    known: dict[str, dict[str, Any]] = {}
    for part in shipped_parts().values():
        data = _part(part.name)
        if "architecture" in data:
            known[data["target"]["model"]] = data["architecture"]
        known |= data.get("students", {})
    return known


def first_line(path: Path) -> str:
    """What a recipe or part says of itself: its first line, without the name.

    >>> first_line(shipped_recipes()["quickstart"])
    'everything from nothing, on two CPU cores, in a few minutes'
    """
    with open(path, encoding="utf-8") as lines:
        return next(lines).partition(": ")[2].strip()


def read_recipe(name_or_path: str) -> dict[str, Any]:
    """The keys of a recipe: a path, a shipped name, or names of parts joined by +."""
    if "+" in name_or_path and not Path(name_or_path).is_file():
        names = name_or_path.split("+")
        called = (Path(each).stem if each.endswith((".yaml", ".yml")) else each for each in names)
        return _compose(names, ()) | {"name": "+".join(called)}
    return _read(_find(name_or_path))


def family_keys(name: str) -> dict[str, Any]:
    """The keys of the shipped part of a drafter family, with those that it is based on."""
    return _compose([name.replace("_", "-")], ())


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the single keys of its sections that `above` gives.

    A drafter section that names its family stands for itself: its keys belong to that family.

    >>> merge({"train": {"batch_size": 2, "clip": 1}, "seed": 0}, {"train": {"clip": 0.5}})
    {'train': {'batch_size': 2, 'clip': 0.5}, 'seed': 0}
    """
    whole = dict(below)
    for key, value in above.items():
        sections = isinstance(value, dict) and isinstance(whole.get(key), dict)
        alone = key == "drafter" and isinstance(value, dict) and "family" in value
        whole[key] = {**whole[key], **value} if sections and not alone else value
    return whole


def _folder() -> Path:
    from headstart import recipes

    return Path(next(iter(recipes.__path__)))


def _find(name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    shipped, parts = shipped_recipes(), shipped_parts()
    if name in shipped:
        return shipped[name]
    if name in parts:
        example = next(whole for whole in shipped_combinations() if name in whole.split("+"))
        raise RecipeError(
            f"{name!r} is a part of recipes; join it with others by +, e.g. {example}; parts: "
            f"{', '.join(parts)}"
        )
    if "=" in name:
        raise RecipeError(
            f"{name!r} is a setting, and stands where the recipe is expected; name that first, "
            f"e.g. own-model {name}"
        )
    if Path(name).is_dir():
        raise RecipeError(
            f"{name!r} is a folder; expected a recipe: a YAML file, or what `headstart recipes` "
            "lists. To continue a run, give the recipe and the settings that it was started with"
        )
    raise RecipeError(
        f"no recipe {name!r}: neither a file nor a shipped recipe"
        f"{nearest(name, [*shipped, *parts])}; give a path, or what `headstart "
        "recipes` lists: a recipe, or parts joined by +"
    )


def _compose(names: Sequence[str], above: tuple[Path, ...], beside: Path | None = None) -> dict:
    """The keys of several parts or recipes, each overriding those before it.

    Args:
        above: the files that these are the base of.
        beside: the folder of the file whose `base` lists them.
    """
    parts, whole, seen = shipped_parts(), {}, ""
    for name in names:
        if name in parts:
            if parts[name].kind == "families" and seen:
                raise RecipeError(
                    f"{'+'.join(names)}: the family {name} stands after {seen}, whose settings it "
                    "would override; write the family first"
                )
            whole, seen = merge(whole, _part(name, above)), name
        elif beside is not None and (beside / name).is_file():
            whole, seen = merge(whole, _read(beside / name, above)), name
        elif Path(name).is_file() or name in shipped_recipes():
            whole, seen = merge(whole, _read(_find(name), above)), name
        else:
            known = [*parts, *shipped_recipes()]
            raise RecipeError(
                f"{'+'.join(names)}: no part {name!r}{nearest(name, known)}; parts: "
                f"{', '.join(parts)}"
            )
    for name in filter(parts.__contains__, names):
        for others, changes in _part(name).get("with", {}).items():
            if set(others.split("+")) <= {*names}:
                whole = merge(whole, changes)
    return {key: value for key, value in whole.items() if key not in _OWN}


def _part(name: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A part's keys, those of its base included."""
    path = shipped_parts()[name].path
    if path.resolve() in above:
        raise RecipeError(f"base: {name!r} is based on itself; expected another recipe")
    return copy.deepcopy(_shipped(path))


@cache
def _shipped(path: Path) -> dict[str, Any]:
    return _read(path, whole=False)


def _read(path: Path, above: tuple[Path, ...] = (), whole: bool = True) -> dict[str, Any]:
    """A file's keys, those of its base included.

    Args:
        above: the files that it is the base of.
        whole: it is a recipe, and no part of one.
    """
    data = dict(_load(path))
    if "base" not in data:
        return data
    base = data.pop("base")
    listed = isinstance(base, list) and bool(base) and all(isinstance(each, str) for each in base)
    if not listed and not isinstance(base, str):
        raise RecipeError(
            f"base: found {kind_of(base)}, expected a recipe's name or path, or a list of them"
        )
    if whole and "name" not in data:
        raise RecipeError("name: missing; a recipe with a base must give its own")
    above = (*above, path.resolve())
    beside = path.parent / str(base)
    if not isinstance(base, str) or ("+" in base and not beside.is_file()):
        names = base.split("+") if isinstance(base, str) else base
        return merge(_compose(names, above, path.parent), data)
    found = beside if beside.is_file() else _find(base)
    if found.resolve() in above:
        raise RecipeError(f"base: {base!r} is based on {path.name} itself; expected another recipe")
    return merge(_read(found, above), data)


def _load(path: Path) -> dict[str, Any]:
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise RecipeError(f"{path}: found {size:,} bytes, expected a recipe of at most 1 MiB")
    data = read_yaml(path.read_bytes(), str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: found {kind_of(data)}, expected a mapping of recipe keys")
    return data


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `8e-3` is a number, and a key given twice is an error."""

    aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > _MOST_ALIASES:  # few of them can stand for billions of values
                raise RecipeError(f"found more than {_MOST_ALIASES} aliases (*name); write it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if node.flow_style and ":" in key.value and value.start_mark == value.end_mark:
                name, _, said = key.value.partition(":")
                raise RecipeError(
                    f"{key.value!r} is a name without a value; write a space behind the colon: "
                    f"{{{name}: {said}}}"
                )
            if key.value in seen:
                raise RecipeError(f"{key.value}: given twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot and a signed exponent, and reads 8e-3 and 1.5e3 as strings.
_SCIENTIFIC = re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))
# A date is a string, as the schema has it, with or without quotes.
for _first, _resolvers in _Loader.yaml_implicit_resolvers.items():
    _kept = [pair for pair in _resolvers if pair[0] != "tag:yaml.org,2002:timestamp"]
    _Loader.yaml_implicit_resolvers[_first] = _kept


def read_yaml(text: str | bytes, where: str) -> Any:
    """The value that a YAML text stands for. Raises RecipeError, which names `where`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, TypeError) as error:  # TypeError: a key that is a list
        one_line = " ".join(str(error).split()).replace('in "<byte string>", ', "in ")
        raise RecipeError(f"{where}: not valid YAML: {one_line}") from error


def kind_of(value: Any) -> str:
    """A value found in a recipe, in words: `the string '3'`, `a mapping`, `null`."""
    if value is None or isinstance(value, dict):
        return "null" if value is None else "a mapping"
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return f"the {names.get(type(value), type(value).__name__)} {shown}"
