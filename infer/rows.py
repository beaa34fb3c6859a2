"""What the host knows of a batch's rows: how long each is, and where what it accepted is cut."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from headstart.heads import DecodingError

from .log_probabilities import LogProbabilities
from .stats import Drafted, Emitted

_NEVER = 1 << 60


Fault = Callable[[int, int], DecodingError]
"""Why a row cannot go on, given its number and how many tokens it has written."""


def _no_token(row: int, written: int) -> DecodingError:
    return DecodingError(
        f"the target's scores for new token {written} of row {row} are NaN or infinite; load it in "
        "float32 or bfloat16, and check its weights, processors and grammar."
    )


def _no_position(context: int | None, row: int, written: int) -> DecodingError:
    return DecodingError(
        f"row {row} has used all {context} positions of the target after {written} new tokens; set "
        "max_new_tokens to at most that."
    )


class Rows:
    """The rows of one batch of requests.

    Args:
        pads: [B] columns of padding before each prompt.
        width: columns of the prompts, padding included.
        new_tokens: at most so many tokens are emitted per row.
        eos: token ids that end a row; vocabulary: V.
        context: positions of the target, None without an end.
        together: whether rows write on until the stopping criteria have held for all of them, as
            they do under `generate` without an end token.

    Attributes:
        lengths: [B] columns of each row's text, padding included; they always count the root.
        remaining: [B] tokens that each row may still emit. Both arrays change in place.
        longest: the largest position of a root; even: whether all roots stand there.
        free: so many tokens every row that goes on may emit before a bound cuts it, or more.
        ended: whether a row has ended, while others go on.
        special: [V + 1] bool, the tokens that need a second look: end tokens, and -1, the last.
        one_node: [B] ones, the path in a tree of its root alone.
    """

    def __init__(
        self,
        pads: np.ndarray,
        width: int,
        new_tokens: int,
        eos: Sequence[int],
        vocabulary: int,
        context: int | None,
        together: bool,
    ):
        batch = len(pads)
        self._pads, self._width, self._context = pads, width, context
        self.lengths, self.remaining = np.full(batch, width), np.full(batch, new_tokens)
        # Until the prefill has emitted a token, the last one of the prompt is the root.
        self.longest, self.even, self.free = width - int(pads.min()) - 1, True, 0
        self.ended, self._going = False, np.ones(batch, dtype=bool)
        self.special = np.zeros(vocabulary + 1, dtype=bool)
        self.special[[-1, *(token for token in eos if 0 <= token < vocabulary)]] = True
        self._roots, self._emitted = np.zeros(batch, dtype=int), []
        self.one_node = np.ones(batch, dtype=int)
        # [B] length of the text where each row's criteria first held.
        self._met_at = np.full(batch, _NEVER) if together else None

    @property
    def positions(self) -> np.ndarray:
        """[B] the position of each root."""
        return self.lengths - self._pads - 1

    @property
    def roots(self) -> np.ndarray:
        """[B] the last token of each row that was cut."""
        return self._roots.clip(min=0)

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return self.free <= 0 and not self.remaining.any()

    def _note_ends(self) -> None:
        """Find which rows go on, once any has been cut or filled anew."""
        self._going = self.remaining > 0  # [B]
        self.ended = not self._going.all()

    def end(self, rows: Sequence[int]) -> None:
        """Let rows write no more."""
        self.remaining[list(rows)] = 0
        self._note_ends()

    def refill(self, rows: Sequence[int], roots: Sequence[int], new_tokens: Sequence[int]) -> None:
        """Let rows begin anew with a root at these positions, and so many tokens to emit."""
        where = list(rows)
        self._pads[where] = self._width - 1 - np.array(roots)
        self.lengths[where], self.remaining[where] = self._width, new_tokens
        positions = self.positions
        self.longest = int(positions.max())
        self.even, self.free = int(positions.min()) == self.longest, 0
        self._note_ends()
        self._emitted.clear()

    def take(
        self,
        nodes: np.ndarray,
        tokens: np.ndarray,
        met: np.ndarray | None = None,
        drafter: np.ndarray | None = None,
    ) -> tuple[Emitted, bool]:
        """Add what a round accepted to the rows, as far as they go.

        Args:
            nodes: [B] of the accepted path; tokens, met, drafter: see `unpack`.

        Returns:
            What the round emitted, and whether a row may have been cut, or its token be none.
        """
        count, steps = nodes, tokens.shape[1]
        special = self.special[tokens]
        if self.ended:  # what those rows draw is nobody's
            count, special = np.where(self._going, nodes, 0), special & self._going[:, None]
        cut = met is not None or bool(special.any())
        if cut or self.free <= steps:
            going = self._going
            count = self._cut(nodes, tokens, met)
            cut = cut or self.free <= 0 or not np.array_equal(going, self._going)
            last = tokens[np.arange(len(count)), count - 1]
            self._roots = np.where(count > 0, last, self._roots)
        else:
            self.free -= int(count.max())  # of one row exactly, else a bound until one is cut
            self.remaining -= count
            self.lengths += count
        if len(count) == 1:
            self.longest += int(count[0])
        else:
            positions = self.positions
            self.longest = int(positions.max())
            self.even = int(positions.min()) == self.longest
        self._emitted.append(Emitted(count, nodes, tokens, drafter))
        return self._emitted[-1], cut

    def _cut(self, nodes: np.ndarray, tokens: np.ndarray, met: np.ndarray | None) -> np.ndarray:
        """How many of the tokens [B, A] are kept, [B], given the nodes that were accepted."""
        count, space = np.minimum(nodes, self.remaining), _NEVER
        if self._context is not None:
            # Nodes past the last position ran at a wrong one.
            space = self._context - self.positions
            count = np.minimum(count, space)
        count, stopped = _cut_at(self.special[tokens] & (tokens >= 0), count)
        if met is not None and self._met_at is not None:
            inside = met & (np.arange(met.shape[1]) < count[:, None])
            place = np.where(inside.any(1), self.lengths + inside.argmax(1) + 1, _NEVER)
            self._met_at = np.minimum(self._met_at, place)
        elif met is not None:
            count, also = _cut_at(met, count)
            stopped = stopped | also
        self.lengths += count
        remaining = self.remaining - count
        remaining[stopped] = 0
        if self._met_at is not None:
            remaining = np.minimum(remaining, (self._met_at.max() - self.lengths).clip(0))
        self.remaining[:] = remaining
        self._note_ends()
        left = np.minimum(remaining, space - count)
        self.free = int(left.min(where=self._going, initial=_NEVER)) if self._going.any() else 0
        return count

    def check(self) -> None:
        """Refuse to go on where the last scores were no distribution, or no position is left."""
        written = self.lengths - self._width
        for row, fault in self.faults().items():
            raise fault(row, int(written[row]))

    def faults(self) -> dict[int, Fault]:
        """The rows that cannot go on, and why, once a round may have ended one."""
        last, rows = self._emitted[-1], np.arange(len(self.remaining))
        none = (last.count > 0) & (last.tokens[rows, last.count - 1] < 0)
        full = (self.remaining > 0) & (self.positions >= (self._context or _NEVER))
        found = dict.fromkeys(rows[full].tolist(), partial(_no_position, self._context))
        return found | dict.fromkeys(rows[none].tolist(), _no_token)

    def written(self, row: int) -> np.ndarray:
        """[T] the tokens that a row has emitted."""
        found = [emitted.tokens[row, : emitted.count[row]] for emitted in self._emitted]
        return np.concatenate([np.empty(0, dtype=int), *found])

    def text(self, pad: int) -> np.ndarray:
        """[B, longest] what the rows have emitted, padded after each row's end."""
        return self._laid_out([emitted.tokens for emitted in self._emitted], pad)

    def spans(self) -> list[tuple[int, int]]:
        """The columns in which each row's text begins and ends, the prompt included."""
        return list(zip(self._pads.tolist(), self.lengths.tolist(), strict=True))

    def drafted(self) -> Drafted:
        """Who wrote each token of that text."""
        depths = [emitted.depths for emitted in self._emitted]
        drafters = [emitted.drafters for emitted in self._emitted]
        return Drafted(self._laid_out(depths, -1), self._laid_out(drafters, -1))

    def logprobs(self) -> LogProbabilities | None:
        """Those of that text; None where none were asked for."""
        found = [each.logprobs for each in self._emitted if each.logprobs is not None]
        if not found:
            return None
        return LogProbabilities(
            self._laid_out([each.chosen for each in found], np.nan),
            self._laid_out([each.best_ids for each in found], -1),
            self._laid_out([each.best for each in found], np.nan),
        )

    def _laid_out(self, values: Sequence[np.ndarray], pad: float) -> np.ndarray:
        """[B, longest, …] of values [B, A, …] for each round's tokens, padded after a row's end."""
        true = np.concatenate(
            [np.arange(e.tokens.shape[1]) < e.count[:, None] for e in self._emitted], 1
        )
        new = self.lengths[:, None] - self._width
        every = np.concatenate(values, 1)[true]
        text = np.full((len(new), int(new.max()), *every.shape[1:]), pad)
        text[np.arange(text.shape[1]) < new] = every
        if self._met_at is not None:
            text = text[:, : max(int(self._met_at.max()) - self._width, 0)]
        return text


def _cut_at(ends: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shorten `count` [B] to the first token that `ends` [B, A] its row; and which rows ended."""
    ends = ends & (np.arange(ends.shape[1]) < count[:, None])
    stopped = np.logical_or.reduce(ends, 1)
    return np.where(stopped, ends.argmax(1) + 1, count), stopped
