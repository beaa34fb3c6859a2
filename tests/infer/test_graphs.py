"""Captured rounds write the text of rounds that run as written; a tape stands in for graphs."""

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers as tf
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from headstart.heads import DecodingError, Drafter, OptionError, Sampling
from headstart.heads.core.row_settings import Biased, EachRow
from headstart.heads.core.sampling import ROWWISE, Suppressed
from headstart.heads.families import KNOWN
from headstart.heads.parts import cached_layers
from headstart.infer import Speculator, graphs, request, runners
from headstart.infer.graphs import RoundGraphs, addresses
from headstart.infer.rules import matching
from headstart.infer.runners import CapturedRunner
from tests.support.families import LENGTHS, TREES, drafter, own, target
from tests.support.tape import NEW, SAMPLED, Tape, decode, on_tape
from tests.support.tiny import COMMON, one_line, prompts

STATIC = TREES[1]
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""A tape stands in for graphs on the CPU, in float64; on a GPU they are its own, in float32."""


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own check that a graph's inputs live, in versions that have it."""
    name = "check_input_liveness"
    if name in inspect.signature(torch.cuda.graph.__init__).parameters:
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, **{name: True}))


@cache
def placed(name: str, place: str) -> tuple[Any, Any]:
    """Target and drafter at a place."""
    if place == "cpu":
        return target(own(name)), drafter(name, own(name))
    model = copy.deepcopy(target(own(name))).to(place, torch.float32)
    return model, copy.deepcopy(drafter(name, own(name))).to(place, torch.float32).bind(model)


def both(
    name: str, tree: str = STATIC, place: str = "cpu", **options: Any
) -> tuple[Speculator, Speculator, Any]:
    """A speculator with a tape or with graphs, and one that runs its rounds as written."""
    made = [Speculator(*placed(name, place), tree=tree, **options) for _ in range(2)]
    made[1].graphs = None
    return *made, on_tape(made[0])  # type: ignore[return-value]


def cases() -> list[Any]:
    """By default each family once, and every second one sampled."""
    found = []
    for name, tree, batch, sampled in product(KNOWN, TREES, (1, 4), (False, True)):
        quick = batch == 4 and tree == (TREES[2] if name == "redrafter" else STATIC)
        quick = quick and sampled == list(KNOWN).index(name) % 2
        how = f"{name}-{tree[:5]}-{batch}-{'sampled' if sampled else 'greedy'}"
        marks = () if quick else pytest.mark.proof
        found.append(pytest.param(name, tree, batch, sampled, marks=marks, id=how))
    return found


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "tree", "batch", "sampled"), cases())
def test_replayed_rounds_write_the_same(
    name: str, tree: str, batch: int, sampled: bool, place: str
) -> None:
    """Request after request on the same graphs."""
    options = SAMPLED if sampled else {}
    replayed, written, tape = both(name, tree, place)
    taped = []
    for turn in range(3):
        text = decode(replayed, batch, turn, **options)
        assert torch.equal(text, decode(written, batch, turn, **options)), turn
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
        taped.append(tape.taped)
    assert 0 < taped[-1] <= taped[0] + 2
    assert tape.replayed > 4 * tape.taped


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", ["rejection", "traversal", "typical"])
def test_every_kind_of_rule(rule: str, place: str) -> None:
    replayed, written, tape = both("medusa", place=place, rule=rule)
    for turn in range(2):
        assert torch.equal(
            decode(replayed, turn=turn, **SAMPLED), decode(written, turn=turn, **SAMPLED)
        )
    assert tape.replayed


def test_what_several_drafters_carry_over_is_kept_apart() -> None:
    """States of one family look alike: a tensor that stays is one drafter's own."""
    graphs, states = RoundGraphs(), [SimpleNamespace(), SimpleNamespace()]
    where = []
    for turn in range(2):
        for number, state in enumerate(states):
            state.size = torch.tensor([10 * turn + number])
        graphs.keep_states(states)
        assert [int(state.size) for state in states] == [10 * turn, 10 * turn + 1]
        where.append(addresses(states))
    assert where[0] == where[1] and len(set(where[0])) == 2


@pytest.mark.parametrize("rule", ["coupled", "traversal"])
def test_several_drafters(rule: str) -> None:
    proposers = [drafter("draft_model", "tiny"), drafter("lookup", "tiny"), other_student()]
    tree = f"chain:2+chain:3+{STATIC}"
    replayed, written = (
        Speculator(target("tiny"), proposers, tree=tree, rule=rule) for _ in range(2)
    )
    tape = on_tape(replayed)
    for turn, options in enumerate(({}, SAMPLED, {})):
        assert torch.equal(
            decode(replayed, turn=turn, **options), decode(written, turn=turn, **options)
        )
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
    assert tape.replayed > 4 * tape.taped


def other_student() -> Drafter:
    """A draft model as wide as the first, but with other weights."""
    student = copy.deepcopy(drafter("draft_model", "tiny"))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(0.8)
    return student.bind(target("tiny"))


def test_plain_decoding() -> None:
    replayed, written = (Speculator(target("tiny"), tree="plain") for _ in range(2))
    tape = on_tape(replayed)
    for turn in range(2):
        assert torch.equal(decode(replayed, turn=turn), decode(written, turn=turn))
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
    assert tape.replayed


def test_tree_attention_needs_one_graph() -> None:
    """It reads lengths on the device; only a drafter that needs their bound splits the rounds."""
    counts = {"medusa": 1, "redrafter": 1, "draft_model": 2, "recycling+lookup": 1}
    for name, buckets in counts.items():
        tree = "+".join([STATIC] * len(name.split("+")))
        replayed, written, tape = both(name, tree, attention="tree")
        options: dict[str, Any] = {"max_new_tokens": 90}
        text = decode(replayed, turn=1, **options)
        assert torch.equal(text, decode(written, turn=1, **options))
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
        masked = Speculator(target("tiny"), drafter(name, "tiny"), tree=tree)
        assert torch.equal(text, decode(masked, turn=1, **options))
        assert tape.taped == buckets


@pytest.mark.parametrize("name", ["medusa", "redrafter", "lookup"])
def test_all_rounds_of_a_request_are_of_one_kind(name: str) -> None:
    """The first one as well. So of a speculator's first request two rounds are not replayed."""
    ours, written = (
        Speculator(target("tiny"), drafter(name, "tiny"), tree=TREES[2], attention="tree")
        for _ in range(2)
    )
    tape = on_tape(ours)
    for turn in range(2):
        options: dict[str, Any] = {"max_new_tokens": 40}
        before = tape.replayed
        assert torch.equal(decode(ours, 2, turn, **options), decode(written, 2, turn, **options))
        rounds = len(ours.stats.counts)
        assert (tape.taped, tape.replayed - before) == (1, rounds - (0 if turn else 2))


def test_a_drafter_that_attends_to_trees_needs_one_graph_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own lengths are read on the device as well."""
    assert drafter("draft_model", "tiny").needs_length_bound  # found once, so before the patch
    true = cached_layers.choose_attention
    monkeypatch.setattr(
        cached_layers, "choose_attention", lambda *given: cast(Any, true)(*given[:-1], "tree")
    )
    student = copy.deepcopy(drafter("draft_model", "tiny"))
    student._layers._forward_setup = None
    student.bind(target("tiny"))
    ours = [Speculator(target("tiny"), student, tree=STATIC, attention="tree") for _ in range(2)]
    tape, options = on_tape(ours[0]), {"max_new_tokens": 90}
    assert torch.equal(decode(ours[0], 1, **options), decode(ours[1], 1, **options))
    assert not student.needs_length_bound
    assert tape.taped == 1 and tape.replayed > 10


def test_other_numbers_need_no_other_graph() -> None:
    """Temperature, top-p, min-p, penalty, lengths, and tokens biased or suppressed."""
    replayed, written, tape = both("medusa")
    taped = []
    for turn, many in enumerate((60, 2, 40, 3)):
        options: dict[str, Any] = SAMPLED | {
            "temperature": 0.6 + turn / 10, "top_p": 0.9 - turn / 10, "min_p": 0.01 + turn / 100,
            "repetition_penalty": 1.1 + turn / 10, "suppress_tokens": list(range(many)),
            "sequence_bias": [[[61 + turn % 2], 1.0 + turn]], "min_new_tokens": NEW,
            "min_length": 10 + turn,
            "eos_token_id": [60 + turn % 3], "no_repeat_ngram_size": 4,
        }  # fmt: skip
        text = decode(replayed, **options)
        assert torch.equal(text, decode(written, **options))
        assert not torch.isin(text[:, -NEW:], torch.arange(many)).any()
        taped.append(tape.taped)
    assert taped[1] == taped[3] > 0 and not replayed.graphs.failed  # type: ignore[union-attr]
    decode(replayed, **SAMPLED | {"top_k": 9})
    decode(replayed, **SAMPLED | {"top_k": 9})
    assert tape.taped > taped[3]  # how many, and which processors there are, is built in


def test_a_gpu_with_the_memory_has_space_for_all_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the cache is never copied, and no round captured anew for it."""
    monkeypatch.setattr(request, "FIRST_TOKENS", 8)
    taped = {}
    for free in (10**9, 10**5):
        monkeypatch.setattr(request, "free_bytes", lambda device, free=free: free)
        replayed, written, tape = both("draft_model", attention="tree")
        options: dict[str, Any] = {"max_new_tokens": 180}
        assert torch.equal(decode(replayed, 1, **options), decode(written, 1, **options))
        address = replayed.target.cache.address
        taped[free] = tape.taped, address[1]
    assert taped[10**9][0] < taped[10**5][0] and taped[10**9][1] >= 189


def test_what_a_drafter_carries_over_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: were a state left where Python puts it, replayed rounds would draft otherwise."""
    left: list[Any] = []  # alive, so that what a later round makes lies elsewhere

    def leave(self: RoundGraphs, states: list[Any]) -> None:
        left.extend(value for state in states for _, _, value in graphs._leaves(state))

    monkeypatch.setattr(RoundGraphs, "keep_states", leave)
    replayed, _, tape = both("draft_model")
    decode(replayed)
    assert left and not tape.taped
    monkeypatch.setattr(runners, "addresses", lambda *owners: None)
    replayed, written, _ = both("draft_model")
    assert torch.equal(decode(replayed), decode(written))  # the target decides
    assert replayed.stats.counts.tolist() != written.stats.counts.tolist()


def test_rows_end_while_the_next_round_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """End tokens come as a surprise; what a row's round ahead wrote is nobody's."""
    ahead = []
    start = CapturedRunner._start_round

    def counted(self: CapturedRunner) -> None:
        start(self)
        ahead.append(len(self._started))

    monkeypatch.setattr(CapturedRunner, "_start_round", counted)
    for name in ("medusa", "hydra", "draft_model", "lookup", "recycling"):
        replayed, written, tape = both(name)
        text = decode(written)
        ends = [int(text[row, 9 + 4 * row + 2]) for row in range(4)]
        for turn in range(2):
            options: dict[str, Any] = {"eos_token_id": ends}
            assert torch.equal(
                decode(replayed, turn=turn, **options), decode(written, turn=turn, **options)
            )
            assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
        assert tape.replayed
    assert max(ahead) == 2


def test_rows_that_have_ended_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first row has ended, rounds run ahead as before, and nothing is put back."""
    restored, ahead = [], []
    restore, start = CapturedRunner.restore_ended_rows, CapturedRunner._start_round

    def noted(self: CapturedRunner, count: Any) -> None:
        restored.append(count)
        restore(self, count)

    def counted(self: CapturedRunner) -> None:
        start(self)
        ahead.append(len(self._started))

    monkeypatch.setattr(CapturedRunner, "restore_ended_rows", noted)
    monkeypatch.setattr(CapturedRunner, "_start_round", counted)
    replayed, written, _ = both("medusa")
    options: dict[str, Any] = {"max_new_tokens": 60}
    end = int(decode(written, 4, **options)[0, 9 + 1])  # of the first row, soon
    options["eos_token_id"] = [end]
    text = decode(written, 4, **options)
    lasts = sorted(int((row != 0).nonzero().max()) for row in text)
    assert lasts[0] < lasts[-1] - 20, "a row ends long before another"
    restored.clear()
    assert torch.equal(decode(replayed, 4, **options), text)
    assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
    rounds = len(replayed.stats.counts)
    # A row's end, and each round after the last free one, is looked at.
    assert len(restored) <= 12 < rounds and ahead.count(2) > rounds / 2


def test_rounds_run_ahead_as_long_as_a_row_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few tokens the rounds before have accepted of those that they might have."""
    seen, true = [], CapturedRunner.next_report

    def counted(self: CapturedRunner) -> Any:
        left = int(self.request.rows.remaining[0])
        report, policy = true(self)
        seen.append((left > policy.max_depth + 1, len(self._started)))
        return report, policy

    monkeypatch.setattr(CapturedRunner, "next_report", counted)
    replayed, _, _ = both("medusa", tree="chain:3")
    decode(replayed, 1, max_new_tokens=100)
    ahead = [started for free, started in seen if free]
    assert len(ahead) > 50 and all(started == 1 for started in ahead)
    assert [started for free, started in seen if not free].count(1) == 0


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("place", PLACES)
def test_caches_that_grow(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "FIRST_TOKENS", 8)
    monkeypatch.setattr(request, "free_bytes", lambda device: None)  # or all is there at once
    for name in ("hydra", "draft_model"):
        replayed, written, tape = both(name, place=place)
        options: dict[str, Any] = {"max_new_tokens": 200}
        assert torch.equal(decode(replayed, 2, **options), decode(written, 2, **options))
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
        assert tape.taped > 1 and tape.replayed > 3 * tape.taped


def test_rounds_whose_text_is_read_run_as_written() -> None:
    replayed, written, tape = both("medusa")
    options: dict[str, Any] = {"bad_words_ids": [[2, 3]]}
    assert torch.equal(decode(replayed, **options), decode(written, **options))
    assert tape.taped == 0


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", [None, "coupled", "traversal"])
def test_ngrams_and_least_lengths_are_captured(
    rule: str | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that outgrow what there was room for, and other requests' lengths and end tokens."""
    monkeypatch.setattr(request, "FIRST_TOKENS", 8)
    monkeypatch.setattr(request, "free_bytes", lambda device: None)
    replayed, written, tape = both("medusa", place=place, rule=rule)
    options: dict[str, Any] = {"no_repeat_ngram_size": 2, "max_new_tokens": 60}
    options |= {"sequence_bias": [[[20], 1.5]], "bad_words_ids": [[11], [12]]}
    options |= {} if rule is None else {**SAMPLED, "top_k": 20}
    texts = []
    for turn in range(3):
        ends: dict[str, Any] = {"min_new_tokens": 20 + 9 * turn, "eos_token_id": [40 + turn, 7, 9]}
        texts.append(decode(replayed, turn=turn, **options, **ends))
        assert torch.equal(texts[-1], decode(written, turn=turn, **options, **ends))
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
        if rule is None:
            ids, mask = prompts([length + turn for length in LENGTHS])
            model, _ = placed("medusa", place)
            ids, mask = ids.to(place), mask.to(place)
            free: dict[str, Any] = {"pad_token_id": 0, "do_sample": False, **options, **ends}
            assert torch.equal(texts[-1], model.generate(ids, attention_mask=mask, **free))
    assert tape.replayed > 3 * tape.taped > 0
    without: dict[str, Any] = options | {"no_repeat_ngram_size": 0}
    assert not torch.equal(decode(replayed, **options), decode(replayed, **without))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", [None, "coupled", "traversal"])
def test_a_repetition_penalty_is_captured(rule: str | None, place: str) -> None:
    """Beside other processors, with end tokens, and another request's tokens forgotten."""
    replayed, written, tape = both("medusa", place=place, rule=rule)
    options: dict[str, Any] = {"repetition_penalty": 1.6, "eos_token_id": 40}
    options |= {"suppress_tokens": [3, 4]} if rule is None else {**SAMPLED, "top_k": 20}
    for turn in range(3):
        text = decode(replayed, turn=turn, **options)
        assert torch.equal(text, decode(written, turn=turn, **options))
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
        if rule is None:
            ids, mask = prompts([length + turn for length in LENGTHS])
            free: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
            model, _ = placed("medusa", place)
            ids, mask = ids.to(place), mask.to(place)
            assert torch.equal(text, model.generate(ids, attention_mask=mask, **free, **options))
    assert tape.replayed > 3 * tape.taped > 0
    without: dict[str, Any] = options | {"repetition_penalty": 1.0}
    assert not torch.equal(decode(replayed, **options), decode(replayed, **without))


def test_which_tokens_were_seen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: were it left where each request makes it, others would be penalised by it."""
    true = RoundGraphs.keep
    monkeypatch.setattr(
        RoundGraphs,
        "keep",
        lambda self, name, value: value if name == "seen" else true(self, name, value),
    )
    replayed, written, _ = both("medusa")
    options: dict[str, Any] = {"repetition_penalty": 1.6}
    assert torch.equal(decode(replayed, **options), decode(written, **options))
    turned = (decode(each, turn=1, **options) for each in (replayed, written))
    assert not torch.equal(*turned)


def test_a_round_that_cannot_be_captured() -> None:
    """What a capture left half done is forgotten."""
    replayed, written, _ = both("draft_model")

    def refuse(work: Callable[[], Any]) -> Callable[[], Any]:
        assert replayed.graphs is not None
        for states in replayed.graphs._states.values():
            states[0].lengths = torch.full_like(states[0].lengths, 1)
        raise RuntimeError("operation not permitted when stream is capturing")

    on_tape(replayed, refuse)
    with pytest.warns(RuntimeWarning, match=r"cannot be captured .*graphs=False"):
        text = decode(replayed)
    assert torch.equal(text, decode(written))
    assert replayed.stats.counts.tolist() == written.stats.counts.tolist()


def test_a_kind_that_fails_is_the_only_one() -> None:
    """Its rounds run as they are written from then on, and all others are captured."""
    tape, tries = Tape(), list[Any]()

    def capture(work: Callable[[], Any]) -> Callable[[], Any]:
        tries.append(work)
        if len(tries) == 1:
            raise RuntimeError("out of memory")
        return tape(work)

    rounds = RoundGraphs(capture)
    value = torch.zeros(1)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        for kind in "aaaabbbb":
            rounds.run(kind, lambda: value.add_(1))
    assert value.item() == 8 and len(tries) == 2
    assert rounds.captures and rounds.replayed == 2 and rounds.failed == ["out of memory"]


def test_what_cannot_be_captured_is_named_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by that of the dispatch mode which every operator of a capture goes through."""
    true = matching.accept_matches

    def reads(tree: Any, choices: Any) -> Any:
        choices.sum().item()
        return true(tree, choices)

    replayed, written, _ = both("medusa")
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(matching, "accept_matches", reads)
        assert torch.equal(decode(replayed), decode(written))
    lines, first = inspect.getsourcelines(matching.matching)
    place = f"in line {first + len(lines) - 1} of infer/rules/matching.py"
    assert replayed.graphs is not None and replayed.graphs.failed
    assert all(each.endswith(place) for each in replayed.graphs.failed), replayed.graphs.failed


PROCESSORS: dict[type, tuple] = {
    hf.TemperatureLogitsWarper: (0.7,), hf.TopKLogitsWarper: (9,), hf.TopPLogitsWarper: (0.8,),
    hf.MinPLogitsWarper: (0.1,), hf.TypicalLogitsWarper: (0.9,), hf.EpsilonLogitsWarper: (0.01,),
    hf.EtaLogitsWarper: (0.01,), hf.TopHLogitsWarper: (0.5,),
    hf.SuppressTokensLogitsProcessor: ([3, 4],), hf.InfNanRemoveLogitsProcessor: (),
    hf.LogitNormalization: (), EachRow: (2,), Biased: (torch.linspace(-3, 3, 512).view(1, 512),),
}  # fmt: skip


def test_what_waits_for_the_device_is_known_beforehand() -> None:
    """Of the processors of single rows; what is not known would show as a failed capture."""
    assert PROCESSORS.keys() | {Suppressed} == set(ROWWISE)
    for kind, given in PROCESSORS.items():
        replayed, written, tape = both("medusa", "chain:2")
        processors = LogitsProcessorList([kind(*given)])
        options = {"logits_processor": processors, "max_new_tokens": 12} | SAMPLED
        reason = graphs.never_captured_with(Sampling(None, processors))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                assert torch.equal(decode(replayed, **options), decode(written, **options))
        assert replayed.graphs is not None
        said = [reason] if reason else []
        assert replayed.graphs.failed == said
        assert sum("cannot be captured" in str(each.message) for each in told) == len(said)
        assert (tape.replayed == 0) == bool(reason), kind


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope"])
def test_rotary_scaling_that_reads_positions_is_known_beforehand(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0}
    if kind == "longrope":
        factors = [1.0] * 4
        rope |= {"short_factor": factors, "long_factor": factors, "factor": 2.0}
        rope["original_max_position_embeddings"] = 128
    elif kind == "dynamic":
        rope["factor"] = 2.0
    model: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON, rope_parameters=rope))
    model = model.double().eval()
    reason = graphs.never_captured(model)
    if reason is None:
        replayed = Speculator(model)
        tape = on_tape(replayed)
        assert torch.equal(decode(replayed), decode(Speculator(model)))
        assert tape.replayed
    else:
        assert f"{kind} rotary scaling" in reason
        with pytest.raises(OptionError, match=f"graphs is True, and {kind}") as caught:
            Speculator(model, graphs=True)
        one_line(caught.value)
    monkeypatch.setattr(graphs.transformers, "__version__", "5.17.0")
    assert (graphs.never_captured(model) is None) == (kind == "default")


def test_a_target_on_several_gpus_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(target("tiny"))
    model.lm_head.to("meta")
    assert "spread over cpu and meta" in str(graphs.never_captured(model))
    monkeypatch.setattr(graphs, "device_of", lambda model: torch.device("cuda"))
    assert not graphs.captures_rounds(model) and graphs.captures_rounds(target("tiny"))


def test_broken_scores_are_found_a_round_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target("tiny")
    replayed, _, _ = both("medusa")
    seen = 0

    def poison(module: Any, args: Any, output: Any) -> Any:
        nonlocal seen
        seen += 1
        return output if seen < 4 else output * float("nan")

    handle = model.get_output_embeddings().register_forward_hook(poison)
    try:
        with pytest.raises(DecodingError, match="NaN or infinite"):
            replayed.graphs = RoundGraphs()
            decode(replayed)
    finally:
        handle.remove()
