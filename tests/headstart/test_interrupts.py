"""Ctrl-C in a process of its own, while Python cannot answer: within a second, the truth last."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bytewise import save_target
from tests.support.paths import ROOT

LONG = "import hashlib\ndef compute(): hashlib.pbkdf2_hmac('sha256', b'', b'', 80_000_000)\n"
ENDED = "headstart: ended in the middle of a step; earlier checkpoints and finished stages are kept"
KEPT = "headstart: interrupted; finished stages are kept, and the same command continues"
SAYS = "headstart: stopping after this step, with a checkpoint; Ctrl-C again ends at once"
WORK = {
    "one long call": "compute()",
    "Python": "\n        while True: pass",
    "workers": (
        "\n        from concurrent.futures import ThreadPoolExecutor"
        "\n        ThreadPoolExecutor(2).submit(compute).result()"
    ),
    "a busy exit": (
        "\n        import atexit; atexit.register(lambda: print('too late', file=sys.stderr))"
        "\n        while True: pass"
    ),
}  # fmt: skip
COMMAND = """
import sys
from headstart import cli
from headstart.commands import {name}
{long}
def run(options):
    print("ready", flush=True)
    {work}
    return 0
{name}.run = run
sys.argv[1:] = ["{name}", *{arguments}]
sys.exit(cli.main())
"""
TRAINING = (
    "\n    from headstart.train.processes.stopping import StopSignals\n    with StopSignals():"
)


class Program:
    """A running program that has said that it is ready."""

    def __init__(self, source: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", source], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"
        time.sleep(0.3)

    def interrupt(self) -> float:
        self.process.send_signal(signal.SIGINT)
        return time.monotonic()

    def lines(self) -> list[str]:
        assert self.process.stderr
        return [line for line in self.process.stderr.read().splitlines() if line]


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    made: list[Program] = []
    yield made
    for program in made:
        program.process.kill()
        program.process.wait()


def program(name: str, work: str, *arguments: str) -> Program:
    return Program(COMMAND.format(name=name, long=LONG, work=work, arguments=list(arguments)))


@pytest.mark.parametrize("work", WORK)
def test_a_command_ends_within_a_second(work: str, programs: list[Program]) -> None:
    for name, argument, said in (
        ("generate", "--target=t", "headstart: interrupted"), ("train", "quickstart", KEPT)
    ):  # fmt: skip
        this = program(name, "if True: " + WORK[work], argument)
        programs.append(this)
        at = this.interrupt()
        assert this.process.wait(20) == 130
        assert time.monotonic() - at < 2  # one, and what a busy machine adds
        assert this.lines()[-1] == said


def test_a_chat_goes_on(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    words = ["chat", "--target", str(tmp_path / "target"), "--max-new-tokens", "4"]
    chat = subprocess.Popen(
        [sys.executable, "-m", "headstart", *words], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert chat.stdin and chat.stderr
    print("hello", file=chat.stdin, flush=True)
    while "tokens/s" not in (line := chat.stderr.readline()):  # then it waits for the next message
        assert line
    time.sleep(0.3)
    chat.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        chat.wait(1.5)  # longer than other commands last
    _, said = chat.communicate("again\n", timeout=30)
    assert chat.returncode == 0 and "(interrupted; Ctrl-D ends the chat)" in said
    assert said.count("tokens/s") == 1


def test_training_says_so_and_the_second_ends_it(programs: list[Program]) -> None:
    """The step is one long call; under Python code the handlers themselves do the same."""
    for work, last in (("compute()", KEPT), ("\n        while True: pass", ENDED)):
        this = program("train", TRAINING[5:] + " " + work, "quickstart")
        programs.append(this)
        at = this.interrupt()
        assert this.process.stderr
        assert this.process.stderr.readline() == "\n"
        assert this.process.stderr.readline() == f"{SAYS}\n" and time.monotonic() - at < 2
        time.sleep(0.5)
        assert this.process.poll() is None
        at = this.interrupt()
        assert this.process.wait(20) == 130 and time.monotonic() - at < 2
        assert this.lines()[-1] == last
