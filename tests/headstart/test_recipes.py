"""`headstart recipes`: what is shipped, and what it takes by estimate."""

import json
import subprocess
import sys

import pytest

from headstart.cli import main
from headstart.reports import recipes
from headstart.train.recipe import shipped_combinations, shipped_parts, shipped_recipes


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["recipes", *arguments]) == 0
    return capsys.readouterr().out


def test_all_are_listed_with_their_estimates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    text = said(capsys, "--estimates")
    lines = text.splitlines()
    for name in [*shipped_recipes(), *shipped_parts()]:
        assert any(line.startswith(f"{name} ") for line in lines), name
    rows = {line.split()[0]: line.rstrip() for line in lines if line.strip()}
    rows = {name: row for name, row in rows.items() if name.count("+") == 2}
    assert rows.keys() == {*shipped_combinations()}
    assert "everything from nothing" in text and "Estimates by arithmetic, nothing was" in text
    assert rows["lookup+qwen3-8b+1x80gb"].endswith("–")  # no text, no training
    assert " GB " in rows["medusa+qwen3-8b+1x80gb"] and "h" in rows["medusa+qwen3-8b+1x24gb"]


@pytest.mark.parametrize("width", [80, 60])
def test_figures_are_whole_on_narrow_terminals(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = said(capsys, "draft-model", "1x80gb").splitlines()
    (header,) = (line for line in lines if line.startswith("estimate for"))
    assert header.split()[2:] == ["drafter", "memory", "disk", "text", "training"]
    rows = [line for line in lines if line.startswith("draft-model+")]
    assert len(rows) == 4 and all(row.count(" GB ") == 2 for row in rows)
    assert "…" not in "".join(lines) and max(map(len, lines)) <= width
    if width == 80:
        assert rows[0].split()[0] in shipped_combinations()


def test_without_parts_the_names_are_listed_and_no_torch_is_imported() -> None:
    code = (
        "import sys; from headstart.cli import main; status = main(['recipes']); "
        "sys.exit({'torch', 'transformers'} & set(sys.modules) or status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert list(shipped_recipes()) == sorted(shipped_recipes())
    for name in [*shipped_recipes(), *shipped_parts()]:
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert "`headstart recipes PART…`" in done.stdout and "estimate for" not in done.stdout


def test_parts_choose_and_a_single_recipe_is_shown_in_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = json.loads(said(capsys, "medusa", "8x80gb", "--json"))
    assert [*found] == ["estimates"] and len(found["estimates"]) == 4
    one = json.loads(said(capsys, "eagle3+mistral-7b+8x80gb", "--json"))["estimates"]
    ((name, of),) = one.items()
    assert name == "eagle3+mistral-7b+8x80gb" and of["launch"] == "ddp" and of["fits"]
    text = said(capsys, name)
    assert f"{name}: estimates by arithmetic" in text
    assert "memory: peak" in text and "time: training" in text
    assert "35% of the GPU's peak" in text and "40% of distill.prefix_tokens" in text
    assert all(f"assumed: {what}" in text for what, _ in recipes._ASSUMED.values())
    assert recipes._ASSUMED.keys() == of["assumed"].keys()
    assert f"ddp) --num_processes 8 -m headstart.train {name} corpus.source=" in text
    text = said(capsys, "eagle3+mistral-7b+1x80gb")
    assert "headstart train eagle3+mistral-7b+1x80gb corpus.source=PROMPTS.jsonl" in text


def test_a_whole_recipe_is_shown_as_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    path = shipped_recipes()["own-model"]
    assert said(capsys, "own-model") == f"# {path}\n{path.read_text()}"
    assert json.loads(said(capsys, "own-model", "--json"))["recipe"] == str(path)
    # A family's part may have the same name: its combinations follow.
    path = shipped_recipes()["draft-model"]
    text = said(capsys, "draft-model")
    assert text.startswith(f"# {path}\n{path.read_text()}")
    assert "draft-model+qwen3-8b+1x24gb" in text and "\nmedusa+" not in text


def test_a_whole_recipe_is_no_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "own-model", "medusa"]) == 2
    assert "'own-model' is a whole recipe and no part of others" in capsys.readouterr().err


def test_parts_that_no_recipe_joins_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "medusa", "eagle"]) == 2
    done = capsys.readouterr()
    assert not done.out and "no recipe has all of medusa, eagle; a recipe has one" in done.err


def test_an_unknown_part_is_answered_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "medusa", "llama"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no part 'llama' (did you mean 'llama-3.1-8b'?)" in error
