"""`headstart plan`: from prompts to a plan in the artifact, a table, a document and a plot."""

import io
import itertools
import json
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart.cli import main, parse
from tests.support.counting import counting_target

ROWS = "\n".join("abcdefghij"[i:] for i in range(4)) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that counts, with a token for each letter, saved as any model is."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.support.counting import SIZE, counting_target

    folder = tmp_path_factory.mktemp("model")
    letters = {chr(ord("a") + i) if i < 26 else f"<{i}>": i for i in range(SIZE)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    counting_target().save_pretrained(folder)
    return folder


@pytest.fixture
def even_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that counts the work: a microsecond each time a part of a model runs.

    What a plan chooses then follows from the trees and the texts, however busy the machine is.
    """
    from torch.nn.modules.module import register_module_forward_hook

    ran = itertools.count()
    now = [0.0]

    def count(*call: Any) -> None:
        now[0] = 1e-6 * next(ran)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with register_module_forward_hook(count):
        yield


def artifact(model: Path, folder: Path, hopeless: bool = False) -> str:
    """Four heads that put the right token first, or last."""
    from transformers import AutoModelForCausalLM

    from headstart.heads import Manifest, fingerprint, save_drafter
    from tests.support.counting import counting_drafter

    target: Any = AutoModelForCausalLM.from_pretrained(model)
    drafter = counting_drafter(target, heads=4)
    if hopeless:
        assert drafter.output is not None
        drafter.output.data.neg_()
    save_drafter(drafter, folder, Manifest("medusa", str(model), fingerprint(target)))
    return str(folder)


def command(heads: str, folder: Path, *more: str) -> list[str]:
    (folder / "prompts.txt").write_text(ROWS)
    prompts = ["--prompts", str(folder / "prompts.txt"), "--new-tokens", "12", "--max-nodes", "8"]
    few = ["--measure", "1", "--report", str(folder / "report")]
    return ["plan", "--drafter", heads, *prompts, *few, *more]


def test_a_plan_belongs_into_an_artifact(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said at once, and not when all has been measured."""
    assert main(command(str(model), tmp_path, "--target", str(model))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no artifact" in line and "headstart convert" in line


@pytest.mark.usefixtures("even_clock")
def test_a_drafter_that_pays(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = artifact(model, tmp_path / "heads")
    assert main(command(heads, tmp_path, "--json", "--measure", "2", "--batch-size", "2")) == 0
    document = json.loads(capsys.readouterr().out)
    best, *_ = document["candidates"]
    assert document["policy"] == best["name"] and document["tree"] == best["tree"]
    assert document["tau"] > 1.5 and document["speedup"] >= 1.02
    assert document["batch_size"] == 2 and document["prompts"] == 4
    assert sum(c["measured_speedup"] is not None for c in document["candidates"]) == 2
    (key,) = json.loads((tmp_path / "heads" / "plan.json").read_text())
    assert key.endswith(", float32, batch 2")
    printed = " ".join(table(command(heads, tmp_path, "--limit", "3"), capsys).split())
    assert "decodes fastest: it is expected to write" in printed and "chain:4" in printed
    assert "holds for text like that of these 3 prompts" in printed
    assert f"The plan is in {tmp_path / 'heads' / 'plan.json'}" in printed
    path = tmp_path / "heads" / "plan.json"
    plans = json.loads(path.read_text())
    assert [key.rpartition(" ")[2] for key in plans] == ["2", "1"]

    # Both are shown by `inspect`; one for other weights is said to be of no use.
    plans[key]["weights_sha256"] = "0" * 64
    path.write_text(json.dumps(plans))
    shown = json.loads(table(["inspect", heads, "--json"], capsys))["plans"]
    assert [(plan["batch_size"], plan["current"]) for plan in shown] == [(2, False), (1, True)]
    for name in ("policy", "tree", "tau", "speedup", "device", "dtype"):
        assert shown[0][name] == document[name]
    printed = " ".join(table(["inspect", heads], capsys).split())
    first = f"{best['name']}, τ {document['tau']:.2f}, {document['speedup']:.2f} × plain"
    assert f"plan for other weights, not used ({first}): {document['device']}" in printed
    assert "one prompt at a time" in printed and "2 prompts at a time" in printed
    path.write_text(path.read_text()[:99])
    assert main(["inspect", heads]) == 1
    assert "no plan that headstart wrote" in " ".join(capsys.readouterr().out.split())


def table(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("even_clock")
def test_a_drafter_that_does_not_pay(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import headstart
    from headstart.heads.artifacts.source import DrafterSource

    heads = artifact(model, tmp_path / "heads", hopeless=True)
    printed = " ".join(table(command(heads, tmp_path), capsys).split())
    assert "nothing pays: the best tree" in printed and "is to decode plainly" in printed
    target: Any = headstart.load(str(model)).model
    (plan,) = DrafterSource(heads).plans(target)
    assert (plan.policy, plan.tree) == ("plain", [])
    loaded = headstart.load(target, heads)
    assert loaded.drafter is None and str(loaded.tree) == "plain"
    assert "plan plain decoding, nothing pays:" in " ".join(
        table(["inspect", heads], capsys).split()
    )
    assert headstart.load(target, heads, tree="chain:2").drafter is not None
    assert "nothing pays" in table(command(heads, tmp_path), capsys)  # it can be planned again


def planned_plainly(folder: Path, target: Any) -> None:
    """Write the plan that nothing pays on this machine."""
    from headstart.heads.artifacts.plan import Plan, machine, write_plan

    where = machine(target), "float32"
    write_plan(folder, Plan(*where, 1, "plain", [], 1, 1, [[0.1]], {}, [], 4, 8))


def test_what_needs_the_drafter_has_it_whatever_the_plan_is(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import io

    import headstart

    heads = artifact(model, tmp_path / "heads")
    planned_plainly(tmp_path / "heads", headstart.load(model).model)
    assert headstart.load(model, heads).drafter is None
    assert main(["export", heads, str(tmp_path / "out"), "--to", "original"]) == 0
    dry = ["push", heads, "me/heads", "--license", "mit", "--target-name", "me/target", "--dry-run"]
    assert "in the branch vllm" in table([*dry, "--export", "vllm"], capsys)
    monkeypatch.setattr("sys.stdin", io.StringIO("/fast\n"))
    assert main(["chat", "--drafter", heads]) == 0
    said = capsys.readouterr().err
    assert "the drafter's plan is plain decoding" in said and "nothing drafts here" in said


def test_it_is_told_that_nothing_is_drafted_by_plan(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a drafter that is not used looks like one of τ 1."""
    import headstart

    heads = artifact(model, tmp_path / "heads")
    planned_plainly(tmp_path / "heads", headstart.load(model).model)
    (tmp_path / "two.txt").write_text("hello there\nwhat is it\n")
    bench = ["bench", "--drafter", heads, "--prompts", str(tmp_path / "two.txt"), "--repeats", "1"]
    bench += ["--new-tokens", "4", "--report", str(tmp_path / "bench")]
    said = "the plan of medusa is plain decoding there (--tree drafts all the same)"
    assert said in " ".join(table(bench, capsys).split())
    page = " ".join((tmp_path / "bench/report.html").read_text().split())
    assert said in page and "medusa drafts nothing here, and decodes" in page
    assert "No drafted token was accepted" in page and "Drafted at depth" not in page
    assert "4 new tokens per answer, 1 repeat, medians" in page
    generate = ["generate", "--drafter", heads, "--prompt", "hi", "--max-new-tokens", "4"]
    assert main(generate) == 0
    assert "nothing was drafted: the drafter's plan is plain" in capsys.readouterr().err
    for tree in ("plain", "chain:2"):  # somebody chose it
        assert said not in " ".join(table([*bench, "--tree", tree], capsys).split())
        assert main([*generate, "--tree", tree]) == 0
        assert "nothing was drafted" not in capsys.readouterr().err


def test_plans_that_are_for_something_else_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headstart.heads.artifacts.plan import Plan, write_plan

    heads = artifact(model, tmp_path / "heads")
    other = Plan(
        "NVIDIA L40", "bfloat16", 1, "chain:2", [[0], [0, 0]], 2, 1.5, [[0.9]], {}, [], 4, 8
    )
    path = write_plan(tmp_path / "heads", other)
    (tmp_path / "two.txt").write_text("a b c\nd e f\n")
    bench = ["bench", "--drafter", heads, "--prompts", str(tmp_path / "two.txt"), "--repeats", "1"]
    bench += ["--new-tokens", "4", "--against", "none", "--report", "none"]
    printed = " ".join(table(bench, capsys).split())
    assert "has plans for NVIDIA L40, bfloat16, and none for " in printed
    assert "has plans" not in table([*bench, "--tree", "chain:2"], capsys)
    path.unlink()
    planned_plainly(tmp_path / "heads", counting_target())
    assert "has plans" not in table(bench, capsys)
    path.write_text(path.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))
    assert "plans for other weights, which are not used" in " ".join(table(bench, capsys).split())


def test_a_plans_page_says_which_text_it_holds_for() -> None:
    from headstart.heads.artifacts.plan import Plan
    from headstart.reports.plans import held_for

    warm = Plan("cpu", "float32", 1, "plain", [], 1, 1, [[0.1]], {}, [], 4, 8, temperature=0.8)
    assert "4 prompts, written at temperature 0.8; other temperatures" in held_for(warm)
    assert "written greedily; at a temperature above 0 fewer" in held_for(
        replace(warm, temperature=0)
    )


def test_an_assistant_is_found_whatever_its_plan_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    from headstart.heads import Manifest, family, fingerprint, save_drafter

    target: Any = AutoModelForCausalLM.from_pretrained(model)
    cls: Any = family("draft_model")
    drafter = cls(cls.config_class.for_target(target, layers=[0])).bind(target)
    drafter.init_from_target(None)
    heads = tmp_path / "student"
    save_drafter(drafter, heads, Manifest("draft_model", str(model), fingerprint(target)))
    planned_plainly(heads, target)
    (tmp_path / "prompts.txt").write_text(ROWS)
    given = ["bench", "--drafter", str(heads), "--prompts", str(tmp_path / "prompts.txt")]
    # More than the assistant drafts at first: those tokens come with the first, and are not timed.
    small = ["--limit", "2", "--new-tokens", "64", "--repeats", "1", "--report", "none", "--json"]
    found = json.loads(table([*given, *small, "--against", "assistant"], capsys))
    assert found["speedup_vs_assistant"]["median"] > 0 and found["tree"] == "plain"


@pytest.mark.usefixtures("even_clock")
def test_a_plan_is_followed_by_what_decodes_as_it_was_planned(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both go by the same trial, unless they are told otherwise."""
    from headstart.heads.artifacts.plan import read_plans
    from headstart.inputs import load_speculator

    heads = artifact(model, tmp_path / "heads")
    given = Namespace(target=None, drafter=heads, tree=None, rule=None)
    for pays, option, compiled in (
        (True, [], True), (False, [], False), (True, ["--compile", "off"], False),
    ):  # fmt: skip
        monkeypatch.setattr("headstart.infer.target.packing_pays", lambda model, pays=pays: pays)
        (tmp_path / "heads" / "plan.json").unlink(missing_ok=True)
        printed = table(command(heads, tmp_path, *option), capsys)
        (plan,) = read_plans(tmp_path / "heads")
        assert plan.compiled == compiled
        given.compile = parse(["generate", *option]).compile
        loaded = load_speculator(given)
        assert loaded.target.compile == ("packed" if compiled else False)
        by = loaded.target.forwards  # as bench names it
        said = "by torch alone" if by == "torch" else f"with {by}"
        assert plan.forwards == by and f"forwards {said}" in " ".join(printed.split())
        assert [list(path) for path in loaded.tree.paths] == plan.tree  # type: ignore[union-attr]
    assert "faster forwards" not in table(["inspect", heads], capsys)


@pytest.mark.usefixtures("even_clock")
def test_each_request_follows_the_plan_of_its_kind(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    import headstart
    from headstart.heads.artifacts.plan import read_plans, write_plan

    heads = artifact(model, tmp_path / "heads")
    options = "--temperature", "0.7", "--compile", "off"
    printed = " ".join(table(command(heads, tmp_path, *options), capsys).split())
    assert "one prompt at a time at temperature 0.7)" in printed
    assert "written at temperature 0.7; other temperatures need plans of their own" in printed
    (sampled,) = read_plans(Path(heads))
    assert sampled.temperature == 0.7
    assert "at temperature 0.7" in " ".join(table(["inspect", heads], capsys).split())

    def decoded(count: int, **options: Any) -> int:
        """The deepest level of the tree that a request was decoded with."""
        loaded.generate(torch.ones(count, 3, dtype=torch.long), max_new_tokens=4, **options)
        return loaded.stats.depth

    write_plan(Path(heads), replace(sampled, temperature=0.7, tree=[[0], [0, 0]]))
    loaded = headstart.load(str(model), heads, compile=False)
    assert decoded(1) == 4  # what the artifact has for greedy text, not the plan for other text
    assert decoded(1, do_sample=True, temperature=0.8) == 2
    write_plan(Path(heads), replace(sampled, batch_size=4, temperature=0.0, tree=[[0]]))
    write_plan(Path(heads), replace(sampled, batch_size=4, temperature=1.0, tree=[]))
    loaded = headstart.load(str(model), heads, compile=False)
    assert [decoded(count) for count in (1, 4, 9)] == [4, 1, 1]
    assert decoded(4, do_sample=True, temperature=0.9) == 0  # plain decoding
    assert decoded(1, do_sample=True, temperature=0.9) == 2
    assert headstart.load(str(model), heads, tree="chain:3").tree_of(4, 0.9).max_depth == 3


@pytest.mark.parametrize("kinds", [[], [(0, 0.0)], [(1, -0.5)], [1], [(1, 0.0), "greedy"]])
def test_trees_of_requests_that_cannot_be_are_refused(model: Path, kinds: list[Any]) -> None:
    import headstart
    from headstart.heads import OptionError

    with pytest.raises(OptionError, match="a batch size from 1 and a temperature from 0"):
        headstart.load(str(model), tree=dict.fromkeys(kinds, "plain"))


@pytest.mark.parametrize("columns", [40, 50, 60, 80])
def test_names_and_figures_are_whole_in_any_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.heads.artifacts.plan import Plan
    from headstart.reports.plans import print_plan

    monkeypatch.setenv("COLUMNS", str(columns))
    figures = {"tau": 4.65, "round_ms": 44.4, "speedup": 2.28, "measured_speedup": 2.86}
    best = {"name": "sparse:8", "nodes": 8, "depth": 5, "measured_tau": 4.6, **figures}
    costs: dict[str, Any] = {"plain": 2.1, "verify": {}, "begin": 0.5, "extend": {}}
    print_plan(
        Plan("cpu", "float32", 1, "sparse:8", [[0]], 4.65, 2.86, [[0.5]], costs, [best], 12, 96),
        out := io.StringIO(),
    )
    header, row = out.getvalue().splitlines()[3:5]
    assert "…" not in header + row and max(map(len, (header, row))) <= columns
    assert row.split()[:1] == ["sparse:8"] and {"4.65", "2.28", "2.86"} <= set(row.split())
    assert ("44.40" in row) == (columns >= 60)


def test_the_plot_is_drawn(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    heads = artifact(model, tmp_path / "heads")
    plot = tmp_path / "plan.png"
    assert main(command(heads, tmp_path, "--plot", str(plot), "--measure", "1")) == 0
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "plan.xyz"], "expected a file in an existing folder"),
        (["--plot", "nowhere/plan.png"], "expected a file in an existing folder"),
        (["--batch-size", "9"], "found 4 prompts, batch size 9"),
        (["--max-nodes", "1"], "expected a whole number from 2"),
        (["--measure", "-1"], "expected a whole number from 0"),
    ],
)
def test_mistakes_take_one_line(
    arguments: list[str],
    said: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heads = artifact(model, tmp_path / "heads")
    assert main(command(heads, tmp_path, *arguments)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("headstart: error: ") and said in error
    assert not (tmp_path / "heads" / "plan.json").exists()


def test_without_matplotlib_the_extra_is_named(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(command("heads", tmp_path, "--plot", str(tmp_path / "plan.png"))) == 2
    assert "pip install matplotlib" in capsys.readouterr().err.splitlines()[-1]
