"""The checkpoint part of the drafter contract; `artifacts` saves and loads by it."""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .core import OptionError
from .declared.fields import Fields
from .parts.adapter import Adapter
from .parts.published.checkpoint import Checkpoint

Found = tuple[dict[str, Any], dict[str, Tensor]]
"""What is read from a checkpoint: fields of the family's config, and tensors by its own names."""


class DrafterConfig(Fields, PreTrainedConfig):
    """What every drafter's `config.json` says; `model_type` is `headstart_` + the family's name.

    A family's own config may declare its settings itself, or take them from a class of `declared`,
    with which an artifact's files are judged without torch.
    """

    model_type = "headstart_"

    @classmethod
    def family_name(cls) -> str:
        """The family's name, see `headstart.heads.families`."""
        return cls.model_type.removeprefix("headstart_")

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """A config with the target's shapes and a recipe's options.

        Raises:
            OptionError: an option that the family does not have or that has no effect, or a value
                of the wrong type.
        """
        cls.check_options(cls.family_name(), options)
        text = target.config.get_text_config(decoder=True)
        try:
            return cls(hidden_size=text.hidden_size, vocab_size=text.vocab_size, **options)
        except StrictDataclassError as error:
            if isinstance(error.__cause__, OptionError):
                raise error.__cause__ from None
            message = " ".join(str(error.__cause__ or error).split())
            message = re.sub(r"^Field '(\w+)'", r"drafter.\1:", message)
            raise OptionError(f"{message}; correct the recipe's drafter section.") from error


class StoredDrafter(PreTrainedModel):
    """What saving and loading ask of a drafter, beside transformers' own methods."""

    weightless: ClassVar[bool] = False
    """Whether the family has no weights: its name alone loads it, and there is no artifact."""

    in_target: ClassVar[bool] = False
    """Whether the family's name alone loads the drafter that a target's own files hold, if any."""

    after_name: ClassVar[str | None] = None
    """What a number after that name and a colon sets of `of_target`, if it may follow."""

    def extra_repr(self) -> str:
        """The family's options, as torch prints them: `Medusa(heads=5, layers=1, …)`."""
        config: Any = self.config
        return ", ".join(f"{n}={getattr(config, n)!r}" for n in getattr(config, "OPTIONS", ()))

    @classmethod
    def of_target(cls, target: PreTrainedModel) -> Self:
        """The drafter that the family's name alone stands for; not bound yet.

        Raises:
            OptionError: it is in the target's files, and they hold none.
        """
        config: Any = cls.config_class
        return cls(config.for_target(target))

    saved_as_language_model: ClassVar[bool] = False
    """Whether artifacts are ordinary causal language models, with such a model's `config.json`."""

    adapter: Adapter | None = None
    """What the target learns while this drafter is trained; saved with it, and merged into the
    target when it is loaded. None for a drafter that leaves its target as it is."""

    @staticmethod
    def from_checkpoint(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
        """Read a checkpoint of the method's authors, or of another trainer.

        Args:
            config: its `config.json`; published ones contradict their tensors, which are right.
            tensors: its weights, by the names that they have there.

        Returns:
            The fields of this family's config that the checkpoint knows, the others being the
            target's or the defaults; and the tensors under this class's names, of whatever dtype.
            None where it is none of this family's.

        Raises:
            ArtifactError: it is one of this family's, and this class cannot run it exactly.
        """
        return None

    @classmethod
    def completed(cls, found: Found, target: PreTrainedModel) -> Found:
        """What `from_checkpoint` read, completed with what only the target tells.

        Raises:
            ArtifactError: the checkpoint leaves something open that this target does not decide.
        """
        return found

    exports: ClassVar[Mapping[str, Callable[[Any], Checkpoint]]] = {}
    """What writes a bound drafter for another project, by the names of `headstart export`. It
    raises ArtifactError where that project would run it wrongly."""

    @property
    def has_weights(self) -> bool:
        """Whether it holds any; an early exit may be made of its target's alone."""
        return next(self.parameters(), None) is not None

    def without_adapter(self) -> Any:
        """The same drafter, for a target that its adapter was merged into; not bound yet."""
        return self
