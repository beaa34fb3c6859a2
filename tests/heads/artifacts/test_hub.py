"""Push, update, load by name: the real client and the real command line against a local Hub."""

import base64
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from headstart.cli import main
from headstart.heads import ArtifactError, Manifest, fingerprint, save_drafter
from headstart.heads.artifacts.files import TREE
from headstart.heads.artifacts.manifest import sha256, tokenizer_hash
from headstart.heads.artifacts.publish import clean_copy
from headstart.heads.medusa import Medusa, MedusaConfig
from tests.support.bytewise import save_target
from tests.support.hub_server import TOKEN, Hub, serving
from tests.support.paths import ROOT
from tests.support.tiny import one_line

PROMPT = "a prompt that nobody else may read"
PLACE = "me/drafter"
NOWHERE = "http://127.0.0.1:9"

# Reads a line [token, command lines], runs them, and answers with a line of what each gave:
# [status, stdout, stderr]. Two commands are not of the command line: `load` does in Python what
# `generate` does there, and `downloads` prints how often the Hub's client was asked for a snapshot
# since the last time.
CLIENT = """
import contextlib, io, json, os, sys
from headstart import cli
from headstart.heads.artifacts import hub

names, snapshot_download = [], hub.snapshot_download

def counted(name, **options):
    names.append(name)
    return snapshot_download(name, **options)

hub.snapshot_download = counted

def main(arguments):
    if arguments[0] == "downloads":
        print(len(names))
        names.clear()
        return 0
    if arguments[0] != "load":
        return cli.main(arguments)
    import headstart
    target, drafter, prompt, new_tokens = arguments[1:]
    speculator = headstart.load(target, drafter)
    ids = speculator.tokenizer(prompt, return_tensors="pt").input_ids
    text = speculator.generate(ids, max_new_tokens=int(new_tokens), do_sample=False)
    print(speculator.tokenizer.decode(text[0, ids.shape[1]:], skip_special_tokens=True))
    assert speculator.stats.rounds and speculator.drafter is not None
    return 0

for line in sys.stdin:
    os.environ["HF_TOKEN"], commands = json.loads(line)
    results = []
    for arguments in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
        results.append([status, out.getvalue(), err.getvalue()])
    print(json.dumps(results), flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: `target/`, a tiny Llama with a tokenizer, and `heads/`, drafter and card."""
    folder = tmp_path_factory.mktemp("run")
    model, tokenizer = save_target(folder / "target")
    write_heads(folder, model, tokenizer)
    return folder


def write_heads(folder: Path, model: Any, tokenizer: Any) -> None:
    from headstart.train.drafter_stage import training_card
    from headstart.train.recipe import load_recipe

    drafter = Medusa(MedusaConfig.for_target(model, heads=2)).bind(model)
    torch.nn.init.normal_(drafter.weight, std=0.2)
    corpus = folder / "secret corpus.txt"
    recipe = load_recipe("quickstart", [f"corpus.source={corpus}", f"output={folder}"])
    tree = [[0], [1], [0, 0]]
    manifest = Manifest(
        family="medusa",
        target=str(folder / "target"),
        target_fingerprint=fingerprint(model),
        tokenizer_hash=tokenizer_hash(tokenizer),
        recipe=recipe.to_dict(),
        metrics={
            "tau": 1.5, "tree": tree, "acceptance_by_depth": [0.3, None], "steps": 9, "seconds": 2,
        },
    )  # fmt: skip
    heads = save_drafter(drafter, folder / "heads", manifest, training_card(recipe, manifest))
    (heads / TREE).write_text(json.dumps(tree))
    (heads / "acceptance.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (heads / "stage.json").write_text("{}")  # what a run leaves beside the artifact
    (heads / "checkpoints" / "checkpoint-9").mkdir(parents=True)
    (heads / "checkpoints" / "checkpoint-9" / "optimizer.pt").write_bytes(b"state")


class Machine:
    """A machine with a cache: one process with the real client, which takes a while to start."""

    def __init__(self, hub: Hub, home: Path, **env: str):
        self.home, self.log = home, home.with_name(f"{id(self)}.log")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        self.env |= {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1",
        } | env  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CLIENT], cwd=ROOT, env=self.env, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def __call__(self, *commands: list[str], token: str = TOKEN) -> list[tuple[int, str, str]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([token, commands]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer and TOKEN not in answer + self.log.read_text(), self.log.read_text()
        return [tuple(result) for result in json.loads(answer)]

    def errors(self, *commands: list[str], token: str = TOKEN) -> list[str]:
        """The one line that each command ends with; a progress bar may come before it."""
        lines = []
        for status, out, err in self(*commands, token=token):
            assert status == 2 and out == "", (status, out, err)
            *before, line = err.splitlines()
            assert line.startswith("headstart: error: ")
            assert all(not bar or "Fetching" in bar for bar in before), err
            lines.append(line)
        return lines

    def stop(self) -> None:
        self.process.communicate()  # at the end of its commands it ends
        assert self.process.returncode == 0, self.log.read_text()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Machine]]:
    with serving() as hub:
        machine = Machine(hub, tmp_path_factory.mktemp("machine") / "home")
        yield hub, machine
        machine.stop()


@pytest.fixture
def hub(started: tuple[Hub, Machine]) -> Hub:
    """An empty Hub, and a machine that has downloaded nothing."""
    hub, machine = started
    hub.repositories.clear()
    hub.objects.clear()
    hub.requests.clear()
    shutil.rmtree(machine.home, ignore_errors=True)
    return hub


@pytest.fixture
def machine(hub: Hub, started: tuple[Hub, Machine]) -> Machine:
    return started[1]


def push(run: Path, *more: str, place: str = PLACE) -> list[str]:
    return ["push", str(run / "heads"), place, "--target-name", "me/base", *more]


def generate(run: Path, drafter: str) -> list[str]:
    command = ["generate", "--target", str(run / "target"), "--drafter", drafter]
    return [*command, "--prompt", PROMPT, "--max-new-tokens", "24"]


def copied(run: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of a run's drafter, and an empty folder for what is published of it."""
    heads, out = folder / "heads", folder / "out"
    out.mkdir()
    copy_of(run, heads)
    return heads, out


def test_push_update_load(hub: Hub, machine: Machine, run: Path) -> None:
    """The whole way: dry run, push, push again, load by name, decode, and once more offline."""
    dry, first, again, named, local, plain, loaded = machine(
        push(run, "--dry-run"),
        push(run, "--license", "apache-2.0"),
        push(run, "--license", "apache-2.0"),
        generate(run, PLACE),
        generate(run, str(run / "heads")),
        generate(run, PLACE)[:3] + generate(run, PLACE)[5:],
        ["load", str(run / "target"), PLACE, PROMPT, "24"],
    )
    statuses = [status for status, *_ in (dry, first, again, named, local, plain, loaded)]
    assert statuses == [0] * 7, (dry, first, again, named, loaded)
    assert "acceptance.png" in dry[1] and "drafter for `me/base`" in dry[1]
    assert "optimizer" not in dry[1] and "stage.json" not in dry[1]
    assert first[1] == again[1] == f"{hub.url}/{PLACE}\n"

    repository = hub.repositories[PLACE]
    files = repository.files()
    assert set(files) == {
        ".gitattributes", "config.json", "model.safetensors", "headstart.json", "tree.json",
        "README.md", "acceptance.png",
    }  # fmt: skip
    assert files["acceptance.png"] == (run / "heads" / "acceptance.png").read_bytes()
    assert len(repository.commits) == 2, "the second push changed nothing"
    assert files["model.safetensors"] == (run / "heads" / "model.safetensors").read_bytes()
    assert not repository.private

    assert named[1] == local[1] == plain[1] != ""
    assert loaded[1].rstrip() == named[1].rstrip()
    assert "rounds" in named[2] and named[2].split()[1] == local[2].split()[1]  # the same τ
    offline_machine = Machine(hub, machine.home, HF_HUB_OFFLINE="1", HF_ENDPOINT=NOWHERE)
    offline, unknown, pushed = offline_machine(
        generate(run, PLACE), ["inspect", "me/unknown"], push(run)
    )
    offline_machine.stop()
    assert offline[:2] == (0, named[1])
    for status, _, err in (unknown, pushed):
        assert status == 2 and "HF_HUB_OFFLINE is set" in err and len(err.splitlines()) == 1

    no_secret_left_home(hub, run, machine.home, [dry, first, again, named])


def no_secret_left_home(hub: Hub, run: Path, home: Path, printed: list) -> None:
    """Neither the token, the prompt nor a path of this machine is anywhere but where it belongs."""
    sent = [body for request in hub.requests for body in bodies(request.body)]
    urls = [request.path.encode() for request in hub.requests]
    others = [
        f"{key}: {value}".encode()
        for request in hub.requests
        for key, value in request.headers.items()
        if key.lower() != "authorization"
    ]
    cached = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    logs = [(out + err).encode() for _, out, err in printed]
    places = [*sent, *urls, *others, *cached]
    for secret in (TOKEN, PROMPT, str(run), "secret corpus.txt/"):
        assert not any(secret.encode() in place for place in places), secret
    assert not any(word.encode() in log for log in logs for word in (TOKEN, PROMPT))
    # The control: the same search finds what was sent, the token where it must be.
    assert any(b"draft_vocab_size" in body for body in sent)
    assert any(f"Bearer {TOKEN}" in str(request.headers) for request in hub.requests)


def bodies(body: bytes) -> list[bytes]:
    """A request's body, and what it holds in base64."""
    inside = re.findall(rb'"(?:content|sample)": ?"([A-Za-z0-9+/=]{16,})"', body)
    return [body, *map(base64.b64decode, inside)]


def test_the_pushed_texts(run: Path, tmp_path: Path) -> None:
    files = clean_copy(run / "heads", tmp_path, "me/drafter@v2", "me/base", {"license": "mit"})
    assert [file.name for file in files] == [
        "config.json", "model.safetensors", "headstart.json", "tree.json",
        "acceptance.png", "README.md",
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "headstart.json").read_text())
    assert manifest["target"] == "me/base"
    assert manifest["recipe"]["corpus"]["source"] == "secret corpus.txt"
    assert manifest["recipe"]["output"] == run.name
    assert manifest["weights_sha256"] == sha256(tmp_path / "model.safetensors")
    _, front, body = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "headstart",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "medusa", "headstart"],
        "base_model": "me/base",
        "license": "mit",
    }
    assert "drafter for `me/base`" in body and "1.50" in body
    (code,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    compile(code, "README.md", "exec")
    assert 'headstart.load("me/base", "me/drafter@v2"' in code
    assert "PATH OF" not in body and str(run) not in body


OTHER = ("--license", "other", "--license-name", "our-licence-1.0")
LINK = "--license-link", "https://example.com/licence"


def test_a_licence_that_the_hub_does_not_know(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(push(run, "--dry-run", *OTHER, *LINK)) == 0
    _, front, _ = capsys.readouterr().out.split("README.md\n\n")[-1].split("---\n", 2)
    said = yaml.safe_load(front)
    assert said["license"] == "other" and said["license_name"] == OTHER[-1]
    assert said["license_link"] == LINK[-1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (OTHER[:2], "--license other: expected its name and the address"),
        (OTHER, "--license other: expected its name and the address"),
        ((*OTHER[:2], *LINK), "--license other: expected its name and the address"),
        ((*OTHER, LINK[0], "LICENSE"), "--license other: expected its name and the address"),
        (LINK, "expected --license other with them"),
        (("--license", "mit", *OTHER[2:]), "expected --license other with them"),
    ],
)
def test_licences_that_are_refused(
    run: Path, given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(push(run, "--dry-run", *given)) == 2
    assert said in capsys.readouterr().err


def test_relative_paths_are_cut_whether_or_not_they_exist(run: Path, tmp_path: Path) -> None:
    """Names of the Hub stay; a known folder's files are cut too, in each file that is pushed."""
    from headstart.train.drafter_stage import training_card
    from headstart.train.recipe import load_recipe

    heads, out = copied(run, tmp_path)
    settings = [
        "corpus.source=stdlib", "output=acme/runs",
        "corpus.sources=[{source: acme/merger/prompts.jsonl}, {source: acme/a/*.txt}, "
        "{source: 'hub:me/set'}]",
        "distill.drafter=me/head@v2", "distill.earlier=acme/old/distill/",
        "train.from=./acme/old/heads", "decode.tree=acme/trees/t.json",
        "distill.openai={model: acme/models/big, url: 'http://acme.corp:8000/v1'}",
    ]  # fmt: skip
    recipe = load_recipe("quickstart", settings)
    told = json.loads((heads / "headstart.json").read_text())
    sources = [part.source for part in recipe.corpus.parts()]
    commit = "0123456789" * 4
    adapted = {"adapted": {"from": "acme/heads"}}
    told |= {"recipe": recipe.to_dict(), "metrics": told["metrics"] | adapted}
    told |= {"origin": f"me/medusa@{commit}", "trained": {"data": {"sources": sources}}}
    (heads / "headstart.json").write_text(json.dumps(told))
    manifest = Manifest(**told | {"metrics": told["metrics"] | {"adapted": None}, "trained": {}})
    (heads / "README.md").write_text(
        training_card(recipe, manifest) + "\nSee acme/runs/quickstart/heads and acme/old/distill.\n"
    )
    (heads / "config.json").write_text(
        json.dumps(json.loads((heads / "config.json").read_text()) | {"note": "acme/runs/x/target"})
    )
    for file in clean_copy(heads, out, "me/drafter", "me/base"):
        assert b"acme/" not in file.read_bytes(), file.name
        assert b"acme.corp" not in file.read_bytes(), file.name
    cleaned = json.loads((out / "headstart.json").read_text())
    found = cleaned["recipe"]
    expected = ["prompts.jsonl", "*.txt", "hub:me/set"]
    assert [part["source"] for part in found["corpus"]["sources"]] == expected
    assert cleaned["trained"]["data"]["sources"] == expected
    assert (found["output"], found["distill"]["earlier"]) == ("runs", "distill")
    assert (found["train"]["from"], found["decode"]["tree"]) == ("heads", "t.json")
    assert found["distill"]["openai"]["url"] == "http://HOST/v1"
    assert (found["distill"]["drafter"], cleaned["origin"]) == ("me/head@v2", told["origin"])
    assert cleaned["metrics"]["adapted"]["from"] == "heads"
    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["me/set"]
    assert "`prompts.jsonl`, `*.txt`, `hub:me/set`" in card and "See heads and distill." in card


def test_every_text_of_a_recipe_is_a_path_or_none() -> None:
    """A new setting must be told to be one or the other, so that `push` publishes no path."""
    from headstart.heads.artifacts.local_paths import PATHS
    from headstart.train.recipe import Recipe

    no_paths = {
        "name", "shares", "drafter.family", "target.revision",
        "target.attn_implementation", "corpus.config", "corpus.split", "corpus.revision",
        "corpus.sources.config", "corpus.sources.split", "corpus.sources.revision", "chat.system",
        "distill.openai.api_key_env",
    }  # fmt: skip
    known = {field.removeprefix("recipe.") for field in PATHS} | no_paths
    assert texts_of(Recipe) - known == set()
    assert "corpus.source" in texts_of(Recipe)  # the search finds them


def texts_of(section: Any, prefix: str = "") -> set[str]:
    """The settings of a section that may be any text, with their keys joined by dots."""
    found = set()
    for field in dataclasses.fields(section):
        key = prefix + field.name.removesuffix("_")
        members = {field.type, *typing.get_args(field.type)}
        inner = next((each for each in members if dataclasses.is_dataclass(each)), None)
        if inner is not None:
            found |= texts_of(inner, f"{key}.")
        elif "validator" not in field.metadata and field.type in (str, str | None):
            found.add(key)
    return found


def test_a_card_by_hand_and_a_label(run: Path, tmp_path: Path) -> None:
    """What the owner wrote stays; a target that is on no Hub is no base_model."""
    heads, out = copied(run, tmp_path)
    (heads / "README.md").write_text(
        f"---\ntags: mine\nlanguage: en\n---\nSee {heads}/notes.md, {run}/target, https://h/a/b "
        "and the route /v1/chat.\n"
    )
    clean_copy(heads, out, "me/drafter", "our own 7B")
    _, front, body = (out / "README.md").read_text().split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["tags"] == ["mine", "headstart", "speculative-decoding", "medusa"]
    assert data["language"] == "en" and "base_model" not in data
    assert body == "See notes.md, our own 7B, https://h/a/b and the route /v1/chat.\n"
    (heads / "README.md").unlink()
    clean_copy(heads, out, "me/drafter", "me/base")
    assert 'headstart.load("me/base", "me/drafter")' in (out / "README.md").read_text()


@pytest.mark.parametrize("written", [True, False])
def test_a_card_says_how_to_install_and_what_to_load(
    written: bool, run: Path, tmp_path: Path
) -> None:
    """A label names no model: the example asks for the target's folder."""
    heads, out = copied(run, tmp_path)
    if not written:
        (heads / "README.md").unlink()
    clean_copy(heads, out, "me/drafter", "our own 7B")
    card = (out / "README.md").read_text()
    assert "pip install ." in card
    assert 'headstart.load("PATH OF THE TARGET", "me/drafter")' in card
    assert "`our own 7B`, is not on the Hub" in card
    clean_copy(heads, out, "me/drafter", "me/base")
    card = (out / "README.md").read_text()
    assert "pip install ." in card and "PATH OF" not in card and "not on the Hub" not in card


def copy_of(run: Path, heads: Path) -> None:
    heads.mkdir()
    for file in (run / "heads").iterdir():
        if file.is_file():
            (heads / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(
    ("name", "target", "spoil", "said"),
    [
        ("me/drafter", None, None, "--target-name"),
        ("me/drafter", "{run}/target", None, "a path on this machine"),
        ("me/drafter", " ", None, "--target-name"),
        ("drafter", "me/base", None, "expected ORG/NAME"),
        ("me/a/b", "me/base", None, "expected ORG/NAME"),
        ("../x", "me/base", None, "expected ORG/NAME"),
        ("me/drafter", "me/base", ("README.md", "---\na: [\n---\n"), "front matter"),
        ("me/drafter", "me/base", ("README.md", "---\ntags: 5\n---\n"), "front matter"),
        ("me/drafter", "me/base", ("README.md", "\udcff"), "README.md is no text in UTF-8"),
        ("me/drafter", "me/base", ("README.md", f"log in with {TOKEN}"), "access token"),
        ("me/drafter", "me/base", ("model.safetensors", "gone"), "model.safetensors"),
        ("me/drafter", "me/base", ("tree.json", "["), "tree.json"),
    ],
)
def test_what_is_not_pushed(
    name: str, target: str | None, spoil: Any, said: str, run: Path, tmp_path: Path
) -> None:
    heads, out = copied(run, tmp_path)
    if spoil:
        (heads / spoil[0]).write_text(spoil[1], encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ArtifactError) as caught:
        clean_copy(heads, out, name, target and target.format(run=run))
    assert said in one_line(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("revision", ["", "0" * 40])
def test_a_folder_that_is_gone_is_no_name_of_the_hub(
    revision: str, run: Path, tmp_path: Path
) -> None:
    """Of a model of the Hub the commit was recorded, of a folder none."""
    heads, out = copied(run, tmp_path)
    manifest = json.loads((heads / "headstart.json").read_text())
    manifest |= {"target": "models/mine", "target_revision": revision}
    (heads / "headstart.json").write_text(json.dumps(manifest))
    if revision:
        assert "base_model: models/mine" in clean_copy(heads, out, PLACE)[-1].read_text()
        return
    with pytest.raises(ArtifactError, match=r"no commit of it was recorded; .* --target-name"):
        clean_copy(heads, out, PLACE)


def test_a_card_with_a_byte_order_mark_keeps_its_front_matter(run: Path, tmp_path: Path) -> None:
    copy_of(run, tmp_path / "heads")
    card = tmp_path / "heads" / "README.md"
    card.write_text("---\nlicense: mit\n---\n\nOurs.\n", encoding="utf-8-sig")
    (tmp_path / "out").mkdir()
    clean_copy(tmp_path / "heads", tmp_path / "out", "me/drafter", "me/base")
    front, _, body = (
        (tmp_path / "out" / "README.md").read_text().removeprefix("---\n").partition("---\n")
    )
    assert "license: mit\n" in front and body.strip() == "Ours."


def test_branches(hub: Hub, machine: Machine, run: Path) -> None:
    """A revision is pushed to its own branch, and loaded by `@`; private where it is asked for."""
    pushed, generated, inspected, main, missing = machine(
        push(run, "--revision", "v2", "--private"),
        generate(run, f"{PLACE}@v2"),
        ["inspect", f"{PLACE}@v2", "--json"],
        ["inspect", PLACE],
        ["inspect", f"{PLACE}@v3"],
    )
    assert (pushed[0], generated[0], inspected[0]) == (0, 0, 0), (pushed, generated, inspected)
    repository = hub.repositories[PLACE]
    assert repository.private
    assert set(repository.files("main")) == {".gitattributes"}
    assert "model.safetensors" in repository.files("v2")
    found = json.loads(inspected[1])
    assert (found["problem"], found["target"]) == (None, "me/base")
    assert main[0] == 2 and "holds no headstart.json" in main[2]
    assert missing[0] == 2 and "no such revision" in missing[2]


def test_a_drafter_is_downloaded_by_one_call(
    hub: Hub, machine: Machine, run: Path, tmp_path: Path
) -> None:
    """Whatever takes a drafter's name resolves it once."""
    weights = {f"{head}.0.linear.weight": torch.randn(32, 32) for head in range(2)}
    weights |= {f"{head}.0.linear.bias": torch.randn(32) for head in range(2)}
    theirs = {"config.json": b"{}", "medusa_lm_head.safetensors": safetensors.torch.save(weights)}
    hub.add("them/medusa", theirs)
    small = {path.name: path.read_bytes() for path in (run / "target").iterdir()}
    hub.add("them/small", small)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcdef\nghijkl\n")
    target = ["--target", str(run / "target")]
    measured = ["--prompts", str(prompts), "--new-tokens", "6"]
    commands = [
        ["load", target[1], PLACE, PROMPT, "8"],
        *(generate(run, name) for name in (PLACE, "them/medusa", "them/small")),
        ["bench", *target, "--drafter", PLACE, *measured, "--report", "none"],
        ["plan", *target, "--drafter", PLACE, *measured, "--measure", "1", "--report", "none"],
        ["verify-lossless", *target, "--drafter", PLACE, *measured, "--draws", "128"],
        ["inspect", PLACE, *target],
        ["convert", "them/medusa", str(tmp_path / "ours"), *target],
        ["push", PLACE, "me/copy", "--target-name", "me/base", "--dry-run"],
    ]  # fmt: skip
    pushed, _ = machine(push(run), ["downloads"])
    assert pushed[0] == 0, pushed
    results = machine(*(each for command in commands for each in (command, ["downloads"])))
    for command, (status, _, err), (_, downloads, _) in zip(
        commands, results[::2], results[1::2], strict=True
    ):
        assert (status, downloads) == (0, "1\n"), (command, err)


def test_an_update_and_a_listing_that_climbs_out(
    hub: Hub, machine: Machine, run: Path, tmp_path: Path
) -> None:
    """What the artifact lost goes, what is not ours stays; no name leaves the cache's folder."""
    evil = {"../../../../evil.json": b"{}", "/evil.json": b"{}", "sub/../../config.json": b"{}"}
    hub.add(PLACE, {"headstart.json": b"{}", "plan.json": b"{}", "LICENSE": b"mine"} | evil)
    pushed, inspected = machine(push(run), ["inspect", PLACE, "--json"])
    assert (pushed[0], inspected[0]) == (0, 0), (pushed, inspected)
    files = hub.repositories[PLACE].files()
    assert "plan.json" not in files and files["LICENSE"] == b"mine"
    listed = {file["name"] for file in json.loads(inspected[1])["files"]}
    assert listed == set(files) - {"LICENSE", *evil}
    assert not list(tmp_path.rglob("evil.json"))
    assert not any("evil" in request.path for request in hub.requests)


def test_refused(hub: Hub, machine: Machine, run: Path) -> None:
    hub.add(PLACE, {"config.json": b"{}", "model.safetensors": b"a model of another kind"})
    hub.add("me/pickled", {"config.json": b"{}", "medusa_lm_head.pt": b"\x80"})
    taken, foreign, *loads = machine.errors(
        push(run),
        [word.replace(PLACE, "them/drafter") for word in push(run)],
        *(["inspect", name] for name in ("me/nothing", "me/a/b")),
    )
    ((status, described, _),) = machine(["inspect", "me/pickled"])
    assert status == 1 and "a pickle" in " ".join(described.split())
    assert "is taken: it holds config.json" in taken
    assert len(hub.repositories[PLACE].commits) == 1
    assert "no right" in foreign and set(hub.repositories) == {PLACE, "me/pickled"}
    for line, said in zip(loads, ("no such repository", "neither a"), strict=True):
        assert said in line
    # No pickle was even fetched.
    assert not any(request.path.endswith(".pt") for request in hub.requests)


def test_a_checkpoint_of_others(hub: Hub, machine: Machine, run: Path, tmp_path: Path) -> None:
    """Loaded by name and converted; files are fetched by name, a pickle where it is asked for."""
    heads = {f"{head}.0.linear.weight": torch.randn(32, 32) for head in range(2)}
    heads |= {f"{head}.0.linear.bias": torch.randn(32) for head in range(2)}
    weights, theirs, ours = io.BytesIO(), "them/medusa", tmp_path / "heads"
    torch.save(heads, weights)
    files = {"config.json": b'{"medusa_num_heads": 5}', "medusa_lm_head.pt": weights.getvalue()}
    repository = hub.add(theirs, files | {"code.py": b"1 / 0", "training_args.bin": b"\x80"})
    command, plain = generate(run, theirs), generate(run, PLACE)[:3] + generate(run, PLACE)[5:]
    refused, alone = machine(command, [*command[:1], *command[3:]])
    assert refused[0] == alone[0] == 2
    assert "--allow-pickle" in refused[2].splitlines()[-1] and "faster with --target" in alone[2]
    assert not any(request.path.endswith(".pt") for request in hub.requests)

    target = ["--target", str(run / "target")]
    loaded, without, converted, inspected, again, looked = machine(
        [*command, "--allow-pickle"],
        plain,
        ["convert", theirs, str(ours), *target, "--allow-pickle"],
        ["inspect", str(ours), "--json"],
        generate(run, str(ours)),
        ["inspect", str(ours)],
    )
    results = (loaded, without, converted, inspected, again, looked)
    assert [status for status, *_ in results] == [0] * 6, results
    assert loaded[1] == without[1] == again[1] != "" and "Only shapes show" in loaded[2]
    assert converted[1] == f"{ours}\n" and "not measured" in looked[1]
    found = json.loads(inspected[1])
    assert found["origin"] == f"{theirs}@{repository.branches['main']}"
    assert (found["problem"], found["metrics"], found["options"]["heads"]) == (None, {}, 2)
    fetched = {r.path.rsplit("/", 1)[1] for r in hub.requests if "/resolve/" in r.path}
    assert fetched == {"config.json", "medusa_lm_head.pt"}


def test_without_rights(hub: Hub, machine: Machine, run: Path) -> None:
    hub.add("me/private", {"config.json": b"{}"}, private=True)
    commands = push(run), ["inspect", "me/private"]
    nobody = machine.errors(*commands, token="")
    assert all("`hf auth login`" in line for line in nobody) and "private" in nobody[1]
    wrong = machine.errors(*commands, token="hf_" + "x" * 30)
    assert all("refuses the access token" in line for line in wrong)
    assert set(hub.repositories) == {"me/private"}


def test_without_a_network(hub: Hub, run: Path, tmp_path: Path) -> None:
    machine = Machine(hub, tmp_path / "home", HF_ENDPOINT=NOWHERE)
    lines = machine.errors(push(run), ["inspect", PLACE])
    machine.stop()
    assert all("the Hub cannot be reached" in line for line in lines)
    assert not hub.requests


def test_exports_are_branches_that_engines_load(hub: Hub, machine: Machine, run: Path) -> None:
    """Each as the root of its branch, so that a repository's name and the revision suffice."""
    dry, (status, out, err), again = machine(
        push(run, "--export", "vllm", "--dry-run"),
        push(run, "--export", "vllm", "--license", "mit"),
        push(run, "--export", "vllm", "--license", "mit"),
    )
    assert dry[0] == status == again[0] == 0, (dry, err, again)
    assert "config.json in the branch vllm" in dry[1]
    repository = hub.repositories[PLACE]
    assert out == f"{hub.url}/{PLACE}\n" and set(repository.branches) == {"main", "vllm"}
    files = repository.files("vllm")
    assert set(files) - {".gitattributes"} == {"config.json", "model.safetensors"}
    assert json.loads(files["config.json"])["architectures"] == ["MedusaModel"]
    card = repository.files()["README.md"].decode()
    commands = re.findall(r"```bash\n(.*?)\n```", card, re.DOTALL)
    (line,) = [each for each in commands if each.startswith("vllm")]
    assert line.startswith("vllm serve me/base --speculative-config '")
    told = json.loads(line.split("'")[1])
    assert (told["model"], told["revision"], told["method"]) == (PLACE, "vllm", "medusa")
    assert not any(str(run).encode() in body for body in files.values())
    # What is in the branch loads by name and gives what the artifact gives.
    ours, branch = machine(generate(run, PLACE), generate(run, f"{PLACE}@vllm"))
    assert ours[:2] == branch[:2] and ours[1]
    (line,) = machine.errors(push(run, "--export", "sglang"))
    assert line.endswith("expected one of: vllm")  # what push takes of the family's formats


def test_exports_of_a_branch_are_branches_of_their_own(
    hub: Hub, machine: Machine, run: Path
) -> None:
    """What the main branch's card points to stays, and so does the artifact that was pushed."""
    pushed = machine(
        push(run, "--export", "vllm"),
        push(run, "--export", "vllm", "--revision", "v2", "--dry-run"),
        push(run, "--export", "vllm", "--revision", "v2"),
        push(run, "--export", "vllm", place=f"{PLACE}@v3"),
    )
    assert [status for status, _, _ in pushed] == [0] * 4, pushed
    assert "config.json in the branch v2-vllm" in pushed[1][1]
    assert '"revision": "v2-vllm"' in pushed[1][1]
    repository = hub.repositories[PLACE]
    exports = {"main": "vllm", "v2": "v2-vllm", "v3": "v3-vllm"}
    assert set(repository.branches) == {*exports, *exports.values()}
    for branch, export in exports.items():
        assert "headstart.json" in repository.files(branch)
        card = repository.files(branch)["README.md"].decode()
        (line,) = re.findall(r"^vllm serve .*", card, re.MULTILINE)
        told = json.loads(line.split("'")[1])
        assert (told["model"], told["revision"]) == (PLACE, export)
        assert set(repository.files(export)) - {".gitattributes"} == {
            "config.json", "model.safetensors",
        }  # fmt: skip
    before = {name: repository.files(name) for name in repository.branches}
    lines = machine.errors(
        push(run, "--revision", "vllm", "--export", "vllm"),
        push(run, "--revision", "v2-vllm"),
        push(run, place=f"{PLACE}@sglang"),
        push(run, "--revision", "v3", place=f"{PLACE}@v2"),
    )
    assert all("has the name of a branch that --export writes" in line for line in lines[:3])
    assert "name two branches" in lines[3]
    assert {name: repository.files(name) for name in repository.branches} == before


_VALIDATE = "import sys, huggingface_hub as hub; hub.ModelCard(sys.stdin.read()).validate()"


def test_the_cards_example_runs(hub: Hub, machine: Machine, run: Path) -> None:
    """In a process of its own, which has the repositories' names alone; and the card is valid."""
    ((status, _, err),) = machine(push(run, "--license", "mit"))
    assert status == 0, err
    hub.add("me/base", {path.name: path.read_bytes() for path in (run / "target").iterdir()})
    card = hub.repositories[PLACE].files()["README.md"].decode()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)

    def fresh(code: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=300,
            env=machine.env | {"HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}, cwd=run,
        )  # fmt: skip

    done = fresh(code)
    assert done.returncode == 0 and done.stdout.startswith("Once upon a time"), done.stderr[-2000:]
    assert len(done.stdout.strip()) > len("Once upon a time")
    assert any(request.path.startswith("/me/base/resolve") for request in hub.requests)
    assert fresh(_VALIDATE, card).returncode == 0
    # And the check can fail: tags are a list.
    wrong = fresh(_VALIDATE, card.replace("library_name: headstart", "library_name: [headstart]"))
    assert wrong.returncode != 0 and "library_name" in wrong.stderr
