"""Times a training step's loss against that of another checkout of this project.

Both run in processes of their own and take turns. Compared are forward and backward of a drafter's
loss on random features of a random target, the gradients of both as one vector, and the memory that
each had at its peak. On a CPU the seconds are those that the process had of it.

    python benchmarks/compare_loss.py --before ../older-checkout --family eagle3 --width 32000
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--family", default="eagle3", choices=["eagle3", "eagle", "medusa"])
    parser.add_argument("--output", default=None, help="the drafter's output; the family's own")
    parser.add_argument("--loss", default="forward_kl")
    parser.add_argument("--width", type=int, default=32_000, help="V, the target's vocabulary")
    parser.add_argument("--trimmed", type=int, default=0, help="Vd, the draft vocabulary; 0 for V")
    parser.add_argument("--hidden", type=int, default=256, help="D")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--depths", type=int, default=7, help="K")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def setting(args: argparse.Namespace) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    """The loss, its drafter, and the arguments of a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headstart.heads import family

    try:
        from headstart.train.losses.draft_loss import DraftLoss, head_labels, label_counts
    except ImportError:  # the loss of checkouts before it had a package
        from headstart.train.losses import head_labels, label_counts  # type: ignore

        DraftLoss = earlier_loss  # type: ignore

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(
        vocab_size=args.width, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        num_hidden_layers=3, num_attention_heads=max(args.hidden // 64, 1),
        tie_word_embeddings=False,
    )  # fmt: skip
    dtype = getattr(torch, args.dtype)
    made: Any = LlamaForCausalLM(config)
    target = made.to(device, dtype).requires_grad_(False).eval()
    target.lm_head.weight.normal_(std=2 * args.hidden**-0.5)  # as sure of itself as a trained one
    named: dict[str, Any] = {"heads" if args.family == "medusa" else "depths": args.depths}
    if args.trimmed:
        named |= {"output": "trimmed", "draft_vocab_size": args.trimmed}
    elif args.output:
        named["output"] = args.output
    kind: Any = family(args.family)
    drafter = kind(kind.config_class.for_target(target, **named)).to(device, dtype).bind(target)
    older = not hasattr(drafter, "init_from_target")
    begin = drafter.start_from_target if older else drafter.init_from_target
    begin(torch.arange(args.width))
    tokens = torch.randint(args.width, (args.rows, args.length), device=device)
    vocabulary = drafter.draft_vocabulary
    if vocabulary is not None:
        tokens = vocabulary[tokens % len(vocabulary)]
    layers = len(drafter.config.feature_layers)
    sizes = (args.rows, args.length)
    features = torch.randn(*sizes, layers * args.hidden, device=device, dtype=dtype)
    final = torch.randn(*sizes, args.hidden, device=device, dtype=dtype)
    labels = head_labels(tokens, torch.ones_like(tokens, dtype=torch.bool), args.depths, vocabulary)
    batch = (features, tokens, labels, label_counts(labels), final)
    return DraftLoss(drafter, 0.8, args.loss), drafter, batch


def earlier_loss(drafter: Any, decay: float, loss: str) -> Any:
    """`DraftLoss` by the functions that did its work before."""
    from headstart.train.losses import Teacher, draft_loss  # type: ignore

    teacher = Teacher(drafter.target, drafter.draft_vocabulary)
    loss_of: Any = draft_loss
    return lambda features, tokens, labels, counts, final: loss_of(
        drafter, features, tokens, labels, counts, decay, loss, teacher, final
    )


def work(args: argparse.Namespace) -> None:
    """Answer each line on stdin with a step's seconds, and the last with the peak and gradients."""
    loss, drafter, batch = setting(args)
    gpu = torch.cuda.is_available()
    clock = time.perf_counter if gpu else time.process_time
    drafter.zero_grad()
    for line in sys.stdin:
        if line.strip() != "step":
            torch.save([p.grad.cpu() for p in drafter.parameters()], line.strip())
            print(json.dumps({"megabytes": peak()}), flush=True)
            return
        drafter.zero_grad()
        started = clock()
        found = loss(*batch)
        found.backward()
        if gpu:
            torch.cuda.synchronize()
        seconds = clock() - started
        print(json.dumps({"seconds": seconds, "loss": found.item()}), flush=True)


def peak() -> float:
    """MB of memory at most so far, of the GPU or else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1e3


class Worker:
    def __init__(self, root: Path, arguments: list[str]):
        command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--worker"]
        self.process = subprocess.Popen(
            command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, line: str) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def compare(args: argparse.Namespace) -> None:
    sides = {"before": Worker(args.before.resolve(), sys.argv[1:])}
    sides["after"] = Worker(ROOT, sys.argv[1:])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(args.steps + 1):
        for name, worker in sides.items():
            answer = worker.ask("step")
            if turn:  # the first also makes what later ones reuse
                found[name].append(answer)
    seconds = {name: [each["seconds"] for each in answers] for name, answers in found.items()}
    ratios = [a / b for a, b in zip(seconds["before"], seconds["after"], strict=True)]
    saved = {name: Path(f"/tmp/compare_loss.{os.getpid()}.{name}.pt") for name in sides}
    peaks = {name: sides[name].ask(str(path))["megabytes"] for name, path in saved.items()}
    before, after = (torch.cat([g.flatten() for g in torch.load(p)]) for p in saved.values())
    apart = ((before - after).double().norm() / before.double().norm()).item()
    for path in saved.values():
        path.unlink()
    report = {
        "before_seconds": statistics.median(seconds["before"]),
        "after_seconds": statistics.median(seconds["after"]),
        "times_faster": statistics.median(ratios),
        "least_and_most": (min(ratios), max(ratios)),
        "loss": (found["before"][0]["loss"], found["after"][0]["loss"]),
        "gradients_apart": apart,
        "peak_megabytes": peaks,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    given = parsed()
    work(given) if given.worker else compare(given)
