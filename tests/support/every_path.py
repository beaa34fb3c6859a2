"""Drafters that read drafted tokens, against their formula along every path of a tree."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headstart.heads import Step
from tests.support.tiny import VOCAB


def check_every_path(
    drafter: Any, by_hand: Callable[[Any, Tensor, list[int]], Tensor]
) -> list[Step]:
    """Compare the logits after each node of two rounds' trees with what `by_hand` says.

    Args:
        by_hand: of a drafter, a feature [D], and the root and the tokens down to a node, the
            logits [Vd] after that node.

    Returns:
        The steps of both rounds.
    """
    features, every = torch.randn(2, 3, 32, dtype=torch.float64), []
    tokens, count = torch.randint(VOCAB, (2, 3)), torch.tensor([3, 1])
    state = drafter.start(2, 40)
    drafter.prefill(state, features, tokens, count)
    for turn in range(2):  # nothing of a round is left in the next one
        features = features + turn
        steps = [drafter.begin(state, features, tokens, count)]
        # Level 1: nodes a b under the root; level 2: c d under b, e under a; level 3: f under d.
        levels = [torch.randint(VOCAB, (2, width)) for width in (2, 3, 1)]
        parents = [[-1, -1], [1, 1, 0], [3]]
        for level, parent in zip(levels, parents, strict=True):
            steps.append(drafter.extend(state, level, torch.tensor([parent] * 2)))
        for row in range(2):
            last = int(count[row]) - 1
            root, feature = int(tokens[row, last]), features[row, last]
            a, b, c, d, e, f = torch.cat([level[row] for level in levels]).tolist()
            paths = [[[]], [[a], [b]], [[b, c], [b, d], [a, e]], [[b, d, f]]]
            for step, expected in zip(steps, paths, strict=True):
                assert step.logits is not None and step.logits.shape[1] == len(expected)
                for node, path in enumerate(expected):
                    found = by_hand(drafter, feature, [root, *path])
                    torch.testing.assert_close(step.logits[row, node], found)
        every += steps
    return every
