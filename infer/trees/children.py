"""Whose children a node gets: from a drafter's proposals to tokens.

Each parent draws for itself, also where parents share a row of proposals. What was drawn is neither
ranked nor dropped afterwards: either would bias the text.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads import Sampling, Step
from headstart.heads.core import Stream, place
from headstart.heads.core.sampling import draw

from .expansions import SAMPLED, Expansion


@dataclass(frozen=True)
class Children:
    """How a node's children are chosen from the drafter's proposals.

    Attributes:
        expansion: `topk` takes the best tokens; `coupled` the best after the noise that the target
            will use has been added; `with_replacement` draws them independently, as SpecInfer does;
            `without_replacement` draws distinct ones, as Sequoia does.
        sampling: seeds and processors; proposals follow its row-wise warpers.
        first: the number of the root, in a tree of several drafters: nodes are counted on, since
            nodes of one number would share their draws, and be no independent draws.
    """

    expansion: Expansion = "topk"
    sampling: Sampling = Sampling()  # noqa: RUF009 - it is frozen
    first: int = 0

    @property
    def sampled(self) -> bool:
        """Whether children are random draws."""
        return self.expansion in SAMPLED

    def scores(self, step: Step, lengths: Tensor, depth: int | Tensor) -> Tensor | None:
        """What children that are not drawn are ranked by, [B, W, Vd], or [B, W, k] for candidates.

        None for the logits, or the candidates' own order.

        Args:
            lengths: [B], the root's position; depth: the children's, or [W] for each row's.
        """
        known, tokens = step.logits, step.vocabulary
        if known is None:
            known, tokens = step.log_probs, step.ids
        if self.expansion != "coupled" or known is None:
            return None
        positions = lengths.unsqueeze(1) + depth  # [B, 1 or W]
        return self.sampling.perturb(self.sampling.warp(known), positions, tokens)

    def take(
        self, step: Step, count: int, lengths: Tensor, depth: int | Tensor, parents: Tensor
    ) -> Tensor:
        """The children of W parents, [B, W, count] target ids in order; -1 where there is none.

        Candidates are taken as they stand.

        Args:
            step: a row of proposals for each parent, or, where children are drawn, one for all.
            parents: [W] the parents' numbers in the tree, which key the draws; see `first`.
        """
        if step.logits is None or not self.sampled:
            return step.top(count, self.scores(step, lengths, depth))
        warped = self.sampling.warp(step.logits)  # [B, W or 1, Vd]
        numbers = parents + self.first if self.first else parents
        keys = place(lengths.unsqueeze(1) + depth, numbers)  # [B, W]
        if self.expansion == "with_replacement":
            step.note(warped.amax(-1))
            q = warped.softmax(-1).expand(-1, len(parents), -1)  # [B, W, Vd]
            return step.named(draw(q, self.sampling.uniforms(keys, count, Stream.CHILDREN)))
        # The best of log q + Gumbel noise are draws without replacement, in order (Gumbel top-k;
        # Kool, van Hoof and Welling 2019). Nothing takes the place of a child that q has none for.
        log_q = warped.log_softmax(-1)
        scores = self.sampling.perturb(log_q, keys, step.vocabulary, Stream.CHILDREN)  # [B, W, Vd]
        support = log_q.isfinite().sum(-1, keepdim=True)  # [B, W or 1, 1]
        ranks = torch.arange(count, device=scores.device)
        return step.top(count, scores).masked_fill(ranks >= support, -1)


def rows_of(step: Step, first: int, last: int) -> Step:
    """Only the rows of proposals from `first` to before `last`."""
    if step.logits is None:
        assert step.ids is not None
        log_probs = None if step.log_probs is None else step.log_probs[:, first:last]
        return replace(step, ids=step.ids[:, first:last], log_probs=log_probs)
    if (first, last) == (0, step.logits.shape[1]):
        return step
    return replace(step, logits=step.logits[:, first:last])
