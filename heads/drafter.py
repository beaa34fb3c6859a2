"""The contract of every drafter, and the table of families.

While decoding, a drafter answers three calls. `prefill` sees the prompt once. `begin` takes what
was just committed and proposes the root's children. `extend` takes nodes that the tree has grown
and proposes theirs.
Alignment, with prompt x0 … x2 and target features f0 … f2 (fi is the target's state at xi):

    prefill(features=[f0 f1 f2], tokens=[x0 x1 x2])   each token with its own feature
    begin(features=[f2],    tokens=[x3])              each feature with the token emitted from it
    begin(features=[f3 f4], tokens=[x4 x5])           after a round that emitted x4 and x5
    -> proposals for x6; the root of the tree is x5, which has no feature yet

In training it answers two: `states`, what it holds at every depth while the true text is fed to it,
and `readout`, which turns a depth's states into logits. Depth k at position t is what `begin` (k =
1) or the k-1st `extend` after it would answer, had the round begun at t:

    position t     feature   tokens seen since   predicts   while decoding
    depth 1        f_t       x_t+1               x_t+2      begin(f_t, x_t+1), the root's children
    depth 2        f_t       x_t+1 x_t+2         x_t+3      extend(x_t+2), the children of x_t+2
    depth k        f_t       x_t+1 … x_t+k       x_t+k+1    extend(x_t+k)

Loss, labels and ranks need no more, and never ask for the family.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .core import FINAL, OptionError, device_of, keep_resident, output_layer
from .parts.adapter import Adapter

FAMILIES: dict[str, str] = {
    "draft_model": "headstart.heads.draft_model:DraftModel",
    "eagle": "headstart.heads.eagle:Eagle",
    "eagle3": "headstart.heads.eagle:Eagle3",
    "hydra": "headstart.heads.hydra:Hydra",
    "lookup": "headstart.heads.lookup:Lookup",
    "medusa": "headstart.heads.medusa:Medusa",
    "medusa2": "headstart.heads.medusa2:Medusa2",
    "redrafter": "headstart.heads.redrafter:ReDrafter",
}
"""Every family, by name: where its class lives. This is the registration line of a new drafter."""


@dataclass(frozen=True)
class Step:
    """Proposals for the children of W nodes: either logits or ready candidates.

    Attributes:
        logits: [B, W, Vd] raw logits over the draft vocabulary.
        vocabulary: [Vd] target ids of the draft vocabulary, or None when they are the same.
        ids: [B, W, k] candidate token ids, best first; -1 where there is none.
    """

    logits: Tensor | None = None
    vocabulary: Tensor | None = None
    ids: Tensor | None = None

    def top(self, count: int, scores: Tensor | None = None) -> Tensor:
        """The best `count` target ids per node, [B, W, count]; -1 where there are fewer.

        Args:
            scores: [B, W, Vd] to rank by instead of the logits.
        """
        if self.ids is not None:
            missing = count - self.ids.shape[-1]
            return torch.nn.functional.pad(self.ids, (0, max(missing, 0)), value=-1)[..., :count]
        scores = self.logits if scores is None else scores
        assert scores is not None
        if count == 1:
            best = scores.argmax(-1, keepdim=True)
        else:
            best = scores.topk(min(count, scores.shape[-1]), dim=-1).indices  # [B, W, count]
        if best.shape[-1] < count:
            best = torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=-1)
        return self.named(best)

    def narrower_than(self, count: int) -> bool:
        """Whether a node may have fewer than `count` distinct proposals."""
        return self.logits is not None and self.logits.shape[-1] < count

    def named(self, columns: Tensor) -> Tensor:
        """The target ids that columns of the logits stand for; -1 stays -1."""
        if self.vocabulary is None:
            return columns
        return torch.where(columns < 0, columns, self.vocabulary[columns.clamp(min=0)])


class DrafterConfig(PreTrainedConfig):
    """What every drafter's `config.json` says; `model_type` is `headstart_` + the family's name.

    Attributes:
        hidden_size: D of the target.
        vocab_size: V of the target's output layer.
        feature_layers: the hidden states that the drafter reads, see `FeatureTap`; may be empty.
    """

    model_type = "headstart_"
    hidden_size: int = 0
    vocab_size: int = 0
    feature_layers: list[int] | tuple[int, ...] = (FINAL,)

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """The names that a recipe's drafter section may set."""

    @classmethod
    def family_name(cls) -> str:
        """The family's name in `FAMILIES`."""
        return cls.model_type.removeprefix("headstart_")

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """A config with the target's shapes and a recipe's options.

        Raises:
            OptionError: an option that the family does not have, or a value of the wrong type.
        """
        unknown = sorted(set(options) - set(cls.OPTIONS))
        if unknown:
            name = cls.family_name()
            raise OptionError(
                f"drafter.{unknown[0]} is not an option of {name!r}; expected one of: "
                f"{', '.join(cls.OPTIONS)}."
            )
        text = target.config.get_text_config(decoder=True)
        try:
            return cls(hidden_size=text.hidden_size, vocab_size=text.vocab_size, **options)
        except StrictDataclassError as error:
            if isinstance(error.__cause__, OptionError):
                raise error.__cause__ from None
            message = " ".join(str(error.__cause__ or error).split())
            raise OptionError(f"{message}; correct the recipe's drafter section.") from error


class Drafter(PreTrainedModel):
    """Base of all drafters. Shapes: B batch, A tokens just committed, W nodes, V vocabulary."""

    config_class = DrafterConfig
    base_model_prefix = ""
    main_input_name = "features"

    independent: ClassVar[bool] = False
    """True when `begin` answers for every depth at once: row d - 1 of its Step holds the proposals
    for depth d, whatever was chosen above (Medusa); `extend` is then never called."""

    trainable: ClassVar[bool] = True
    """Whether drafters of this family learn: then `train_depths` and what follows it are there."""

    writes_text: ClassVar[bool] = False
    """Whether `language_model` writes text without the target, from which the drafter can learn."""

    weightless: ClassVar[bool] = False
    """Whether there are no weights, so that the family's name alone loads it."""

    saved_as_language_model: ClassVar[bool] = False
    """Whether its files are those of an ordinary causal language model, `config.json` included, so
    that any such model can be loaded as this drafter."""

    needs_length_bound: bool = False
    """Whether the host must bound the rows' lengths before each `begin`, see `reserve`. Where it
    need not, one captured round serves all lengths."""

    adapter: Adapter | None = None
    """What the target learns while this drafter is trained, for a drafter that adapts its target;
    the loss, the artifact and its loading then take care of both."""

    _target: tuple[PreTrainedModel] | None = None

    @property
    def max_depth(self) -> int | None:
        """The deepest level that the drafter can propose for; None when there is no bound."""
        return None

    @property
    def target(self) -> PreTrainedModel:
        """The target this drafter is bound to."""
        if self._target is None:
            raise OptionError(
                f"{type(self).__name__} has no target yet; call drafter.bind(target) first."
            )
        return self._target[0]

    @classmethod
    def from_checkpoint(
        cls, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """A checkpoint of the method's authors, or of another trainer, as this family has it.

        Args:
            config: its `config.json`; published ones contradict their tensors, which are right.
            tensors: its weights, by the names that they have there.

        Returns:
            The fields of this family's config that the checkpoint knows, the rest being the
            target's or the defaults; and the tensors under this class's names, of whatever dtype.
            None where it is none of this family's.

        Raises:
            ArtifactError: it is one of this family's, and cannot be said exactly in its terms.
        """
        return None

    def bind(self, target: PreTrainedModel) -> Self:
        """Borrow what the drafter needs of the target, such as its output layer, without owning it.

        The target is neither registered as a submodule nor saved.
        """
        text = target.config.get_text_config(decoder=True)
        own = self.config
        if (text.hidden_size, text.vocab_size) != (own.hidden_size, own.vocab_size):
            raise OptionError(
                f"the drafter was shaped for a target of hidden size {own.hidden_size} and "
                f"vocabulary {own.vocab_size}, found {text.hidden_size} and {text.vocab_size}; "
                "load the target it was trained for."
            )
        devices = {p.device for p in self.parameters()} | {device_of(output_layer(target))}
        if len(devices) > 1:
            raise OptionError(
                f"drafter and target are on different devices, {' and '.join(map(str, devices))}; "
                "move the drafter to the device of the target's output layer."
            )
        keep_resident(target, self.shared_modules(target))
        object.__setattr__(self, "_target", (target,))
        return self

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        """The target's layers that this drafter calls while decoding.

        Where the target's weights are streamed in for each forward, these are brought in to stay.
        """
        return [target.get_input_embeddings(), output_layer(target)]

    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Take from the bound target what the drafter starts its training from; nothing here.

        Args:
            token_counts: [V], how often each token occurs in the corpus.
        """

    def start(self, batch: int, capacity: int) -> Any:
        """A fresh state for `batch` rows of at most `capacity` tokens each.

        A captured round runs no Python: what a round leaves to the next is tensors that are the
        state's attributes, and slab caches. What is a number of Python's follows from `reserve`.
        """
        return None

    def reserve(self, state: Any, longest: int, room: int) -> None:
        """Hear before a round that no row's root stands past position `longest`.

        For drafters with a cache, which must know on the host how much of it is in use. They make
        room here, for `room` more tokens: inside of a round nothing that lasts is allocated.
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
        """Grow one level: propose the children of W new nodes.

        Args:
            tokens: [B, W] int64, the new nodes' tokens.
            parent: [B, W] int64, each node's parent among the nodes grown so far in this round, in
                the order of the `extend` calls; -1 where the parent is the root.
        """
        raise NotImplementedError

    @property
    def train_depths(self) -> int:
        """K, the depths that a training loss covers; 0 for a drafter that is not trained.

        A drafter whose depth k at position t is its depth 1 at position t + k - 1, as with any
        language model, is taught all of them by one.
        """
        return 0

    def predicted_features(self, states: Tensor) -> Tensor | None:
        """What a drafter takes the target's final features to be, for a loss that compares them.

        Args:
            states: [K, M, D'], see `states`.

        Returns:
            [K, M, D], at depth k and position t the final feature at t + k; None for a drafter that
            foretells none.
        """
        return None

    @property
    def language_model(self) -> PreTrainedModel | None:
        """The language model in it that writes text without the target; None if there is none.

        What it writes can then teach the drafter, see `headstart.train.on_policy`.
        """
        return None

    @property
    def draft_vocabulary(self) -> Tensor | None:
        """[Vd] int64 target ids that the drafter knows, ascending; None for all."""
        return None

    def draft_hidden_states(
        self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
    ) -> Tensor:
        """What the drafter holds at depths 1 … `depths` with the true text fed to it.

        Args:
            features: [B, T, F], the target's features at the tokens.
            tokens: [B, T] int64, the text; rows are padded on the right.
            where: [B, T] bool, M positions in all, in the order of `features[where]`. A state that
                would need a token past the row's end may be anything.

        Returns:
            [depths, M, D'], see the table above; D' is the drafter's own affair.
        """
        raise NotImplementedError

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        """The output layer of a depth: states [M, D'] -> logits [M, Vd].

        It is asked for once a loss and then applied to one chunk of states after another, so what
        is derived from the weights is derived here.
        """
        raise NotImplementedError


def family(name: str) -> type[Drafter]:
    """The class of a drafter family, imported when first asked for.

    Raises:
        OptionError: no family of that name.
    """
    if name not in FAMILIES:
        raise OptionError(
            f"drafter.family is {name!r}; expected one of: {', '.join(sorted(FAMILIES))}."
        )
    module, _, attribute = FAMILIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def last_true(values: Tensor, count: Tensor) -> Tensor:
    """The last true entry of each row: [B, A, F], [B] -> [B, F]. A row of count 0 gives entry 0."""
    index = (count - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, values.shape[-1])
    return values.gather(1, index).squeeze(1)
