"""A draft model with a tokenizer of its own: any smaller causal language model.

It proposes the tokens that the target has, too, and reads the target's tokens as its own, see
`Translation`. Rules are told the probabilities over those tokens alone, so every rule is exact.

Source: token-level intersection (Timor et al. 2025, arXiv 2502.05202).
"""

from typing import Any

from torch import Tensor

from .core import OptionError
from .draft_model import DraftModel
from .drafter import Step, last_true
from .parts.cached_layers import DraftCache
from .parts.student import load_student
from .parts.translation import PIECES, TABLES, TRANSLATION, Translation

_STRETCH, _MORE = 2, 64
"""The cache has slots for so many tokens for each of the target's, and so many more; of a prompt
that takes more, the beginning is left out."""


class TranslatedDraftModel(DraftModel):
    """A loaded language model that drafts for a target with another tokenizer; it is not trained.

    Attributes:
        translation: between the two tokenizers, see `translate`.
    """

    writes_text = False
    translation: Translation

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Load the model, and the translation that is saved beside it."""
        model, report, beside = load_student(name, args, options, TRANSLATION)
        drafter = cls.of(model)
        if beside.keys() >= {*TRANSLATION}:
            drafter.translate(Translation(*(beside[name] for name in TRANSLATION)))
        return (drafter, *report) if report else drafter

    def translate(self, translation: Translation) -> None:
        """Draft by this translation from now on.

        Raises:
            OptionError: the two tokenizers have no token in common.
        """
        if not len(translation.ids):
            raise OptionError(
                "the draft model's tokenizer has no token in common with the target's; use another "
                "smaller model."
            )
        self._put_rows(translation.ids.long())
        self.translation = translation

    def _whole_state(self) -> dict[str, Tensor]:
        """The whole model, and the translation beside it."""
        tables = (getattr(self.translation, table) for table in TABLES)
        return super()._whole_state() | dict(zip(TRANSLATION, tables, strict=True))

    @property
    def draft_vocabulary(self) -> Tensor:
        return self.translation.names

    def reserve(self, state: DraftCache, longest: int, room: int) -> None:
        super().reserve(state, _STRETCH * (longest + 1) + _MORE, room + PIECES)

    def prefill(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        most = _STRETCH * tokens.shape[1] + _MORE
        read, own = self.translation.read_prompt(tokens, count, most)
        self._layers.prefill(state, own, input_ids=read)
        state.prompt = read.shape[1]

    def begin(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        # All but the last of them were drafted, mostly here, and so are one token each.
        read, own = self.translation.read(tokens, count, tokens.shape[1] - 1 + PIECES)
        own = own.minimum((state.longest - state.lengths).clamp(min=0))
        found = self._layers.begin(state, own, input_ids=read)
        return self._step(last_true(found.logits, own).unsqueeze(1))

    def extend(self, state: DraftCache, tokens: Tensor, parent: Tensor) -> Step:
        own = self.translation.pieces[tokens][..., 0].long()  # [B, W]
        return self._step(self._layers.extend(state, parent, input_ids=own).logits)
