"""The engines: how each is started with the settings of a printed line, and what it wrote."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tempfile
from abc import ABC, abstractmethod
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from .rounds import Decoded, until

_HERE = Path(__file__).parent


class Prompt(NamedTuple):
    """A prompt as text, and as the ids [P] that the text has."""

    text: str
    tokens: list[int]


class Engine(ABC):
    """One engine on this machine."""

    name: str

    @abstractmethod
    def depth(self, line: str) -> int:
        """How many tokens a round drafts by the line that starts the engine."""

    @abstractmethod
    def decode(
        self, line: str, target: Path, folder: Path, prompts: list[Prompt], new_tokens: int,
        tokenizer: Any,
    ) -> list[Decoded]:  # fmt: skip
        """Continue each prompt greedily.

        Args:
            line: as `headstart export` printed it for `folder`, which is a copy of the target with
                the drafter in it where the line names no other model.

        Raises:
            subprocess.CalledProcessError: the engine stopped; its `stderr` says why.
        """

    def cause(self, error: subprocess.CalledProcessError) -> str:
        """The last error of an engine's output."""
        lines = [line.strip() for line in (error.stderr or "").splitlines()]
        named = [line for line in lines if re.search(r"[Ee]rror[:,] ", line)]
        return (named or lines or ["no output"])[-1][-300:]


class Vllm(Engine):
    """vLLM, by the Python of its environment."""

    def __init__(self, python: str):
        self.python = python
        asked = (
            "from importlib.metadata import packages_distributions, version; "
            "name = packages_distributions()['vllm'][0]; print(name, version(name))"
        )
        self.name = _run([python, "-c", asked]).stdout.strip()

    def depth(self, line: str) -> int:
        return self._settings(line)["num_speculative_tokens"]

    def _settings(self, line: str) -> dict[str, Any]:
        return json.loads(_after(line, "--speculative-config"))

    def decode(
        self, line: str, target: Path, folder: Path, prompts: list[Prompt], new_tokens: int,
        tokenizer: Any,
    ) -> list[Decoded]:  # fmt: skip
        settings = self._settings(line)
        alone = "model" not in settings
        job = {
            "target": str(folder if alone else target), "speculative": settings,
            "dtype": "bfloat16" if alone else "float32",
            "prompts": [prompt.tokens for prompt in prompts], "new_tokens": new_tokens,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            asked, found = Path(place, "job.json"), Path(place, "found.json")
            asked.write_text(json.dumps(job), encoding="utf-8")
            _run([self.python, str(_HERE / "vllm_worker.py"), str(asked), str(found)])
            texts: list[list[list[int]]] = json.loads(found.read_text(encoding="utf-8"))
        return [
            Decoded(tokenizer.decode(list(chain(*steps))), [len(new) for new in steps])
            for steps in texts
        ]


class LlamaCpp(Engine):
    """llama.cpp: its converter, and the smallest of its programs that speculates."""

    _OPTIONS = (
        "--temp", "0", "-c", "1024", "-fa", "off", "-ctk", "f32", "-ctv", "f32",
        "-ctkd", "f32", "-ctvd", "f32", "-lv", "5",
    )  # fmt: skip

    def __init__(self, folder: Path, python: str):
        self.folder, self.python = folder, python
        package = folder.parent.parent / "llama_cpp" / "__init__.py"
        version = re.search(r'__version__ = "(.+)"', package.read_text()) if package.exists() else 0
        self.name = f"llama.cpp of llama-cpp-python {version[1]}" if version else "llama.cpp"
        self._target: Path | None = None  # once it is converted

    def depth(self, line: str) -> int:
        return int(_after(line, "--spec-draft-n-max"))

    def decode(
        self, line: str, target: Path, folder: Path, prompts: list[Prompt], new_tokens: int,
        tokenizer: Any,
    ) -> list[Decoded]:  # fmt: skip
        drafter = folder / "drafter.gguf"
        of_target = ["--target-model-dir", str(target)] * ("--target-model-dir" in line)
        self._convert(folder, *of_target, "--outfile", str(drafter))
        models = ["-m", str(drafter)]
        if " -md " in line:
            models = ["-m", str(self._converted(target, folder.parent.parent)), "-md", str(drafter)]
        program = self.folder / "build" / "bin" / "llama-speculative-simple"
        kind, depth = _after(line, "--spec-type"), str(self.depth(line))
        enough = str(new_tokens + 16)  # what it writes last may be missing from its output
        found = []
        for prompt in prompts:
            with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
                file.write(prompt.text)
                file.flush()
                ran = _run(
                    [str(program), *models, "--spec-type", kind, "--spec-draft-n-max", depth,
                     "-f", file.name, "-n", enough, *self._OPTIONS]
                )  # fmt: skip
            text = ran.stdout.partition(prompt.text)[2]
            rounds, judged = _rounds_of(ran.stderr)
            rounds = until(rounds, new_tokens)
            found.append(Decoded(text, rounds, judged[: len(rounds)]))
        return found

    def _converted(self, target: Path, folder: Path) -> Path:
        if self._target is None:
            self._target = folder / "target.gguf"
            self._convert(target, "--outfile", str(self._target))
        return self._target

    def _convert(self, folder: Path, *options: str) -> None:
        worker = str(_HERE / "to_gguf.py")
        _run([self.python, worker, str(self.folder), str(folder), *options, "--outtype", "f32"])


def _rounds_of(log: str) -> tuple[list[int], list[int]]:
    """How many tokens each round of llama.cpp added, and how many its drafts were worth.

    Recurrent layers cannot forget rejected drafts. So where some are rejected, those that were
    accepted and the token after them are run again as a draft, which adds one token more.

    >>> _rounds_of("accepted 4/4 … partial acceptance: 1 < 4 … accepted 2/2")
    ([5, 3], [5, 2])
    """
    rounds, judged, partial = list[int](), list[int](), None
    for event, count in re.findall(r"(partial acceptance:|accepted) (\d+)", log):
        if event != "accepted":
            partial = int(count)
            continue
        rounds.append(int(count) + 1)
        judged.append((int(count) if partial is None else partial) + 1)
        partial = None
    return rounds, judged


def _after(line: str, option: str) -> str:
    words = shlex.split(line, comments=True)
    return words[words.index(option) + 1]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
