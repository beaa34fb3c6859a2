"""What `headstart inspect --tree` and `--prompt` print: a tree, or a round that was replayed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from rich.text import Text

from headstart.heads.artifacts.plan import read_plans
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core import counted
from headstart.inputs import load_speculator
from headstart.reports.tables import print_apart, titled, to_json
from headstart.terminal import UsageError, visible
from headstart.train.data.tokenising import prompt_tokens


def print_tree(name: str, tree: str | None, as_json: bool = False) -> int:
    """Draw the tree of an artifact, or another one as it would decode with it; or print it."""
    from headstart.infer import StaticTree, parse_tree

    from .trees import described_shape, draw_shape

    source = DrafterSource(name)
    own = source.manifest.weights_sha256
    plans = [plan for plan in read_plans(source.folder) if plan.weights_sha256 == own]
    plan = min(plans, key=lambda each: (each.temperature, each.batch_size), default=None)
    if tree:
        policy: Any = parse_tree(tree)
    elif plan is not None and plan.tree:
        policy = StaticTree(plan.tree)
    elif source.tree is not None:
        policy = StaticTree(source.tree)
    else:
        raise UsageError(f"{name} has no tree of its own; give one, such as --tree chain:4")
    acceptance = None if plan is None else plan.acceptance
    if as_json:
        measured = None if plan is None else {"prompts": plan.prompts, "device": plan.device}
        print(to_json(described_shape(policy, acceptance) | {"measured_on": measured}))
        return 0
    drawn = draw_shape(policy, acceptance)
    console = titled(sys.stdout, f"headstart inspect --tree: {name}")
    print_apart(console, drawn)
    if plan is not None:
        measured = f"on {counted(plan.prompts, 'prompt')} by headstart plan, on {plan.device}"
        said = f"shares were measured {measured}"
    else:
        said = "headstart plan measures how often each node is accepted; there is no plan yet"
    print_apart(console, Text(said, "dim"))
    return 0


def print_round(options: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Replay one round on a prompt and draw it."""
    given = vars(options) | {"drafter": [options.artifact], "tree": options.tree or None}
    speculator = load_speculator(argparse.Namespace(**given))
    from headstart.infer.replay import replay_round

    from .trees import draw_round, token_name

    tokenizer: Any = speculator.tokenizer
    inputs = prompt_tokens(tokenizer, options.prompt, True).to(speculator.device)
    if inputs.input_ids.shape[1] == 0:
        raise UsageError("the prompt has no token in this model's vocabulary; give another")
    tree = speculator.tree_of(1, options.temperature)
    if speculator.drafter is None or tree.nodes == 1:
        raise UsageError("its plan for this machine is plain decoding; give --tree to draft anyway")
    number = options.round or 1
    found = replay_round(speculator, inputs.input_ids, number, **sampling)
    if options.json:
        print(to_json(json.loads(json.dumps(asdict(found)))))
        return 0
    name = token_name(tokenizer)
    title = f"headstart inspect: round {number}, rule {found.rule}, {tree.label}"
    console = titled(sys.stdout, title)
    tail = visible(tokenizer.decode(found.text[-40:]))
    print_apart(console, Text(f"…{tail}" if len(found.text) > 40 else tail, "dim"))
    drafters = len(speculator.drafters.drafters)
    print_apart(console, draw_round(found, name, drafters))
    accepted = " ".join(name(node.token) for node in found.nodes[1:] if node.accepted)
    own = f"{name(found.emitted[-1])} is the target's own (p {found.last:.2f})"
    drafted = len(found.nodes) - 1
    took = sum(node.accepted for node in found.nodes[1:])
    print_apart(
        console,
        f"{took} of {drafted} drafted tokens accepted{': ' + accepted if accepted else ''}; {own}",
        Text("q: the drafter's probability after the node above, p: the target's", "dim"),
    )
    return 0
