"""What an acceptance rule is given, and what it answers."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from headstart.heads import Sampling, TokenTree
from headstart.heads.core import Before


class Text:
    """The rows' text so far, in the layout of `generate`: padded on the left, then growing.

    Processors and criteria read it.

    Args:
        ids: [B, C] int64 with room to grow, of which each row uses `width` columns so far.
        remaining: [B] tokens that each row may still emit, on the host; without a bound when None.
        ends: [V] bool, the tokens that end a row; none when None.
        seen: see `seen_in`; None where no repetition penalty needs it.

    Attributes:
        lengths: [B] int64, columns in use, padding included; always count the root.
        host_lengths: [B] the same on the host.
    """

    def __init__(
        self,
        ids: Tensor,
        width: int,
        remaining: np.ndarray | None = None,
        ends: Tensor | None = None,
        seen: Tensor | None = None,
    ):
        self.ids, self.remaining, self.ends, self.seen = ids, remaining, ends, seen
        self.lengths = torch.full_like(ids[:, 0], width)
        self.host_lengths = np.full(len(ids), width)

    def refill_seen(self, rows: Tensor, ids: Tensor, count: Tensor) -> None:
        """Where `seen` is needed: rows [R] have the first `count` [R] of tokens ids [R, T] now."""
        if self.seen is not None:
            none = self.seen.shape[1] - 1
            beyond = torch.arange(ids.shape[1], device=ids.device) >= count.unsqueeze(1)
            self.seen.index_copy_(0, rows, seen_in(ids.masked_fill(beyond, none), none))

    def process(
        self, sampling: Sampling, extra: int, logits: Tensor, rows: np.ndarray | None = None
    ) -> Tensor:
        """Processed scores [B, V] after each row's first `length + extra` columns.

        A processor may hold something for every row, so it always sees the whole batch: once per
        distinct length, of which only the rows of that length are kept. Only `rows` [B] matter.
        """
        scores = None
        for length in np.unique(self.host_lengths if rows is None else self.host_lengths[rows]):
            asked = None if rows is None else (rows & (self.host_lengths == length)).tolist()
            processed = sampling.process(self.ids[:, : int(length) + extra], logits, asked)
            mine = (self.lengths == int(length)).unsqueeze(1)
            scores = processed if scores is None else torch.where(mine, processed, scores)
        assert scores is not None
        return scores


def seen_in(ids: Tensor, vocab: int, ignored: Tensor | int | None = None) -> Tensor:
    """Which tokens texts [B, P] hold, as the repetition penalty counts them: [B, V + 1] bool.

    The last column takes what does not count, and ids that the output layer does not have.

    Args:
        ignored: so many tokens at the beginning of every row, or of each [B], do not count.

    >>> seen_in(torch.tensor([[0, 2, 2, 7]]), 4, 1).tolist()
    [[False, False, True, False, True]]
    """
    ids = ids.clamp(max=vocab)
    if ignored is not None:
        first = torch.as_tensor(ignored, device=ids.device).view(-1, 1)  # [B, 1] or [1, 1]
        ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) < first, vocab)
    seen = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device)
    return seen.scatter_(1, ids, True)


@dataclass(slots=True)
class Accepted:
    """A round's outcome: path [B, A] of nodes from the root, emitted tokens [B, A], and count [B].

    Entry j < count of `tokens` follows node `path[j]`; A = D + 1. The last of them, which all
    entries after it repeat, is -1 where the target's scores are no distribution.
    """

    path: Tensor
    tokens: Tensor
    count: Tensor

    @classmethod
    def up_to(cls, tree: TokenTree, node: Tensor, last: Tensor) -> Self:
        """The path to each row's node [B, 1], and the token [B, 1] that is emitted after it."""
        shape = tree.topology
        path = shape.path_to(node.squeeze(1))  # [B, A]
        count = shape.steps_to.gather(1, node)  # [B, 1]
        after = torch.cat([tree.tokens.gather(1, path[:, 1:]), last], dim=1)  # [B, A]
        steps = torch.arange(shape.max_depth + 1, device=last.device)
        return cls(path, torch.where(steps + 1 < count, after, last), count.squeeze(1))


@dataclass(slots=True)
class Verified:
    """A tree that the target has run, and how its tokens are chosen.

    Attributes:
        logits: [B, N, V], the target's.
        lengths: [B], the root's position.
        text: what the rows have written, the root included.
        kept: takes the processed scores [B, N, V], true along the path, when a list.
    """

    tree: TokenTree
    logits: Tensor
    sampling: Sampling
    lengths: Tensor
    text: Text
    kept: list[Tensor] | None = None

    def scores_at(self, node: Tensor, level: int, alive: Tensor) -> Tensor | None:
        """Processed scores [B, V] after each row's node, for rules that walk down the levels.

        None when no row writes a token here, so that the walk is over.

        `node` [B, 1] is at depth `level`, its path written; `alive` [B, 1] are rows still walking.
        """
        sampling = self.sampling
        # The host reads texts of a form at each level, so it may as well see that the walk is over.
        if level and sampling.forms is not None and not alive.any():
            return None
        at = node.unsqueeze(-1).expand(-1, -1, self.logits.shape[-1])  # [B, 1, V]
        logits = self.logits.gather(1, at).squeeze(1)  # [B, V]
        if not sampling.readers:
            scores = sampling.process_each(logits, self._before(node))
        else:
            rows = None
            if sampling.particular:
                # What such a processor is shown must be what plain decoding would show it, no
                # more: rows that write a token here, and nothing once there is none.
                rows = alive.squeeze(1).cpu().numpy()
                if self.text.remaining is not None:
                    rows = rows & (self.text.remaining > level)
                if not rows.any():
                    return None
            scores = self.text.process(sampling, level, logits, rows)
        if self.kept is not None:
            kept = self.kept[0] if self.kept else self.logits.to(scores.dtype, copy=True)
            here = torch.where(alive.unsqueeze(-1), scores.unsqueeze(1), kept.gather(1, at))
            # A user's processor may change the type at any step.
            self.kept[:] = [kept.to(here.dtype).scatter_(1, at, here)]
        return scores

    def scores_after(self, node: Tensor) -> Tensor:
        """The same for rules that judge any node [B, 1]; no processor may read the text."""
        assert not self.sampling.readers, "processors that read the text"
        scores = self.scores_at(node, 0, torch.ones_like(node, dtype=torch.bool))
        assert scores is not None
        return scores

    def _before(self, node: Tensor) -> Before:
        """What processors read of the text up to each row's node [B, 1], as far as they do."""
        seen, shape, ids, count = self.text.seen, self.tree.topology, None, None
        if self.sampling.of_text:
            ids = self.text.ids
            count = self.text.lengths.unsqueeze(1) + shape.depth.gather(1, node)  # [B, 1]
        if shape.max_depth and (seen is not None or ids is not None):
            path = self.tree.tokens.gather(1, shape.path_to(node.squeeze(1)))  # [B, A]
            if seen is not None:
                seen = seen.scatter(1, path.clamp(0, seen.shape[1] - 1), True)
            if ids is not None:
                steps = torch.arange(path.shape[1], device=path.device) - 1
                ids = ids.scatter(1, self.text.lengths.unsqueeze(1) + steps, path.clamp(min=0))
        return Before(None if seen is None else seen[:, : self.logits.shape[-1]], ids, count)

    def write(self, level: int, token: Tensor) -> None:
        """Note the token [B, 1] that follows the path of `level` tokens; the commit overwrites."""
        if self.sampling.readers:
            self.text.ids.scatter_(1, self.text.lengths.unsqueeze(1) + level, token)

    def ends(self, token: Tensor) -> Tensor | None:
        """Which of the tokens end a row, or None when none can."""
        return None if self.text.ends is None else self.text.ends[token]
