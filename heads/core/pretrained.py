"""Loading by `from_pretrained` without running code that comes with a model; peft's wrappers."""

import sys
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from .errors import ArtifactError, OptionError


def load_pretrained(kind: Any, name: Any, *args: Any, **options: Any) -> Any:
    """`kind.from_pretrained(name, *args, **options)` for an auto class of transformers.

    Where `trust_remote_code` is left out, transformers asks on stdin whether to run such code.
    Here it is False unless given.

    Raises:
        OptionError: the model or tokenizer needs code of its own, and is not trusted.
        ArtifactError: a file of weights is no safetensors.
    """
    try:
        return kind.from_pretrained(name, *args, **{"trust_remote_code": False, **options})
    except SafetensorError as error:
        raise ArtifactError(
            f"the weights of {name} are no safetensors ({error}); download them again."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise OptionError(
            f"{name} needs Python code that comes with it, which is not run; if you trust a "
            "target's, pass --trust-remote-code (trust_remote_code=True), or else use a model of "
            "transformers' own classes."
        ) from error


def language_model_in(model: Any) -> PreTrainedModel:
    """The language model inside of a peft model, with the adapters in it; any other as it is.

    Raises:
        OptionError: its adapter is a learned prompt, which no token tree holds.
    """
    peft: Any = sys.modules.get("peft")  # whoever has such a model has imported it
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    kind = model.active_peft_config
    if kind.is_prompt_learning:
        raise OptionError(
            f"the target is a peft model of type {kind.peft_type.value}, whose learned prompt no "
            "token tree holds; decode it plainly, with model.generate."
        )
    return model.get_base_model()
