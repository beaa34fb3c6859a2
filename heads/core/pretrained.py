"""Loading by `from_pretrained` without running code that comes with a model; peft's wrappers."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import deepspeed

from .errors import MALFORMED, ArtifactError, HeadstartError, OptionError, brief
from .unsafe_settings import unsafe_settings


def load_pretrained(kind: Any, name: Any, *args: Any, **options: Any) -> Any:
    """`kind.from_pretrained(name, *args, **options)` for an auto class of transformers.

    In the place of `AutoModelForCausalLM` that of models which also read images is taken where
    it knows no model of the type, see `causal_class`.

    Where `trust_remote_code` is left out, transformers asks on stdin whether to run such code.
    Here it is False unless given, and then no setting of the model's config is followed that
    fetches or imports code, such as kernels by name. With a `state_dict`, which needs a `config`,
    the weights are those, and not the ones at `name`.

    Raises:
        OptionError: the model or tokenizer needs code of its own, and is not trusted; or it takes
            no such option.
        ArtifactError: a file of weights is no safetensors, the config fits no such model, or there
            are no files of a tokenizer.
    """
    options = {"trust_remote_code": False, **options}
    if kind is AutoModelForCausalLM:
        trusted, said = options["trust_remote_code"], _read_config(name, options)
        if said and not trusted:
            _check_config(name, said, options.get("config"))
        if not (trusted and "auto_map" in said):
            kind = causal_class(options.get("config") or said)
    try:
        if "state_dict" in options:
            with loaded_whole(), torch.device("meta"):
                whole: Any = type(kind.from_config(options["config"], trust_remote_code=False))
            return whole.from_pretrained(None, *args, **options)
        found: Any = kind.from_pretrained(name, *args, **options)
        if kind is AutoTokenizer and len(found) <= len({*found.all_special_ids}):
            raise _no_tokenizer(name)  # transformers makes an empty one of a config alone
        return found
    except torch.OutOfMemoryError:
        raise
    except SafetensorError as error:
        raise _no_safetensors(name, error) from error
    except HeadstartError:
        raise
    except Exception as error:
        expected = (*MALFORMED, ImportError, StrictDataclassError)
        if not isinstance(error, expected) and type(error) is not Exception:  # of `tokenizers`
            raise
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in options:
            raise OptionError(
                f"{unknown[1]} is no option that loading {name} takes; check the spelling."
            ) from error
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise _needs_code(name) from error
        if kind is AutoTokenizer and "instantiate the backend tokenizer" in str(error):
            raise _no_tokenizer(name) from error
        kind_of = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ArtifactError(
            f"{name} cannot be loaded ({kind_of}{brief(error, 300)}); expected a causal language "
            "model of transformers with its tokenizer: download it again, or correct its files."
        ) from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors; an ArtifactError where it is none."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise _no_safetensors(path, error) from error


def _no_safetensors(name: Any, error: SafetensorError) -> ArtifactError:
    return ArtifactError(
        f"the weights of {name} are no safetensors ({error}); download them again."
    )


def _no_tokenizer(name: Any) -> ArtifactError:
    return ArtifactError(
        f"{name} holds no tokenizer that can be read, such as a tokenizer.json; save the model's "
        "beside it (tokenizer.save_pretrained)."
    )


def causal_class(config: Any) -> Any:
    """The auto class of transformers that makes a causal language model of a config.

    `AutoModelForCausalLM`, but for a decoder that also reads images and has no other class, as in
    Mistral 3 and Qwen3-VL; of it text alone is decoded.

    Args:
        config: or what a config.json says.
    """
    name = config.get("model_type") if isinstance(config, dict) else config.model_type
    images, known = AutoModelForImageTextToText, None
    if isinstance(name, str) and name in CONFIG_MAPPING:
        known: Any = CONFIG_MAPPING[name]
    if known is None or known in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    nested = "text_config" in known.sub_configs and not known.is_encoder_decoder
    return images if nested and known in images._model_mapping else AutoModelForCausalLM


@contextmanager
def loaded_whole() -> Iterator[None]:
    """Models that are made while this lasts are whole on every process, also under ZeRO-3."""
    known = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = known


def _needs_code(name: Any) -> OptionError:
    return OptionError(
        f"{name} needs Python code that comes with it, which is not run; if you trust a "
        "target's, pass --trust-remote-code (trust_remote_code=True), or else use a model of "
        "transformers' own classes."
    )


_NAMED = {"attn_implementation", "experts_implementation"}  # harmless where transformers knows it
_ALLOWED = {"auto_map", "quantization_config"}  # of a target: code is not run
_MOST_LAYERS = 4096
_LEAST_PACKED = 4  # weights a byte, of the most tightly quantized
_SLACK = 20_000_000  # weights that may be missing, such as an output layer that is tied


def _read_config(name: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What a model's config.json says; nothing where there is none."""
    known = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
    given = {key: options[key] for key in known if key in options}
    try:
        return PreTrainedConfig.get_config_dict(name, **given)[0]
    except OSError:
        return {}  # what is missing is said when it is loaded


def _check_config(name: Any, config: dict[str, Any], given: Any) -> None:
    """Refuse a model whose config names code elsewhere, or more layers than can be built.

    Args:
        given: the config that it is made with, unless that is its own.
    """
    for what, key, value in unsafe_settings(config):
        plain = what in _NAMED and isinstance(value, str) and value.isidentifier()
        if not plain and what not in _ALLOWED:
            raise OptionError(
                f"the config of {name} sets {key} to {brief(repr(value), 60)}, which loads other "
                "code or files; remove that, or if you trust a target's, pass --trust-remote-code "
                "(trust_remote_code=True)."
            )
    layers = config.get("num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ArtifactError(
            f"the config of {name} says {brief(layers, 20)} layers, expected at most "
            f"{_MOST_LAYERS}; download it again."
        )
    if Path(name).is_dir():
        _check_size(Path(name), given)


def _check_size(folder: Path, config: Any) -> None:
    """Refuse a config of far more weights than there are: they would be made in memory first."""
    files = (file for end in ("safetensors", "bin") for file in folder.glob(f"*.{end}"))
    size = sum(file.stat().st_size for file in files)
    try:
        config = config or AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with loaded_whole(), torch.device("meta"):
            model = causal_class(config).from_config(config, trust_remote_code=False)
        parameters = sum(parameter.numel() for parameter in model.parameters())
    except (*MALFORMED, ImportError, OSError, StrictDataclassError):
        return  # what is wrong is said when it is loaded
    if parameters > _LEAST_PACKED * size + _SLACK:
        raise ArtifactError(
            f"the config of {folder} describes {parameters:,} weights, and its files hold {size:,} "
            "bytes; they do not belong together: download both again."
        )


def language_model_in(model: Any) -> PreTrainedModel:
    """The language model inside of a peft model, with the adapters in it; any other as it is.

    Raises:
        OptionError: it is no model, or its adapter is a learned prompt, which no token tree holds.
    """
    if not issubclass(type(model), nn.Module):
        raise OptionError(
            f"the target is of type {type(model).__name__}; expected a model that transformers has "
            "loaded: headstart.load takes names and folders."
        )
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


def end_tokens(model: PreTrainedModel, asked: GenerationConfig | None = None) -> set[int]:
    """The tokens that end an answer, by a request's generation config, or else the model's own."""
    ends = getattr(asked, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.generation_config, "eos_token_id", None)
    return set() if ends is None else {ends} if isinstance(ends, int) else {*ends}
