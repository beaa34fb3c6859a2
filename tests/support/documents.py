"""The shell commands that README and docs show, and those that the help of commands ends with.

What a document shows is run (`pytest -m docs`), with two exceptions that a reader sees:

- a command with a name in capitals (ORG/MODEL, FOLDER) that stands for something of the reader;
- a command that ends with a comment `# needs …`, and those below such a line in the same block.
"""

import inspect
import re
import shlex
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from headstart.commands import COMMANDS
from tests.support.paths import ROOT

# What sets up an environment or checks the repository: .ci/run does both.
_SETUP = re.compile(r"(make|pip|pytest|export|source|eval|git|python3? -m venv|\.ci/run)\b")
_CAPITALS = re.compile(r"(?<![\w$-])[A-Z][A-Z_]{2,}(?![\w=])")
_HERE = re.compile(r"<<'(\w+)'")
_NEEDS = re.compile(r"#\s*needs .+")


@dataclass(frozen=True)
class Command:
    """One command of a document, its continued lines joined.

    Attributes:
        needs: what the document says that it needs; empty where it can run anywhere.
    """

    text: str
    needs: str = ""

    @property
    def runs(self) -> bool:
        words = shlex.join(self.words)
        return not (self.needs or _SETUP.match(self.text) or _CAPITALS.search(words))

    @property
    def words(self) -> list[str]:
        """The words of its first line, which is all of it but for a here-document."""
        return shlex.split(_HERE.sub("", self.text.partition("\n")[0]), comments=True)


@dataclass(frozen=True)
class Block:
    """A fenced `bash` block of a document."""

    path: Path
    line: int
    commands: list[Command]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """README, CONTRIBUTING and the pages of docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> list[Block]:
    """The `bash` blocks of all documents, those of one after another."""
    found = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for block in re.finditer(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, block.start()) + 1
            found.append(Block(path, line, commands_of(block[1])))
    return found


def commands_of(text: str) -> list[Command]:
    """The commands of a block.

    >>> [(c.text, c.runs) for c in commands_of("a \\\\\\n  b\\n# needs a GPU\\nc\\n")]
    [('a b', True), ('c', False)]
    """
    found, needs = [], ""
    lines = iter(re.sub(r"\\\n\s*", "", text).splitlines())
    for line in lines:
        said = _NEEDS.search(line)
        if line.lstrip().startswith("#"):
            needs = said[0] if said else needs
        elif line.strip():
            if here := _HERE.search(line):
                line = "\n".join([line, *iter(lines.__next__, here[1]), here[1]])
            found.append(Command(line.strip(), said[0] if said else needs))
    return found


def inline_commands() -> list[tuple[Path, Command]]:
    """The `headstart …` commands within the sentences of documents."""
    return [
        (path, Command(" ".join(text.split())))
        for path in documents()
        for text in re.findall(r"`(headstart [a-z-]+[^`]*)`", path.read_text(encoding="utf-8"))
    ]


def help_examples() -> dict[str, list[Command]]:
    """The commands that each command's `--help` ends with."""
    found = {}
    for name in COMMANDS:
        module = import_module(f"headstart.commands.{name.replace('-', '_')}")
        _, _, below = inspect.cleandoc(module.__doc__ or "").partition("\n")
        found[name] = commands_of(inspect.cleandoc(below))
    return found
