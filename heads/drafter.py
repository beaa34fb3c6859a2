"""The decode part of the drafter contract; `checkpoint` and `trainable` have the others.

While decoding, a drafter answers three calls. `prefill` sees the prompt once. `begin` takes what
was just committed and proposes the root's children. `extend` takes nodes that the tree has grown
and proposes theirs. Alignment, with prompt x0 … x2 and target features f0 … f2 (fi is the target's
state at xi):

    prefill(features=[f0 f1 f2], tokens=[x0 x1 x2])   each token with its own feature
    begin(features=[f2],    tokens=[x3])              each feature with the token emitted from it
    begin(features=[f3 f4], tokens=[x4 x5])           after a round that emitted x4 and x5
    -> proposals for x6; the root of the tree is x5, which has no feature yet
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .checkpoint import DrafterConfig, StoredDrafter
from .core import OptionError, best_of, device_of, keep_resident, output_layer


@dataclass(frozen=True)
class Step:
    """Proposals for the children of W nodes: either logits or ready candidates."""

    logits: Tensor | None = None  # [B, W, Vd] raw logits over the draft vocabulary
    vocabulary: Tensor | None = None  # [Vd] its target ids, or None when they are the same
    ids: Tensor | None = None  # [B, W, k] candidate token ids, best first; -1 where there is none
    log_probs: Tensor | None = None  # [B, W, k] of the candidates, where they are known
    best: list[Tensor] | None = None  # where `note` goes, when given

    def note(self, best: Tensor) -> None:
        """Keep the best scores [B, …] that children were chosen by: NaN, where any score was."""
        if self.best is not None:
            self.best.append(best.flatten(1))

    def top(self, count: int, scores: Tensor | None = None) -> Tensor:
        """The best `count` target ids per node, [B, W, count]; -1 where there are fewer.

        Args:
            scores: to rank by, [B, W, Vd] instead of the logits, or [B, W, k] of the candidates.
        """
        scored: Any = self.logits if scores is None else scores
        if self.ids is not None:
            best = self.ids[..., :count]
            if scores is not None:
                best = self.ids.gather(-1, best_of(scores, best.shape[-1])[1])
        else:
            values, best = best_of(scored, min(count, scored.shape[-1]))
            self.note(values[..., 0])
        if (missing := count - best.shape[-1]) > 0:
            best = nn.functional.pad(best, (0, missing), value=-1)
        return self.named(best)

    def narrower_than(self, count: int) -> bool:
        """Whether a node may have fewer than `count` distinct proposals."""
        return self.logits is not None and self.logits.shape[-1] < count

    def named(self, columns: Tensor) -> Tensor:
        """The target ids that columns of the logits stand for; -1 stays -1."""
        if self.vocabulary is None:
            return columns
        return torch.where(columns < 0, columns, self.vocabulary[columns.clamp(min=0)])


class Drafter(StoredDrafter):
    """Base of all drafters; docs/adding-a-drafter.md is a worked example.

    Shapes: B batch, T tokens of a prompt, A tokens just committed, W nodes of a level, N nodes of a
    tree, F sizes of the features together, V vocabulary.
    """

    config_class = DrafterConfig

    independent: bool = False
    """True when `begin` answers for every depth at once: row d - 1 of its Step holds the proposals
    for depth d, whatever was chosen above (Medusa); `extend` is then never called."""

    trainable: ClassVar[bool] = False
    """Whether it is trained, see `TrainableDrafter`."""

    collects: ClassVar[bool] = False
    """Whether it is made of texts of the target, without training steps; see `collect`."""

    @classmethod
    def learns(cls) -> bool:
        """Whether texts of the target make it what it is, with training steps or without."""
        return cls.trainable or cls.collects

    writes_text: ClassVar[bool] = False
    """Whether it has a language model that writes text without the target."""

    observes: ClassVar[bool] = False
    """Whether `observe` is called. Such a drafter reads the final hidden state, `FINAL`, from which
    the target's logits can be computed where no tree is verified: of prompts, and of texts that
    ranks are recorded on."""

    remembers: ClassVar[bool] = False
    """Whether it keeps what the target writes for the drafts of later requests, see `remember`."""

    _target: tuple[PreTrainedModel] | None = None

    @property
    def max_depth(self) -> int | None:
        """The deepest level that the drafter can propose for; None when there is no bound."""
        config: Any = self.config
        return config.max_depth

    @property
    def default_tree(self) -> str:
        """The tree to decode with where none is given, and none was measured for this drafter."""
        return f"chain:{self.max_depth or 4}"

    @property
    def needs_length_bound(self) -> bool:
        """Whether `reserve` must give a close bound; if not, one captured round serves all
        lengths."""
        return False

    @property
    def draft_vocabulary(self) -> Tensor | None:
        """[Vd] int64 target ids that the drafter knows, ascending; None for all."""
        return None

    @property
    def target(self) -> PreTrainedModel:
        """The target this drafter is bound to."""
        if self._target is None:
            name = type(self).__name__
            raise OptionError(f"{name} has no target yet; call drafter.bind(target) first.")
        return self._target[0]

    def bind(self, target: PreTrainedModel) -> Self:
        """Set the target; its modules that the drafter calls are neither registered nor saved.

        Raises:
            OptionError: the target has other sizes, or is on another device.
        """
        text = target.config.get_text_config(decoder=True)
        own = self.config
        if (text.hidden_size, text.vocab_size) != (own.hidden_size, own.vocab_size):
            raise OptionError(
                f"the drafter was shaped for a target of hidden size {own.hidden_size} and "
                f"vocabulary {own.vocab_size}, found {text.hidden_size} and {text.vocab_size}; "
                "load the target it was trained for."
            )
        own_tensors = itertools.chain(self.parameters(), self.buffers())
        devices = {tensor.device for tensor in own_tensors} | {device_of(output_layer(target))}
        if len(devices) > 1:
            raise OptionError(
                f"drafter and target are on different devices, {' and '.join(map(str, devices))}; "
                "move the drafter to the device of the target's output layer."
            )
        keep_resident(target, self.shared_modules(target))
        object.__setattr__(self, "_target", (target,))
        return self

    def collect(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Replace what the drafter is made of, where it `collects`; not while it decodes.

        Args:
            texts: the tokens of each, [L] int, and which of them it may propose, [L] bool.
        """
        raise NotImplementedError

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        """The target's layers that it calls; where weights are streamed in, these stay."""
        return [target.get_input_embeddings(), output_layer(target)]

    def start(self, batch: int, capacity: int) -> Any:
        """A fresh state for `batch` rows of at most `capacity` tokens each.

        A captured round runs no Python: what a round leaves to the next is tensors that are the
        state's attributes, and slab caches. Python's numbers in it are set by `reserve` alone.
        Attributes that `begin` sets anew before anything reads them are left to no other round; its
        class may name them, as `scratch`, which spares a captured round their copies.
        """

    def reserve(self, state: Any, longest: int, room: int) -> None:
        """Called before each `begin` with an upper bound on the rows' root positions.

        Memory that outlasts the round is allocated here, none in `begin` and `extend`, which may
        run in a CUDA graph.

        Args:
            longest: no row's new root is past this position.
            room: how many more tokens or nodes a row needs memory for after its root.
        """

    def prefill(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        """See the prompt: features [B, T, F] and tokens [B, T], padded on the right to T.

        A state that has served a request may be given again: this starts it anew.

        Args:
            count: [B] int64, true tokens of each row.
        """

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        """Take what was just committed; propose the root's children, or every depth at once.

        Args:
            features: [B, A, F], the target's features that the tokens were emitted from.
            tokens: [B, A] int64, what was emitted; the last true one is the new root.
            count: [B] int64, true entries of each row; 0 where a row has ended: any answer will do.
        """
        raise NotImplementedError

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        """Grow one level: propose the children of W new nodes, which are all of one depth.

        Args:
            tokens: [B, W] int64, the new nodes' tokens.
            parent: [B, W] int64, each node's parent among the nodes grown so far in this round, in
                the order of the `extend` calls; -1 where the parent is the root.
        """
        raise NotImplementedError

    def observe(self, state: Any, tokens: Tensor, logits: Tensor, true: Tensor) -> None:
        """Learn from what the target has answered, where the drafter `observes`.

        Called after each verification, in the same CUDA graph, so it waits for nothing either: it
        changes tensors of the state. The last token of a prompt is a tree of one node.

        Args:
            tokens: [B, N] int64, the tree's nodes, the root first, accepted later or not.
            logits: [B, N, V], the target's after each node, before any processor.
            true: [B, N] bool; False where there is no node, or the row has ended.
        """
        raise NotImplementedError

    def remember(self, tokens: Tensor, prompt: int) -> None:
        """Keep a text that the target has written, where the drafter `remembers`.

        Called when a request has ended, between rounds; other requests may be decoded meanwhile,
        also by captured rounds, so tensors are changed in place.

        Args:
            tokens: [L] int64, the prompt's, of which there are `prompt`, and the answer's.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Draft as if nothing had been remembered."""
        raise NotImplementedError


def last_true(values: Tensor, count: Tensor) -> Tensor:
    """The last true entry of each row: [B, A, F], [B] -> [B, F]. A row of count 0 gives entry 0."""
    return entries_at(values, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)


def from_last_true(values: Tensor, count: Tensor, known: int) -> Tensor:
    """The last true entry of the first `known`, and all that follow these.

    Drafts that are made all at once come from these entries: [B, known + n, F] -> [B, 1 + n, F].
    """
    root = last_true(values[:, :known], count).unsqueeze(1)
    return torch.cat([root, values[:, known:]], 1)


def entries_at(values: Tensor, index: Tensor) -> Tensor:
    """Entries of each row: [B, A, F], [B, W] -> [B, W, F]; cheaper than `take_along_dim`."""
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
