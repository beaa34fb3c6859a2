"""What drafters minimise: hard labels or the target's distribution, at every depth.

All families share these functions; what a drafter must answer is the contract of
`TrainableDrafter`. Tensors as wide as the vocabulary exist for one chunk of positions at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headstart.heads import TrainableDrafter
from headstart.heads.core import OutputLayer

IGNORED = -100
"""The label of a position that teaches nothing."""

_KEPT_LOGITS = 9 * 2**20
"""So many logits may stay in memory until the backward pass; beyond, chunks are computed twice.

In float32 they are a little more than the 32 MiB from which on glibc gives memory back at once.
Smaller chunks go to its heap, which fragmented to ten times what was in use.
"""


def soft_cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-sum p log q, in nats; the gradient of `forward_kl`. All: [M, Vd], [M, Vd] -> [M]."""
    return -(log_p.exp() * log_q).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) in nats: the drafter spreads over all that the target may say."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q ‖ p) in nats: the drafter keeps to what the target is likely to say.

    Like `total_variation` it hardly has a gradient where p and q have nothing in common, so it is
    for drafters that know something already.
    """
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The mean of both distributions' KL to their mixture, in nats; at most log 2."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return (forward_kl(log_p, log_m) + forward_kl(log_q, log_m)) / 2


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum |p - q| / 2: the share of sampled drafts that rejection turns down (Leviathan 2023)."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log of the share that is accepted, sum min(p, q) (LK losses, arXiv 2602.23881).

    Its gradient is that of `total_variation` divided by the acceptance, so that a drafter that is
    hardly ever accepted still learns.
    """
    return -torch.minimum(log_p, log_q).logsumexp(-1)


Divergence = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Divergence | None] = {
    "cross_entropy": None,  # of the label: what the target wrote
    "soft_cross_entropy": soft_cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "acceptance": acceptance,
}
"""`train.loss`: how far the drafter's distribution q is from the target's p, by name."""


def head_labels(
    tokens: Tensor, supervised: Tensor, depths: int, vocabulary: Tensor | None = None
) -> Tensor:
    """The label of every depth at every position.

    Depth k (1 … K) starts from the target's feature at position t, from which the target itself
    predicts token t + 1, and predicts token t + k + 1:

        tokens      x0  x1  x2  x3  x4
        features    f0  f1  f2  f3  f4
        the target  x1  x2  x3  x4
        depth 1     x2  x3  x4   –   –
        depth 2     x3  x4   –   –   –

    Args:
        tokens: [B, T] int64.
        supervised: [B, T] bool, the tokens that may serve as labels.
        depths: K.
        vocabulary: [Vd] the draft vocabulary, ascending; None when every token is known.

    Returns:
        [K, B, T] int64 ids of the draft vocabulary; `IGNORED` past the row's end, where the label
        is not supervised, and where the draft vocabulary lacks it.
    """
    known = supervised
    ids = tokens
    if vocabulary is not None:
        ids = torch.searchsorted(vocabulary, tokens).clamp(max=len(vocabulary) - 1)
        known = supervised & (vocabulary[ids] == tokens)
    labels = ids.masked_fill(~known, IGNORED)  # [B, T]
    padded = functional.pad(labels, (0, depths + 1), value=IGNORED)  # [B, T + K + 1]
    length = tokens.shape[1]
    return torch.stack([padded[:, k + 1 : k + 1 + length] for k in range(1, depths + 1)])


def label_counts(labels: Tensor) -> Tensor:
    """How many labels each depth has: [K, B, T] -> [K]."""
    return (labels != IGNORED).flatten(1).sum(1)


class Teacher:
    """The target's own distribution, from its final features and a chunk at a time.

    Args:
        vocabulary: [Vd] what the drafter knows; the distribution is renormalised over it.

    Raises:
        OptionError: the target does something unknown to its output layer's logits.
    """

    def __init__(self, target: PreTrainedModel, vocabulary: Tensor | None = None):
        self.output = OutputLayer(target, vocabulary)
        self.layer = self.output.layer
        _ = self.output.finish  # found now, while the target is as it is

    @torch.no_grad()
    def __call__(self, features: Tensor) -> Tensor:
        """Final features [M, D] -> log-probabilities [M, Vd], float32."""
        return self.read(self.layer, features)

    def read(self, layer: nn.Module, features: Tensor) -> Tensor:
        """The same with another output layer, and a gradient."""
        with torch.autocast(features.device.type, enabled=False):
            return self.output(features, layer).float().log_softmax(-1)


def draft_loss(
    drafter: TrainableDrafter,
    features: Tensor,
    tokens: Tensor,
    labels: Tensor,
    counts: Tensor,
    decay: float,
    loss: str = "cross_entropy",
    teacher: Teacher | None = None,
    final: Tensor | None = None,
    kept: int = _KEPT_LOGITS,
    feature_weight: float = 0.0,
) -> Tensor:
    """The sum over depths k = 1 … K of decay**k times the depth's mean loss.

    The mean is over `counts`, not over this batch, so that the gradients of micro-batches, or of
    processes, add up to the gradient of the whole batch however it is split. Depth k at position t
    is compared with the label x_t+k+1 or, where the loss asks for the target's distribution, with
    what the target says at position t + k, which it derives from its final feature there. Positions
    whose label the draft vocabulary lacks are left out of both.

    Args:
        features: [B, T, F]; tokens: [B, T].
        labels: [K, B, T], see `head_labels`.
        counts: [K], each depth's labels in the whole optimizer step, see `label_counts`.
        decay: the weight of depth k is decay**k.
        loss: one of `LOSSES`; all but `cross_entropy` need `teacher` and `final`.
        final: [B, T, D], the target's features that its output layer reads.
        kept: logits that may be held for the backward pass; where there are more, they are computed
            in chunks of at most so many, and again on the way back.
        feature_weight: of the distance between the drafter's `predicted_features` and the target's,
            which is added to each position's loss; any but 0 needs `final`.

    Returns:
        The loss, float32 scalar; 0 with zero gradients when there is no label.
    """
    divergence = LOSSES[loss]
    where = (labels != IGNORED).any(0)  # [B, T]
    states = drafter.draft_hidden_states(features, tokens, where, len(labels))  # [K, M, D']
    labels = labels[:, where]  # [K, M]
    depths, positions = labels.shape
    # An empty batch must still reach every parameter, or data-parallel training waits for them.
    total = states.new_zeros((), dtype=torch.float32)
    if not positions:
        return total + sum(parameter.float().sum() * 0.0 for parameter in drafter.parameters())
    width = drafter.config.vocab_size
    if divergence is None and drafter.draft_vocabulary is not None:
        width = len(drafter.draft_vocabulary)
    chunk = max(kept // width, 1)
    again = depths * positions * width > kept and torch.is_grad_enabled()
    spoken = None if final is None else final.flatten(0, 1)  # [B * T, D]
    place = where.flatten().nonzero().squeeze(1)  # [M]
    assert divergence is None or (teacher is not None and spoken is not None)
    if feature_weight:
        foretold = drafter.predicted_features(states)  # [K, M, D]
        assert foretold is not None and spoken is not None
        for depth in range(1, depths + 1):
            taught = (place + depth).clamp(max=len(spoken) - 1)
            apart = feature_distance(foretold[depth - 1], spoken.index_select(0, taught))  # [M]
            weight = feature_weight * decay**depth / counts[depth - 1].clamp(min=1)
            total = total + weight * apart.masked_fill(labels[depth - 1] == IGNORED, 0.0).sum()
    for depth in range(1, depths + 1):
        read = drafter.draft_logits(depth)
        weight = decay**depth / counts[depth - 1].clamp(min=1)
        for first in range(0, positions, chunk):
            # The last chunk is as large as the others: it repeats rows, whose labels are ignored.
            start = max(min(first, positions - chunk), 0)
            part = slice(start, start + chunk)
            wanted = labels[depth - 1, part]
            if start < first:
                wanted = wanted.clone()
                wanted[: first - start] = IGNORED
            lesson = None
            if divergence is not None and teacher is not None and spoken is not None:
                # Past a row's end this is another row's, but there the label is ignored.
                taught = (place[part] + depth).clamp(max=len(spoken) - 1)
                lesson = divergence, teacher, spoken, taught
            chosen = read, states[depth - 1, part], wanted, lesson
            if again:
                # An adapted output layer may have dropout, which must be drawn alike both times.
                random = drafter.adapter is not None
                nats = checkpoint(_sum, *chosen, use_reentrant=False, preserve_rng_state=random)
            else:
                nats = _sum(*chosen)
            total = total + weight * nats
    return total


def feature_distance(foretold: Tensor, features: Tensor) -> Tensor:
    """The smooth L1 distance of features, the mean over their entries: [M, D], [M, D] -> [M].

    With the soft cross entropy it is the loss of EAGLE-1 (arXiv 2401.15077), which weighs the
    distance ten times as much.
    """
    apart = functional.smooth_l1_loss(foretold.float(), features.float(), reduction="none")
    return apart.mean(-1)


def drift(
    teacher: Teacher,
    layer: nn.Module,
    base: Tensor,
    adapted: Tensor,
    count: Tensor,
    kept: int = _KEPT_LOGITS,
) -> Tensor:
    """How far an adapted target has moved: the mean KL(base ‖ adapted), in nats a position.

    It is the self-distillation loss of Medusa-2, with what the target said without its adapter as
    the soft label. As in `draft_loss` the mean is over the whole step's positions, and logits are
    held for one chunk at a time.

    Args:
        teacher: the base, over the whole vocabulary.
        layer: the adapted target's output layer.
        base, adapted: [M, D], the final features without and with the adapter.
        count: scalar, the positions of the whole optimizer step.

    Returns:
        The loss, float32 scalar.
    """
    chunk = max(kept // teacher.layer.weight.shape[0], 1)
    again = len(base) > chunk and torch.is_grad_enabled()
    total = adapted.new_zeros((), dtype=torch.float32)
    for part in zip(base.split(chunk), adapted.split(chunk), strict=True):
        if again:
            nats = checkpoint(_apart, teacher, layer, *part, use_reentrant=False)
        else:
            nats = _apart(teacher, layer, *part)
        total = total + nats
    return total / count.clamp(min=1)


def _apart(teacher: Teacher, layer: nn.Module, base: Tensor, adapted: Tensor) -> Tensor:
    """The summed divergence of a chunk: [M, D], [M, D] -> scalar."""
    return forward_kl(teacher(base), teacher.read(layer, adapted)).sum()


def _sum(
    read: Callable[[Tensor], Tensor],
    states: Tensor,
    labels: Tensor,
    lesson: tuple[Divergence, Teacher, Tensor, Tensor] | None,
) -> Tensor:
    """The summed loss of a chunk of one depth: states [M, D'], labels [M] -> scalar.

    Args:
        lesson: the divergence from what a teacher says about the features [N, D] at places [M].
    """
    logits = read(states)  # [M, Vd]
    if lesson is None:
        return hard_loss(logits.device.type)(logits, labels)
    logits = logits.float()
    divergence, teacher, final, taught = lesson
    log_p = teacher(final.index_select(0, taught))  # [M, Vd]
    return divergence(log_p, logits.log_softmax(-1)).masked_fill(labels == IGNORED, 0.0).sum()


@cache
def hard_loss(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The summed cross entropy of logits [M, Vd] and labels [M]: on a GPU liger_kernel's, if it is
    installed, which makes no float32 copy of the logits and writes their gradient over them.

    Args:
        device: a type of devices, such as `cuda`.
    """
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        fused = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
        return partial(fused, ignore_index=IGNORED, reduction="sum")
    entropy = partial(functional.cross_entropy, ignore_index=IGNORED, reduction="sum")
    return lambda logits, labels: entropy(logits.float(), labels)
