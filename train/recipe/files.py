"""Reads recipe files: YAML, with a base recipe below and `a.b=value` overrides on top."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from .build import kind, parse_recipe
from .fields import RecipeError, nearest
from .schema import Recipe


def load_recipe(name_or_path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name, and apply `a.b=value` overrides.

    Override values are read as YAML, so `train.max_seconds=null` and
    `decode.tree=[[0],[0,0],[1]]` work. A recipe whose `base` is another recipe, a shipped name or a
    path beside it, has the base's sections and changes single keys of them; its `drafter` section,
    whose keys belong to a family, stands for itself. Raises RecipeError.
    """
    data = _read(_find(name_or_path))
    for override in overrides:
        _override(data, override)
    return parse_recipe(data)


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package: name to path."""
    from headstart import recipes

    (folder,) = recipes.__path__
    return {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))}


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe file's keys, those of its base included."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid YAML: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: found {kind(data)}, expected a mapping of recipe keys")
    if "base" not in data:
        return data
    base = data.pop("base")
    if not isinstance(base, str):
        raise RecipeError(f"base: found {kind(base)}, expected a recipe's name or path")
    if "name" not in data:
        raise RecipeError("name: missing; a recipe with a base must give its own")
    beside = path.parent / base
    found = beside if beside.is_file() else _find(base)
    above = (*above, path.resolve())
    if found.resolve() in above:
        raise RecipeError(f"base: {base!r} is based on {path.name} itself; expected another recipe")
    whole = _read(found, above)
    for key, value in data.items():
        sections = isinstance(value, dict) and isinstance(whole.get(key), dict)
        whole[key] = {**whole[key], **value} if sections and key != "drafter" else value
    return whole


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    raise RecipeError(
        f"no recipe {str(name_or_path)!r}: neither a file nor a shipped recipe"
        f"{nearest(str(name_or_path), shipped)}; shipped: {', '.join(shipped) or 'none'}"
    )


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `8e-3` is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise RecipeError(f"{key.value}: given twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot and a signed exponent, and reads 8e-3 and 1.5e3 as strings.
_SCIENTIFIC = re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))


def _override(data: dict[str, Any], override: str) -> None:
    """Apply `a.b=value` in place; sections that are absent or null are made."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise RecipeError(f"override {override!r}: expected key=value, e.g. train.max_steps=100")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: not valid YAML: {_one_line(error)}") from error
    section = data
    for depth, name in enumerate(names[:-1], start=1):
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            path = ".".join(names[:depth])
            raise RecipeError(f"override {override!r}: {path} is {kind(section)}, not a section")
    section[names[-1]] = value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
