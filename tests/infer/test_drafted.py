"""Who wrote each token: recounted from the rounds' own trees and the paths that were accepted."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from headstart.heads import DrafterGroup, TokenTree
from headstart.infer import Emitted, RoundStreamer, Speculator, Union
from headstart.infer import round as rounds
from headstart.infer.rules.rule_api import Accepted
from tests.support.scripted import make, rows_of
from tests.support.tiny import letters, prompts, tiny

LENGTHS, NEW = [9, 4, 7], 24
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.8, "seed": [5, 6, 7]}


@dataclass
class Replayed:
    """The trees and paths of a request's rounds."""

    trees: list[TokenTree] = field(default_factory=list)
    paths: list[Accepted] = field(default_factory=list)

    def recount(self, counts: np.ndarray, sizes: list[int]) -> list[list[tuple[int, int]]]:
        """For each row, depth and drafter of each token after the first, walked node by node.

        Args:
            counts: [rounds, B]; sizes: nodes of each drafter's part, without the root.
        """
        owner = [number for number, size in enumerate(sizes) for _ in range(size)]
        found: list[list[tuple[int, int]]] = [[] for _ in range(counts.shape[1])]
        for tree, taken, count in zip(self.trees, self.paths, counts, strict=True):
            parents, tokens = tree.topology.parents.tolist(), tree.tokens.tolist()
            for row, kept in enumerate(count):
                nodes = int(taken.count[row])
                path, written = taken.path[row].tolist(), taken.tokens[row].tolist()
                assert path[0] == 0
                for step in range(kept):
                    if step + 1 == nodes:  # no node holds it
                        found[row].append((0, -1))
                        continue
                    node = path[step + 1]
                    assert tokens[row][node] == written[step]
                    assert parents[row][node] == path[step]
                    depth, above = 0, node
                    while above:
                        depth, above = depth + 1, parents[row][above]
                    found[row].append((depth, owner[node - 1]))
        return found


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Replayed:
    seen, pack = Replayed(), rounds.pack

    def noted(request: Any, accepted: Accepted, *rest: Any) -> Any:
        seen.paths.append(accepted)
        return pack(request, accepted, *rest)

    monkeypatch.setattr(rounds, "pack", noted)
    return seen


def watched(speculator: Speculator, seen: Replayed, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = speculator.tree.grow
    seen.paths.clear()

    def noted(*given: Any) -> TokenTree:
        seen.trees.append(grow(*given))
        return seen.trees[-1]

    monkeypatch.setattr(speculator.tree, "grow", noted)


def plain(**options: Any) -> torch.Tensor:
    ids, mask = prompts(LENGTHS)
    given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return Speculator(tiny("llama")).generate(ids, attention_mask=mask, **given | options)


CASES = {
    "chain": (["cached"], "chain:4", {}),
    "static": (["heads"], "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0]]", {}),
    "best-first": (["cached"], "best-first:9,3,4", {}),
    "beam": (["cached"], "beam:3,4", {}),
    "lookup": (["lookup"], "cartesian:2,1,1", {}),
    "coupled": (["cached"], "cartesian:2,2", SAMPLED),
    "rejection": (["cached"], "cartesian:2,2", SAMPLED | {"rule": "rejection"}),
    "traversal": (["heads"], "cartesian:2,2", SAMPLED | {"rule": "traversal"}),
    "union": (["heads", "cached"], "cartesian:2,1+chain:4", {}),
    "union grown": (["lookup", "cached"], "best-first:4,2,2+best-first:6,2,4", {}),
    "union of three": (["lookup", "heads", "cached"], "chain:1+cartesian:2,2+chain:3", SAMPLED),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("end", ["length", "token", "string"])
def test_depth_and_drafter_of_each_token(
    case: str, end: str, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, tree, options = CASES[case]
    options = dict(options)
    rule = options.pop("rule", None)
    (ids, mask), text = prompts(LENGTHS), plain(**options)
    new = text[:, ids.shape[1] :]
    rows = rows_of(ids, mask) if not options else None
    drafters = [make(shape, tiny("llama"), new, "sometimes", prompts=rows) for shape in shapes]
    given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    given |= options
    if end == "token":
        given["eos_token_id"] = [int(new[0, 9]), int(new[1, 14])]
    elif end == "string":
        if rule == "traversal":
            pytest.skip("any end will do")
        tokenizer = letters()
        given["stop_strings"] = [tokenizer.decode(new[0, 7:9]), tokenizer.decode(new[2, 12:13])]
        given["tokenizer"] = tokenizer
    speculator = Speculator(tiny("llama"), DrafterGroup(drafters), tree=tree, rule=rule)
    watched(speculator, replayed, monkeypatch)
    out = speculator.generate(ids, attention_mask=mask, **given)
    stats = speculator.stats
    parts = speculator.tree.parts if isinstance(speculator.tree, Union) else [speculator.tree]
    sizes = [part.nodes - 1 for part in parts]
    first, *replayed.paths = replayed.paths  # the prefill's
    assert first.tokens.shape == (len(LENGTHS), 1)
    expected = replayed.recount(stats.counts, sizes)
    drafted = stats.drafted
    written = out.shape[1] - ids.shape[1]
    assert drafted.depths.shape == drafted.drafters.shape == (len(LENGTHS), written)
    for row, pairs in enumerate(expected):
        pairs = [(0, -1), *pairs]
        pairs += [(-1, -1)] * (written - len(pairs))
        found = zip(drafted.depths[row].tolist(), drafted.drafters[row].tolist(), strict=True)
        assert list(found) == pairs[:written]
    seen = {depth for pairs in expected for depth, _ in pairs}
    assert seen >= {0, 1} and (end != "length" or max(seen) >= 2)
    if len(shapes) > 1 and end == "length":
        assert len({number for pairs in expected for _, number in pairs} - {-1}) > 1


class Kept(RoundStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Any) -> None:
        self.calls.append(value.tolist())

    def put_round(self, emitted: Emitted) -> None:
        count = int(emitted.count[0])
        columns = emitted.tokens[0], emitted.depths[0], emitted.drafters[0]
        self.calls.append([column[:count].tolist() for column in columns])

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("graphs", [False, True])
def test_a_streamer_is_told_round_by_round(graphs: bool) -> None:
    (ids, mask), new = prompts([9]), plain()[:, 9:][:1]
    drafters = [make(shape, tiny("llama"), new, "sometimes") for shape in ("heads", "lookup")]
    speculator = Speculator(
        tiny("llama"), DrafterGroup(drafters), tree="cartesian:2,1+chain:3", graphs=graphs
    )
    streamer = Kept()
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "streamer": streamer}
    out = speculator.generate(ids, attention_mask=mask, **options)
    prompt, *told, last = streamer.calls
    assert prompt == ids.tolist() and last == "end" and len(told) == speculator.stats.rounds + 1
    columns = zip(*told, strict=True)
    tokens, depths, numbers = ([value for part in parts for value in part] for parts in columns)
    assert tokens == out[0, 9:].tolist()
    drafted = speculator.stats.drafted
    assert depths == drafted.depths[0].tolist() and max(depths) >= 2
    assert numbers == drafted.drafters[0].tolist()


def test_a_request_of_no_tokens_has_nothing_drafted() -> None:
    ids, _ = prompts([5, 5])
    speculator = Speculator(tiny("llama"))
    assert speculator.stats.drafted.depths.shape == (0, 0)
    speculator.generate(ids, max_new_tokens=0)
    assert speculator.stats.drafted.depths.shape == (2, 0)
    speculator.generate(ids, max_new_tokens=3, do_sample=False)
    assert speculator.stats.drafted.depths.tolist() == [[0] * 3] * 2
