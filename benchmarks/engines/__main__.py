"""Do other engines run exported drafters as headstart does? They are asked for the same text.

    headstart quickstart
    python -m benchmarks.engines --vllm PYTHON --llama-cpp FOLDER [--only NAME]
        [--output runs/engines/found.jsonl]

PYTHON is that of an environment with vLLM; FOLDER is llama.cpp's, with `build/bin/
llama-speculative-simple`. `.ci/engines` makes both. The quickstart's target stands in `runs/`, and
drafters are trained on its text where they are missing, each for `--seconds`.

Each drafter is exported for each engine, and the engine is started with the settings of the line
that `headstart export` prints. Held-out prompts are continued greedily by both, here with a chain
of as many tokens. Where the drafters compute the same, each round accepts as many drafts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

import headstart
from headstart.heads import Drafter, HeadstartError
from headstart.heads.artifacts.export import export_drafter, formats_of, is_copy_of_target
from headstart.infer import Speculator

from .drafters import DRAFTERS, Tried
from .engines import Engine, LlamaCpp, Prompt, Vllm
from .hybrid import train_hybrid
from .rounds import Decoded, agreement, tau

RUNS = Path("runs")
TARGET = RUNS / "quickstart" / "target"
PROMPT_TOKENS = 64

_FAILED = "failed"


@dataclass
class Found:
    """What one engine did with one drafter in one format.

    Attributes:
        reason: why nothing was compared: there is no such export, or the engine failed.
        note: why rounds may differ.
        coarser: whether it computes in fewer bits, so that texts may differ, too.
    """

    drafter: str
    form: str
    engine: str
    line: str = ""
    prompts: int = 0
    same_texts: int = 0
    compared: int = 0
    equal: int = 0
    tau_here: float = float("nan")
    tau_there: float = float("nan")
    reason: str = ""
    note: str = ""
    coarser: bool = False

    def __str__(self) -> str:
        start = f"{self.drafter:<28} {self.form:<12}"
        if self.reason:
            return f"{start} {self.reason}"
        found = (
            f"{start} texts {self.same_texts}/{self.prompts}, rounds {self.equal}/{self.compared}, "
            f"τ {self.tau_here:.2f} here, {self.tau_there:.2f} there"
        )
        return f"{found}; {self.note}" if self.note else found

    @property
    def right(self) -> bool:
        """Whether all texts are the same and, where they should be, all rounds are equal."""
        if self.reason:
            return not self.reason.startswith(_FAILED)
        texts = self.coarser or self.same_texts == self.prompts
        return texts and (bool(self.note) or self.equal == self.compared)


def main() -> int:
    options = _arguments()
    engines: dict[str, Engine] = {}
    if options.vllm:
        engines |= dict.fromkeys(("vllm", "speculators"), Vllm(options.vllm))
    if options.llama_cpp:
        engines["llama.cpp"] = LlamaCpp(options.llama_cpp, options.vllm or sys.executable)
    if not engines:
        raise SystemExit("name an engine: --vllm PYTHON, --llama-cpp FOLDER, or both.")
    prompts = held_out(options.prompts)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for name, tried in DRAFTERS.items():
        if options.only and name not in options.only:
            continue
        target = hybrid(options.seconds) if tried.hybrid else TARGET
        heads = trained(name, tried, target, options.seconds)
        here = Here(target, heads, prompts, options.new_tokens)
        for form, engine in engines.items():
            if form not in formats_of(here.drafter.config.family_name()):
                continue
            found = compare(name, here, form, engine)
            print(found, flush=True)
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found), ensure_ascii=False) + "\n")
            wrong += not found.right
    return wrong > 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    add("--llama-cpp", type=Path, metavar="FOLDER", help="of llama.cpp, built")
    add("--only", action="append", metavar="NAME", choices=DRAFTERS, help="one of the drafters")
    add("--seconds", type=int, default=60, help="of training for a drafter that is missing")
    add("--prompts", type=int, default=6)
    add("--new-tokens", type=int, default=96)
    add("--output", type=Path, default=RUNS / "engines" / "found.jsonl")
    return parser.parse_args()


def held_out(count: int) -> list[Prompt]:
    """The first tokens of held-out files, where they are the text's tokens again."""
    tokenizer = headstart.load(TARGET, compile=False).tokenizer
    assert tokenizer is not None
    found: list[Prompt] = []
    with (TARGET.parent / "corpus" / "held_out.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer(json.loads(line)["text"])["input_ids"][:PROMPT_TOKENS]
            text = str(tokenizer.decode(ids))
            if len(ids) == PROMPT_TOKENS and tokenizer(text)["input_ids"] == ids:
                found.append(Prompt(text, ids))
            if len(found) == count:
                break
    return found


def hybrid(seconds: int) -> Path:
    """The folder of the target whose files hold a module for MTP, trained where it is missing."""
    folder = RUNS / "engines" / "hybrid"
    if not folder.exists():
        print(f"training a target in {folder}", file=sys.stderr, flush=True)
        train_hybrid(TARGET.parent, folder, 2 * seconds)
    return folder


def trained(name: str, tried: Tried, target: Path, seconds: int) -> Path:
    """The folder of a drafter, trained where it is missing."""
    run = f"engines-{name}"
    heads = RUNS / run / "heads"
    if not heads.exists():
        print(f"training {name} in {RUNS / run}", file=sys.stderr, flush=True)
        place = ["shares=quickstart"]
        if tried.hybrid:
            place = ["shares=null", f"target.model={target}", "target.scratch=null"]
        subprocess.run(
            [sys.executable, "-m", "headstart", "train", tried.recipe, f"name={run}",
             *place, *tried.settings, f"train.max_seconds={seconds}",
             "decode.tree=chain:4", "decode.prompts=1", "decode.sampled=null",
             "decode.validation_prompts=2"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return heads


class Here:
    """A drafter of this project, and what it decodes, once for each length of a chain."""

    def __init__(self, target: Path, heads: Path, prompts: list[Prompt], new_tokens: int):
        self.target = target
        self.exports = RUNS / "engines" / heads.parent.name
        self.prompts, self.new_tokens = prompts, new_tokens
        loaded = headstart.load(target, heads, tree="plain")
        self.model, self.drafter = loaded.model, cast("Drafter", loaded.drafter)
        self.tokenizer: Any = loaded.tokenizer
        self._decoded: dict[int, list[Decoded]] = {}

    def decoded(self, depth: int) -> list[Decoded]:
        """The prompts, continued greedily with a chain of so many drafted tokens."""
        if depth not in self._decoded:
            speculator = Speculator(self.model, self.drafter, tree=f"chain:{depth}")
            self._decoded[depth] = [self._continued(speculator, each) for each in self.prompts]
        return self._decoded[depth]

    def _continued(self, speculator: Speculator, prompt: Prompt) -> Decoded:
        ids = torch.tensor([prompt.tokens])
        written = speculator.generate(ids, max_new_tokens=self.new_tokens, do_sample=False)
        text = self.tokenizer.decode(written[0, len(prompt.tokens) :])
        counts = [count for count, _ in speculator.stats.rounds_of(0)]
        return Decoded(text, [1, *counts])  # the prompt's forward writes the first token


def compare(name: str, here: Here, form: str, engine: Engine) -> Found:
    """Export a drafter in a format, and compare what an engine decodes with it."""
    found = Found(name, form, engine.name, prompts=len(here.prompts))
    folder = here.exports / form
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        line = export_drafter(here.drafter, form, folder, here.tokenizer)
    except HeadstartError as error:
        found.reason = f"not exported: {error}"
        return found
    if line is None:
        found.reason = "no engine reads this"
        return found
    found.line = line
    if "stitch" in line:
        found.reason = "not run: a program of speculators puts it into the target's files first"
        return found
    try:
        there = engine.decode(
            line, here.target, folder, here.prompts, here.new_tokens, here.tokenizer
        )
    except subprocess.CalledProcessError as error:
        found.reason = f"{_FAILED}: {engine.cause(error)}"
        return found
    if here.drafter.saved_as_language_model and here.drafter.independent and "parallel" not in line:
        found.note = "there it drafts one token after another"
    if isinstance(engine, Vllm) and is_copy_of_target(here.drafter.config.family_name(), form):
        found.note = "there in bfloat16, the only type of its recurrent layers on a CPU"
        found.coarser = True
    return _judged(found, here.decoded(engine.depth(line)), there, here.new_tokens)


def _judged(found: Found, here: list[Decoded], there: list[Decoded], new_tokens: int) -> Found:
    pairs = list(zip(here, there, strict=True))
    found.same_texts = sum(b.text.startswith(a.text) for a, b in pairs)
    each = [agreement(a.rounds, b.rounds, new_tokens, b.judged) for a, b in pairs]
    found.equal, found.compared = (sum(counts) for counts in zip(*each, strict=True))
    found.tau_here, found.tau_there = tau(here), tau(there)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
