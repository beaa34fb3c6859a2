"""The comparison with other engines tells drafters that are run alike from those that are not."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import __main__ as engines
from benchmarks.engines.engines import LlamaCpp, Prompt, Vllm, _rounds_of
from benchmarks.engines.rounds import Agreement, Decoded, agreement
from headstart.heads.artifacts.engines import serve_line
from tests.support.families import drafter as drafter_of


def test_rounds_of_one_text_are_compared_where_both_begin_one() -> None:
    ours = [1, 3, 3, 2, 3, 3]
    assert agreement(ours, ours, 15) == Agreement(5, 5)
    # Theirs drafts from the prompt alone, and meets ours at the seventh token.
    assert agreement(ours, [3, 4, 2, 3, 3], 15) == Agreement(2, 2)
    # A round accepts less, and both meet again later.
    assert agreement(ours, [1, 3, 1, 2, 2, 3, 3], 15) == Agreement(4, 5)


def test_drafts_that_are_run_again_are_compared_as_they_were_judged() -> None:
    """A round of three accepted drafts of four, and one of four of four."""
    log = "partial acceptance: 3 < 4, restoring\naccepted 4/4 draft\naccepted 4/4 draft\n"
    rounds, judged = _rounds_of(log)
    assert (rounds, judged) == ([5, 5], [4, 5])
    # Ours begins where theirs does, and goes on a token before.
    assert agreement([1, 4, 1, 5], [1, *rounds], 20, [1, *judged]) == Agreement(2, 2)
    assert agreement([1, 4, 1, 4], [1, *rounds], 20, [1, *judged]) == Agreement(1, 2)
    assert agreement([1, 4, 1, 5], [1, *rounds], 20) == Agreement(1, 2)


def test_differing_drafts_are_found() -> None:
    here = [Decoded("abcdefghij", [1, 4, 4, 4, 4])]
    found = engines._judged(engines.Found("x", "vllm", "y", prompts=1), here, here, 20)
    assert (found.same_texts, found.equal, found.compared) == (1, 4, 4)
    there = [Decoded("abcdefghiX", [1, 2, 2, 4, 4, 4])]
    found = engines._judged(engines.Found("x", "vllm", "y", prompts=1), here, there, 20)
    assert (found.same_texts, found.equal, found.compared) == (0, 3, 4)


def test_engines_are_started_with_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks.engines import engines as module

    drafter = drafter_of("eagle3", "tiny")
    ran: list[list[str]] = []

    def run(command: list[str]) -> Any:
        ran.append(command)
        result = type("Ran", (), {"stdout": "a promptits text", "stderr": "accepted 2/3 draft"})
        if command[-1].endswith("found.json"):
            job = Path(command[-2]).read_text()
            assert '"method": "eagle3"' in job and '"num_speculative_tokens": 3' in job
            Path(command[-1]).write_text("[[[5], [6, 7]]]")
        return result

    monkeypatch.setattr(module, "_run", run)
    tokenizer = type("Tokenizer", (), {"decode": lambda self, ids: str(ids)})()
    asked = (tmp_path, tmp_path / "exported", [Prompt("a prompt", [1])], 8, tokenizer)
    vllm, llama = Vllm("python"), LlamaCpp(tmp_path, "python")
    for engine, form in ((vllm, "vllm"), (llama, "llama.cpp")):
        line = serve_line(drafter, form, "place")
        assert line is not None and engine.depth(line) == 3
        found = engine.decode(line, *asked)
        expected = Decoded("[5, 6, 7]", [1, 2])
        assert found == [expected if form == "vllm" else Decoded("its text", [3], [3])]
    assert ran[-1][ran[-1].index("--spec-type") + 1] == "draft-eagle3"
    assert ran[-1][ran[-1].index("--spec-draft-n-max") + 1] == "3"
