"""The recipe: one strict YAML file that says what a training run does.

Plain dataclasses are the schema; a key that is not a field, a value of the wrong type and a value
out of range each raise `RecipeError` with the key's path. Nothing here imports torch, so that
`--help` and a mistyped recipe answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .losses import LOSSES


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key's path and what was expected."""


def _limited(default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """A field with a range: `ge`, `gt`, `le`, `lt` for numbers, `choices` for strings."""
    return field(default=default, metadata=limits)


def _positive(default: Any = dataclasses.MISSING) -> Any:
    return _limited(default, gt=0)


@dataclass(frozen=True)
class Corpus:
    """Where the text comes from."""

    # "stdlib", the path of a .txt, .jsonl, .json (also .gz) or folder, or "target": what the target
    # itself writes after its start token, sampled at temperature 1
    source: str = "stdlib"
    max_bytes: int = _positive(4_000_000)
    held_out: float = _limited(0.05, ge=0, lt=1)  # share of whole documents
    on_error: str = _limited("raise", choices=("raise", "skip"))  # a row that cannot be read
    opening_tokens: int = _positive(64)  # source target: tokens of each text
    writer: str | None = None  # source target: the model that writes, target.model when null


@dataclass(frozen=True)
class Scratch:
    """A little Llama trained from nothing, for runs without a model hub."""

    vocab_size: int = _limited(1024, ge=257)  # 256 bytes and the end-of-text token
    hidden_size: int = _positive(128)
    layers: int = _positive(12)
    heads: int = _positive(2)
    intermediate_size: int = _positive(384)
    context: int = _positive(1024)
    sequence_length: int = _positive(128)  # tokens a training row
    batch_size: int = _positive(8)  # rows a step
    muon_lr: float = _positive(16e-3)
    adamw_lr: float = _positive(4e-3)
    warmup_ratio: float = _limited(0.05, ge=0, lt=1)
    max_seconds: float | None = _positive(80.0)
    max_tokens: int | None = _positive(None)


DTYPES = ("float32", "bfloat16", "float16", "float64", "auto", "4bit")


@dataclass(frozen=True)
class TargetSpec:
    """The model that is made faster: either a path or Hub name, or one trained here."""

    model: str | None = None
    scratch: Scratch | None = None
    dtype: str = _limited("float32", choices=DTYPES)  # 4bit needs bitsandbytes


@dataclass(frozen=True)
class Distill:
    """Self-distillation: the target continues real prefixes."""

    examples: int = _positive(1024)
    prefix: str = _limited("window", choices=("window", "start", "prompt"))  # of a document
    prefix_tokens: int = _positive(64)  # exactly; for `prompt`, at most
    chat: str = _limited("auto", choices=("auto", "template", "plain"))  # how chats are rendered
    new_tokens: int = _positive(128)
    batch_size: int = _positive(64)
    temperature: float = _limited(0.0, ge=0)
    shards: int = _positive(8)
    max_seconds: float | None = _positive(None)


@dataclass(frozen=True)
class DrafterSpec:
    """The drafter's family; all other keys are options of that family's config class."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OnPolicy:
    """Text that the student writes while it is trained; the target says how wrong it is there."""

    lmbda: float = _limited(0.5, gt=0, le=1)  # λ of GKD: share of the steps that learn from it
    temperature: float = _limited(1.0, ge=0)  # of the student's sampling
    every: int = _positive(8)  # steps whose text is written at once, so the age it may have


@dataclass(frozen=True)
class Train:
    """How the drafter is trained."""

    loss: str = _limited("cross_entropy", choices=tuple(LOSSES))  # all others ask the target, not its text
    learning_rate: float = _positive(1e-3)
    batch_size: int = _positive(8)  # rows a process and forward
    gradient_accumulation: int = _positive(1)
    max_steps: int = _positive(1000)
    max_seconds: float | None = _positive(None)
    warmup_ratio: float = _limited(0.1, ge=0, lt=1)
    weight_decay: float = _limited(0.0, ge=0)
    clip: float = _positive(1.0)  # the norm that gradients are clipped to
    optimizer: str = _limited("adamw", choices=("adamw", "adamw_8bit"))  # the last: bitsandbytes
    head_decay: float = _limited(0.8, gt=0, le=1)  # weight of head k is head_decay ** k
    eval_every: int | None = _positive(None)  # steps between validations by real decoding
    feature_weight: float = _limited(0.0, ge=0)  # of the distance to the target's features (EAGLE)
    feature_cache_mb: float = _limited(512.0, ge=0)  # keep the target's features up to this size
    on_policy: OnPolicy | None = None  # null: all text is the target's

    def __post_init__(self) -> None:
        if self.on_policy is not None and self.loss == LOSSES[0]:
            raise RecipeError(
                f"train.on_policy: {self.loss} would teach the student its own text; set train.loss"
                f" to what asks the target there: {', '.join(LOSSES[1:])}"
            )


@dataclass(frozen=True)
class Decode:
    """How drafts are grown, accepted and measured."""

    tree: str | list[list[int]] = "chain:4"  # chain:K, cartesian:A,B,…, sparse:N, paths, a file
    rule: str = _limited("greedy", choices=("greedy", "match", "coupled"))
    prompts: int = _positive(24)
    prefix_tokens: int = _positive(64)
    new_tokens: int = _positive(128)
    validation_prompts: int = _positive(8)


@dataclass(frozen=True)
class Recipe:
    """One training run, from text to measured drafter; results go to `output/name/`.

    With `shares` set to the name of another run in `output`, corpus, target and distilled text are
    that run's: what it has not made yet is made there, and what was made there with other settings
    is left alone and made here.
    """

    name: str
    drafter: DrafterSpec
    target: TargetSpec
    seed: int = _limited(0, ge=0)
    output: str = "runs"
    shares: str | None = None
    corpus: Corpus = field(default_factory=Corpus)
    distill: Distill = field(default_factory=Distill)
    train: Train = field(default_factory=Train)
    decode: Decode = field(default_factory=Decode)

    def __post_init__(self) -> None:
        if (self.target.model is None) == (self.target.scratch is None):
            raise RecipeError(
                "target: expected exactly one of model and scratch; "
                "set the other to null, e.g. target.scratch=null"
            )
        if self.corpus.source == "target" and self.corpus.writer is None:
            if self.target.model is None:
                raise RecipeError(
                    "corpus.source: a target that is trained here has nothing to write from; "
                    "expected a text, or target.model"
                )
            # The corpus stage stands alone, and its fingerprint must name who wrote it.
            corpus = dataclasses.replace(self.corpus, writer=self.target.model)
            object.__setattr__(self, "corpus", corpus)
        for key in ("name", "shares"):
            name = getattr(self, key)
            if name is not None and (name in {"", ".", ".."} or "/" in name or "\\" in name):
                raise RecipeError(f"{key}: {name!r} cannot name a folder; use letters and digits")

    @property
    def folder(self) -> Path:
        """Where this run's stages write."""
        return Path(self.output) / self.name

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers (JSON-ready), as fingerprints and manifests need them."""
        return dataclasses.asdict(self)


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


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Check a nested dict against the schema and build the Recipe. Raises RecipeError."""
    return _build(Recipe, data, "")


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
        raise RecipeError(f"{path}: found {_kind(data)}, expected a mapping of recipe keys")
    if "base" not in data:
        return data
    base = data.pop("base")
    if not isinstance(base, str):
        raise RecipeError(f"base: found {_kind(base)}, expected a recipe's name or path")
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
        f"{_nearest(str(name_or_path), shipped)}; shipped: {', '.join(shipped) or 'none'}"
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
            raise RecipeError(f"override {override!r}: {path} is {_kind(section)}, not a section")
    section[names[-1]] = value


def _build(cls: type, data: Any, path: str) -> Any:
    """Build dataclass `cls` from a dict found at key path `path`."""
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: found {_kind(data)}, expected a mapping of {_names(cls)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if cls is DrafterSpec:  # its other keys belong to the family's config class
        data = {
            "options": {key: value for key, value in data.items() if key != "family"},
            **({"family": data["family"]} if "family" in data else {}),
        }
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in data.items():
        where = _join(path, key)
        if key not in fields:
            raise RecipeError(
                f"{where}: unknown key{_nearest(str(key), fields)}; "
                f"{path or 'a recipe'} takes {_names(cls)}"
            )
        values[key] = _convert(hints[key], value, where)
        _check_range(values[key], fields[key].metadata, where)
    for f in fields.values():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise RecipeError(f"{_join(path, f.name)}: missing; a recipe must give it")
    return cls(**values)


def _convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as type `hint`; the only conversion is an integer where a float is expected."""
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, path)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(typing.get_args(hint), value, path, hint)
    if origin is list and isinstance(value, list):
        (item,) = typing.get_args(hint)
        return [_convert(item, v, f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint:  # not isinstance: True is no integer here
        return value
    raise RecipeError(f"{path}: found {_kind(value)}, expected {_describe(hint)}")


def _convert_union(members: tuple[Any, ...], value: Any, path: str, hint: Any) -> Any:
    if value is None and type(None) in members:
        return None
    for member in members:
        container = typing.get_origin(member) or member
        if dataclasses.is_dataclass(member):
            container = dict
        if type(value) is container or (container is float and type(value) is int):
            return _convert(member, value, path)  # the right container: report what is inside
    raise RecipeError(f"{path}: found {_kind(value)}, expected {_describe(hint)}")


_BOUNDS = {
    "gt": ("greater than", lambda value, limit: value > limit),
    "ge": ("at least", lambda value, limit: value >= limit),
    "lt": ("less than", lambda value, limit: value < limit),
    "le": ("at most", lambda value, limit: value <= limit),
}


def _check_range(value: Any, limits: Any, path: str) -> None:
    if value is None:
        return
    choices = limits.get("choices")
    if choices and value not in choices:
        raise RecipeError(
            f"{path}: found {value!r}{_nearest(value, choices)}; expected one of "
            f"{', '.join(choices)}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{path}: found {value!r}, expected a finite number")
    for name, (words, holds) in _BOUNDS.items():
        if name in limits and not holds(value, limits[name]):
            raise RecipeError(f"{path}: found {value!r}, expected {words} {limits[name]}")


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _names(cls: type) -> str:
    if cls is DrafterSpec:
        return "family and that family's options"
    return ", ".join(f.name for f in dataclasses.fields(cls))


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _kind(value: Any) -> str:
    """What a value is, in a reader's words: `the string '3'`, `null`."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}
    if isinstance(value, dict):
        return "a mapping"
    return f"the {kinds.get(type(value), type(value).__name__)} {value!r}"


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_describe(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        inner = typing.get_args(hint)[0]
        return "a list of lists" if typing.get_origin(inner) is list else "a list"
    names = {int: "an integer", float: "a number", str: "a string", type(None): "null"}
    return names.get(hint, "a mapping")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
