"""Runs a bench matrix: what is checked before models are loaded, the ways, and the measurement."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.inputs import (
    check_decoding,
    check_name,
    check_prompts,
    check_rule,
    encode,
    load_with_room,
)
from headstart.long_prompts import is_cut, notes_on, room_for, taken, without_oldest_turn
from headstart.matrix import Matrix, check_trees, trees_of
from headstart.terminal import UsageError

if TYPE_CHECKING:
    from headstart.infer import Speculator
    from headstart.infer.measure.matrix import Answer, Cell, Chat
    from headstart.train.data.questions import Question

_RANKED = 8  # prompts whose ranks give the probabilities of a tree's nodes
_NO_TEMPLATE = (
    "The tokenizer has no chat template: chats are given as plain text, each turn behind its "
    "role's name, which an instruction model was not trained on."
)


@dataclass(frozen=True)
class Way:
    """A speculator to measure, and how it is called."""

    drafter: str
    speculator: Speculator


@dataclass
class Prepared:
    """Everything that a measurement needs, loaded and checked.

    Attributes:
        ways: of a temperature, by name.
        cut: ids of the chats whose prompts lost turns, or their beginning, to fit into the context.
        early: notes that are told before anything is measured.
    """

    target: Speculator
    ways: dict[float, dict[str, Way]]
    chats: list[Chat]
    against: dict[str, dict[str, Any]]
    notes: list[str]
    cut: set[str] = field(default_factory=set)
    early: list[str] = field(default_factory=list)


@dataclass
class Measured:
    """The result: a report for each way in each cell, and what the ways wrote."""

    matrix: Matrix
    target: str
    tokenizer: Any
    chats: list[Chat]
    cells: list[Cell]
    reports: list[dict[str, Any]]
    answers: list[list[Answer]]  # of each report
    notes: list[str]
    whole: bool  # whether every cell was measured, rather than some until Ctrl-C


def check_matrix(matrix: Matrix, options: argparse.Namespace) -> list[Question]:
    """Read the questions, and refuse what can be told to be wrong before a model is loaded.

    Raises:
        UsageError, OptionError, CorpusError: a mistake, on one line.
    """
    from headstart.train.data.questions import read_questions

    check_prompts(matrix.prompts)
    questions = read_questions(Path(matrix.prompts))[: matrix.limit]
    if not questions:
        raise UsageError(f"{matrix.prompts}: no prompts found")
    for name in itertools.chain(*matrix.sets):
        check_name(name)
    for name in (matrix.target, matrix.assistant):
        if name is not None:
            check_name(name, "model")
    if matrix.new_tokens < 2:
        raise UsageError("found 1 new token; a measurement needs at least 2")
    if not matrix.sets and matrix.target is None:
        raise UsageError("neither --target nor --drafter given; name at least one")
    from headstart.infer.rules.registry import find_rule

    for tree in matrix.trees:
        check_decoding(tree, None, None)
    check_trees(matrix)
    for name in matrix.rules or [None]:
        find_rule(name).check_expansion(matrix.expansion)
        check_rule(name, max(matrix.temperatures))
    _check_depths(matrix, options)
    if "assistant" in matrix.against and matrix.assistant is None:
        sources = [_source(name, options) for name in itertools.chain(*matrix.sets)]
        if not any(map(_is_draft_model, sources)):
            raise UsageError(
                "--against assistant has no assistant; name a smaller model with --assistant, or "
                "a draft model with --drafter"
            )
    return questions


def _check_depths(matrix: Matrix, options: argparse.Namespace) -> None:
    """Refuse trees that are deeper than their drafters, as far as the drafters' configs say."""
    from headstart.heads.artifacts.shapes import declared_depth
    from headstart.infer.trees.shapes import check_grown_by
    from headstart.infer.trees.texts import read_tree

    for names in matrix.sets if matrix.trees else []:
        depths = [declared_depth(_source(name, options)) for name in names]
        for tree in trees_of(matrix, len(names)):
            check_grown_by(read_tree(tree), depths)


def prepare(matrix: Matrix, options: argparse.Namespace, questions: Sequence[Question]) -> Prepared:
    """Load the models and make every speculator, so that mistakes show before a measurement."""
    import headstart
    from headstart.infer import Speculator
    from headstart.infer.loading import adaptive_tree
    from headstart.infer.trees.shapes import ADAPTIVE
    from headstart.reports.plans import said_of_unused

    given = argparse.Namespace(**vars(options) | {"target": matrix.target, "rule": None})
    sources = [[_source(name, options) for name in names] for names in matrix.sets or [[]]]
    given.drafter, given.tree = sources[0] or None, matrix.trees or None
    given.expansion, given.in_place = matrix.expansion, False
    first = load_with_room(given, matrix.new_tokens)
    loaded = [first]
    if len(sources) > 1:
        _check_adapters(sources)
    for names in sources[1:]:
        tree = "plain" if matrix.trees else None
        more = headstart.load(
            first.model, names, tokenizer=first.tokenizer, tree=tree, compile=first.target.compile
        )
        loaded.append(more)
    names = _names(sources)
    sets = [
        (name, each, of, tree)
        for name, each, of in zip(names, loaded, sources, strict=True)
        for tree in trees_of(matrix, len(of)) or [None]
    ]
    ways: dict[float, dict[str, Way]] = {each: {} for each in matrix.temperatures}
    for temperature in matrix.temperatures:
        rules = matrix.rules or [None]
        for (name, each, of, tree), rule in itertools.product(
            sets, rules if temperature > 0 else rules[:1]
        ):
            grown = adaptive_tree(each.drafters.drafters, of) if tree == ADAPTIVE else tree
            made = Speculator(
                each.model, each.drafter, tree=grown or each.trees, rule=rule,
                expansion=matrix.expansion, tokenizer=each.tokenizer, compile=first.target.compile,
            )  # fmt: skip
            label = ", ".join(filter(None, (name, tree, rule if temperature > 0 else None)))
            ways[temperature][label] = Way(name, made)
    notes: list[str] = []
    chats, cut, early = _chats(first, questions, matrix, notes)
    for source in itertools.chain(*sources) if not matrix.trees else ():
        early += said_of_unused(source, first.model)
    against: dict[str, dict[str, Any]] = {name: {} for name in matrix.against}
    if "lookup" in against:
        from headstart.infer.measure.matrix import LOOKUP_TOKENS

        against["lookup"] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    if "assistant" in against:
        against["assistant"] = {"assistant_model": _assistant(matrix, first, loaded, sources)}
    return Prepared(first, ways, chats, against, notes, cut, early)


def measure(prepared: Prepared, matrix: Matrix) -> Measured:
    """Measure every cell of the matrix; where Ctrl-C ends it, those that are whole."""
    from headstart.infer.measure.bench import way_report
    from headstart.infer.measure.matrix import ONE_ROW, Settings, measure_cell
    from headstart.reports.comparison import noise_notes

    settings = Settings(matrix.new_tokens, matrix.repeats, matrix.seed, prepared.against)
    cells, reports, answers = [], [], []
    for temperature, batch_size in itertools.product(matrix.temperatures, matrix.batch_sizes):
        ways = prepared.ways[temperature]
        # A drafter may be called what a baseline is, such as lookup.
        speculators = {f"way {name}": way.speculator for name, way in ways.items()}
        model = prepared.target.model
        chats = prepared.chats
        try:
            cell = measure_cell(model, speculators, chats, settings, temperature, batch_size)
        except KeyboardInterrupt:
            if not cells:
                raise
            break
        cells.append(cell)
        for name, way in ways.items():
            report = way_report(cell, f"way {name}", way.speculator, chats)
            reports.append(report | {"way": name, "drafter": way.drafter})
            answers.append(cell.found[f"way {name}"].answers)
    whole = len(cells) == len(matrix.temperatures) * len(matrix.batch_sizes)
    if whole:
        _add_tree_shares(prepared, matrix, reports)
    notes = [*prepared.early, *prepared.notes]
    planned = matrix.sets and not matrix.trees
    if idle := {r["drafter"]: None for r in reports if planned and r["tree"] == "plain"}:
        notes.append(
            f"Nothing was drafted where the tree is plain: the plan of {', '.join(idle)} is plain "
            "decoding there (--tree drafts all the same)."
        )
    if matrix.roofline and whole:
        notes += _against_the_limit(prepared, matrix, reports)
    if max(matrix.batch_sizes) > 1 and (left := [w for w in ONE_ROW if w in matrix.against]):
        notes.append(f"generate decodes one prompt at a time with {' or '.join(left)}.")
    if prepared.cut:
        notes.append(
            f"{len(prepared.cut)} of {len(prepared.chats)} chats lost their oldest turns, or the "
            f"beginning of the only one, so that they and {matrix.new_tokens} new tokens fit into "
            "the target's context."
        )
    name = str(prepared.target.model.config._name_or_path)
    tokenizer = prepared.target.tokenizer
    notes += noise_notes(reports)
    return Measured(matrix, name, tokenizer, prepared.chats, cells, reports, answers, notes, whole)


def _add_tree_shares(prepared: Prepared, matrix: Matrix, reports: Sequence[dict[str, Any]]) -> None:
    """Tell the fastest way how often each node of its tree is right, from recorded ranks."""
    from headstart.heads import Drafter
    from headstart.infer.measure.own_text import write_texts
    from headstart.infer.measure.ranks import measure_ranks, path_shares

    best = max(reports, key=lambda report: report["speedup_vs_plain"]["median"])
    ways = prepared.ways[best["temperature"]]
    drafter = ways[best["way"]].speculator.drafter
    if not best.get("tree_paths") or not isinstance(drafter, Drafter) or drafter.observes:
        return
    prompts = [chat.prompt([]) for chat in prepared.chats[:_RANKED]]
    texts = write_texts(prepared.target.model, drafter, prompts, matrix.new_tokens)
    depth = max(map(len, best["tree_paths"]))
    best["tree_shares"] = path_shares(measure_ranks(drafter, texts, depth), best["tree_paths"])


def _against_the_limit(
    prepared: Prepared, matrix: Matrix, reports: Sequence[dict[str, Any]]
) -> list[str]:
    """Add to each report what its rounds must read; returns that as sentences."""
    from headstart.infer.measure.roofline import against_the_limit, read_bandwidth, said_of_limit

    bytes_per_s = read_bandwidth(prepared.target.device)
    middle = sum(len(chat.prompt([])) for chat in prepared.chats) // len(prepared.chats)
    for report in reports:
        way = prepared.ways[report["temperature"]][report["way"]]
        length = middle + matrix.new_tokens // 2
        report["roofline"] = against_the_limit(way.speculator, report, length, bytes_per_s)
    return [said_of_limit(report) for report in reports]


def _source(name: str, options: argparse.Namespace) -> Any:
    from headstart.heads.artifacts.source import DrafterSource

    return DrafterSource.of(name, options.allow_pickle)


def _is_draft_model(source: Any) -> bool:
    from headstart.heads.artifacts.loading import is_translated
    from headstart.heads.artifacts.source import SourceKind
    from headstart.heads.families import is_language_model

    if source.kind is SourceKind.ARTIFACT:
        return is_language_model(source.manifest.family) and not is_translated(source)
    return source.kind is SourceKind.CHECKPOINT  # perhaps; what it is, is known once it is loaded


def _check_adapters(sets: Sequence[Sequence[Any]]) -> None:
    from headstart.heads.artifacts.source import SourceKind

    for source in itertools.chain(*sets):
        if source.kind is SourceKind.ARTIFACT and source.manifest.adapter_sha256:
            raise UsageError(
                f"{source} adapts its target, and the other drafters would be measured on the "
                "adapted one; measure it alone"
            )


def _names(sets: Sequence[Sequence[Any]]) -> list[str]:
    """Short names: families of artifacts, with the path where two are of one family."""
    from headstart.heads.artifacts.source import SourceKind

    def brief(source: Any) -> str:
        known = source.kind is SourceKind.ARTIFACT
        return source.manifest.family if known else Path(str(source)).name

    short = [" + ".join(map(brief, each)) or "plain" for each in sets]
    whole = [" + ".join(map(str, each)) or "plain" for each in sets]
    pairs = zip(short, whole, strict=True)
    return [f"{name} ({path})" if short.count(name) > 1 else name for name, path in pairs]


def _assistant(
    matrix: Matrix,
    target: Speculator,
    loaded: Sequence[Speculator],
    sources: Sequence[Sequence[Any]],
) -> Any:
    """The assistant's model: the one named, or the student of a draft model."""
    from headstart.heads.artifacts.source import SourceKind
    from headstart.heads.group import members

    names: list[Any] = [matrix.assistant]
    if matrix.assistant is None:
        for each in loaded:
            for drafter in members(each.drafter):
                if (student := getattr(drafter, "language_model", None)) is not None:
                    return student
        # One whose plan is plain decoding is in no speculator.
        artifacts = (of for of in itertools.chain(*sources) if of.kind is SourceKind.ARTIFACT)
        names = [of.folder for of in artifacts if _is_draft_model(of)]
    if not names:
        said = "--against assistant: no --drafter is a draft model; name --assistant MODEL"
        raise UsageError(said)
    from transformers import AutoModelForCausalLM

    from headstart.heads.core import load_pretrained

    model = load_pretrained(AutoModelForCausalLM, names[0], dtype=target.model.dtype)
    return model.eval().to(target.device)


def _chats(
    speculator: Speculator, questions: Sequence[Question], matrix: Matrix, notes: list[str]
) -> tuple[list[Chat], set[str], list[str]]:
    """The questions as the target is asked them, and what is to be told of their lengths.

    The first prompts are encoded at once.
    """
    from headstart.infer.measure.matrix import Chat

    tokenizer: Any = speculator.tokenizer
    room, cut = room_for(speculator.model, matrix.new_tokens), set[str]()
    lengths, texts = [], set[str]()

    def chat(question: Question) -> Chat:
        def prompt(answers: Sequence[list[int]]) -> Any:
            said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
            limit = matrix.prefix_tokens if not answers else None
            asked = question.after(said)
            ids = encode(asked, speculator, limit)[0]
            if matrix.prefix_tokens is None and is_cut(asked, len(ids), room):
                texts.add(question.id)
                ids = ids[: taken(room)]
            if room is not None and len(ids) > room:
                cut.add(question.id)
                while len(ids) > room and (shorter := without_oldest_turn(asked)) is not None:
                    asked = shorter
                    ids = encode(asked, speculator, limit)[0]
                ids = ids[-room:]
            return ids.to(speculator.device)

        lengths.append(len(prompt([])))
        return Chat(question.id, question.category, question.turns, prompt)

    if any(question.document.messages for question in questions) and not tokenizer.chat_template:
        notes.append(_NO_TEMPLATE)
    chats = [chat(question) for question in questions]
    return chats, cut, notes_on(lengths, len(texts), room, speculator)
