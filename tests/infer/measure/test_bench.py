"""What a bench says of prompts that the target hardly answers."""

import pytest

from headstart.heads import OptionError
from headstart.infer import Speculator
from headstart.infer.measure.bench import bench, way_report
from headstart.infer.measure.matrix import Chat, Settings, measure_cell
from tests.support.counting import SIZE, counting_drafter, counting_rows, counting_target

NEW = 9


def counting(end: int) -> Speculator:
    """A pair whose target's answers end with this token."""
    target = counting_target()
    assert target.generation_config is not None
    target.generation_config.eos_token_id = end
    return Speculator(target, counting_drafter(target, 2), tree="chain:2")


def test_an_answer_of_one_token_has_no_speedup() -> None:
    """Nothing is decoded after the first token, so there is no time to compare."""
    rows = list(counting_rows(6, 5))
    end = int(rows[2][-1] + 1) % SIZE
    found = bench(counting(end), rows, NEW, repeats=1)
    short = found["by_prompt"][2]
    assert short["tokens"] == 1 and short["tau"] is None and "speedup_vs_plain" not in short
    others = [each["speedup_vs_plain"] for i, each in enumerate(found["by_prompt"]) if i != 2]
    for name in ("plain", "generate"):
        assert found[f"speedup_vs_{name}"]["low"] is None  # five are left
    assert found["speedup_vs_plain"]["min"] == min(others)
    assert found["speedup_vs_plain"]["max"] == max(others)
    assert found["tau_by_prompt"][2] is None and found["tau"] > 1


def test_a_category_of_such_answers_has_no_figures() -> None:
    rows = list(counting_rows(4, 5))
    pair = counting(int(rows[0][-1] + 1) % SIZE)
    kinds = ["short", "long", "long", "long"]
    chats = [Chat(str(i), kinds[i], 1, lambda _, row=row: row) for i, row in enumerate(rows)]
    cell = measure_cell(pair.model, {"way": pair}, chats, Settings(NEW, repeats=1))
    found = way_report(cell, "way", pair, chats)["by_category"]
    assert found["short"]["tau"] is None and "speedup_vs_plain" not in found["short"]
    assert found["long"]["tau"] > 1 and found["long"]["speedup_vs_plain"]["min"] > 0


def test_without_any_round_there_is_nothing_to_measure() -> None:
    (row,) = counting_rows(1, 5)
    with pytest.raises(OptionError, match="ends every text after its first token"):
        bench(counting(int(row[-1] + 1) % SIZE), [row, row], NEW, repeats=1)


def test_text_is_sampled_by_the_models_own_generation_config() -> None:
    """As `generate` and plans sample it: with its top-k, here of a single token."""
    target = counting_target()
    target.generation_config.top_k = 1  # type: ignore[union-attr]
    pair = Speculator(target, counting_drafter(target, 2), tree="chain:2")
    chats = [Chat("0", "", 1, lambda _: counting_rows(1, 5)[0])]
    settings = Settings(NEW, repeats=1, against={"generate": {}})
    cells = [measure_cell(target, {"way": pair}, chats, settings, t) for t in (0.0, 5.0)]
    greedy, sampled = ({n: d.answers[0].ids for n, d in cell.found.items()} for cell in cells)
    assert sampled == greedy and set(sampled) == {"plain", "generate", "way"}
