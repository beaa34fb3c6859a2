"""What is kept of a request's rounds: a report each, what they add up to, and their scores."""

import math
from dataclasses import dataclass
from functools import reduce
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from .log_probabilities import LogProbabilities


@dataclass(slots=True)
class Emitted:
    """One round's report, on the host."""

    count: np.ndarray  # [B] how many of each row's tokens are new
    nodes: np.ndarray  # [B] nodes on the accepted path before any cut, the root counted
    tokens: np.ndarray  # [B, A] the tokens, the new ones first
    drafter: np.ndarray | None = None  # [B] of several drafters, whose part holds the path
    logprobs: LogProbabilities | None = None  # [B, A], where the request asks for them
    drafted: int = 0  # nodes of each row's tree below the root

    @property
    def depths(self) -> np.ndarray:
        """[B, A] the depth at which each token was drafted; 0 for the target's own.

        A path of three nodes: two drafted tokens, then the target's own, and no more.

        >>> path = np.array([3]), np.array([3]), np.array([[7, 8, 9, 9]])
        >>> Emitted(*path).depths.tolist()
        [[1, 2, 0, 0]]
        """
        steps = np.arange(1, self.tokens.shape[1] + 1)
        return np.where(steps < self.nodes[:, None], steps, 0)

    @property
    def drafters(self) -> np.ndarray:
        """[B, A] the number of the drafter that drafted each token; -1 for the target's own."""
        number = 0 if self.drafter is None else self.drafter[:, None]
        return np.where(self.depths > 0, number, -1)


@dataclass(frozen=True, slots=True)
class Drafted:
    """Who wrote each new token of a request, in the layout of its text behind the prompts.

    With several drafters, a token that more than one proposed counts for the one whose nodes the
    rule walked, which under `greedy`, `match` and `coupled` is the first that was right longest.

    Attributes:
        depths: [B, new] at which depth of its round's tree the token was drafted; 0 for one of the
            target's own; -1 for padding behind a row's end.
        drafters: [B, new] the number of its drafter, in the order in which they were given; -1 for
            the target's own and padding.
    """

    depths: np.ndarray
    drafters: np.ndarray

    @classmethod
    def nothing(cls, batch: int = 0) -> Self:
        """Of a request that wrote no token."""
        return cls(*np.zeros((2, batch, 0), dtype=int))


class Stats:
    """What the rounds of the last call did. A row-round is one round of one unfinished row.

    Args:
        depth: D of the trees.

    Attributes:
        tau: tokens per round; NaN before the first.
        tokens: emitted in rounds; rounds: active row-rounds.
        acceptance_by_depth: D shares from 0 to 1; NaN where no parent was accepted.
        kept_tokens: of the prompt, which were cached already, see `prefix_caching` of `load`.
        prefill_seconds: seconds until the first token was there.
        decode_seconds: seconds from the first token to the last, a streamer's time included.
        drafted: who wrote each new token [B, new], once the call has ended.
        logprobs: of each new token [B, new], where `logprobs` asked for them; else None.
    """

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.prefill_seconds = self.decode_seconds = 0.0
        self.kept_tokens = 0
        self.drafted = Drafted.nothing()
        self.logprobs: LogProbabilities | None = None
        self._rounds: list[Emitted] = []

    def __repr__(self) -> str:
        """The figures that a notebook shows.

        >>> Stats()
        Stats(no rounds)
        >>> stats = Stats(depth=2)
        >>> stats.add(Emitted(np.array([1]), np.array([1]), np.array([[7, 0, 0]])))
        >>> print(str(stats).partition(" prefill")[0])
        Stats(tau=1.00, tokens=1, rounds=1, acceptance_by_depth=[0%, –],
        """
        if not self.rounds:
            return "Stats(no rounds)"
        shares = ", ".join(
            "–" if math.isnan(share) else f"{share:.0%}" for share in self.acceptance_by_depth
        )
        return (
            f"Stats(tau={self.tau:.2f}, tokens={self.tokens}, rounds={self.rounds}, "
            f"acceptance_by_depth=[{shares}], prefill_seconds={self.prefill_seconds:.3g}, "
            f"decode_seconds={self.decode_seconds:.3g})"
        )

    def add(self, emitted: Emitted) -> None:
        self._rounds.append(emitted)

    def extend(self, other: Self) -> None:
        self._rounds += other._rounds

    def rounds_of(self, row: int) -> list[tuple[int, int]]:
        """Of each round of a row: tokens emitted, and nodes of its path, the root counted."""
        pairs = ((int(each.count[row]), int(each.nodes[row])) for each in self._rounds)
        return [(count, nodes) for count, nodes in pairs if count]

    @property
    def counts(self) -> np.ndarray:
        """[rounds, B] tokens that each round emitted in each row; 0 in rows that had ended."""
        return np.array([emitted.count for emitted in self._rounds], dtype=int)

    @property
    def tokens(self) -> int:
        """Tokens emitted in rounds; the first token of a row, which the prefill gives, is not."""
        return sum(int(emitted.count.sum()) for emitted in self._rounds)

    @property
    def rounds(self) -> int:
        """Active row-rounds."""
        return sum(int((emitted.count > 0).sum()) for emitted in self._rounds)

    @property
    def drafted_tokens(self) -> int:
        """Nodes of the rounds' trees below their roots, of active rows."""
        return sum(each.drafted * int((each.count > 0).sum()) for each in self._rounds)

    @property
    def accepted_tokens(self) -> int:
        """Tokens emitted in rounds that were drafted, rather than the target's own."""
        return sum(int(np.minimum(e.count, e.nodes - 1).sum()) for e in self._rounds)

    @property
    def tau(self) -> float:
        """Tokens per round; NaN before the first round."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Acceptance at depth 1 … D, given that the parent was accepted; NaN where none was."""
        tried, accepted = np.zeros((2, self.depth))
        for emitted in self._rounds:
            nodes = emitted.nodes[emitted.count > 0, None]
            depths = np.arange(1, emitted.tokens.shape[1])  # of the round's tree
            tried[: len(depths)] += (nodes >= depths).sum(0)
            accepted[: len(depths)] += (nodes > depths).sum(0)
        return [float(b / a) if a else math.nan for a, b in zip(tried, accepted, strict=True)]


class Record:
    """The target's scores and logits of each emitted token, as `generate` returns them.

    Logits are in float32, and so are scores unless a processor changed their type.

    Args:
        scores: keep the processed scores; logits: keep the raw logits.

    Attributes:
        counts: [B] for each round, how many of its path's entries emitted a token.
    """

    def __init__(self, scores: bool, logits: bool):
        self.wanted = {"scores": scores, "logits": logits}
        self._rounds: list[dict[str, Tensor]] = []
        self.counts: list[np.ndarray] = []

    @classmethod
    def asked(cls, config: GenerationConfig) -> Self | None:
        """The record that a generation config asks for; None where it asks for none."""
        wanted = bool(config.output_scores), bool(config.output_logits)
        return cls(*wanted) if config.return_dict_in_generate and any(wanted) else None

    def note(self, path: Tensor, **found: Tensor) -> None:
        """Keep of `scores` and `logits` [B, N, V] the nodes of a round's accepted path [B, A]."""
        kept = {}
        for name, values in found.items():
            if self.wanted[name]:
                index = path.unsqueeze(-1).expand(-1, -1, values.shape[-1])
                values = values.gather(1, index)  # [B, A, V]
                kept[name] = values.float() if name == "logits" else values
        self._rounds.append(kept)

    def steps(self, new: int, pad: int) -> dict[str, tuple[Tensor, ...]]:
        """Scores, logits or both, as wanted: one [B, V] for each of `new` tokens.

        A row that has ended gets rows of -inf with 0 at the padding token, a certain choice of it,
        where the output layer has one of that id.
        """
        return {name: self._steps(name, new, pad) for name in self.wanted if self.wanted[name]}

    def _steps(self, name: str, new: int, pad: int) -> tuple[Tensor, ...]:
        first = self._rounds[0][name]
        batch, _, vocab = first.shape
        dtype = reduce(torch.promote_types, (kept[name].dtype for kept in self._rounds))
        out = torch.full((new, batch, vocab), -torch.inf, dtype=dtype, device=first.device)
        if 0 <= pad < vocab:
            out[:, :, pad] = 0
        start = torch.zeros(batch, dtype=torch.long, device=first.device)
        for emitted, kept in zip(self.counts, self._rounds, strict=True):
            count = torch.from_numpy(emitted).to(first.device)
            steps = torch.arange(kept[name].shape[1], device=first.device)
            at = start.unsqueeze(1) + steps  # [B, A]
            row, step = ((steps < count.unsqueeze(1)) & (at < new)).nonzero(as_tuple=True)
            out[at[row, step], row] = kept[name][row, step].to(dtype)
            start = start + count
        return out.unbind(0)
