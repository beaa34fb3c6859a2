"""Models whose weights do not fit: accelerate's hooks stream them in, from CPU memory or disk.

Between forwards such a weight is on the `meta` device, with a shape and no data; a hook of its
module loads it for each forward. So a layer must be called, not multiplied with, and code that
reads a weight gets it by `weight_of`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from .errors import OptionError, UnsupportedTarget

_WAS_IN = "_weights_were_in"  # of modules that are resident now, by name
NOT_READ = "_headstart_not_read"
"""The attribute of a module whose weights no process reads whole, as the others would not."""
_BY_US = "_weights_are_brought_ahead"  # the attribute of a module whose hook does not fetch now


def offloaded(model: nn.Module) -> bool:
    """Whether any weight of a model is brought in for every forward."""
    return any(map(streams, model.modules()))


def streams(module: nn.Module) -> bool:
    """Whether a module's own weights are brought in for every forward, by whomever."""
    return has_offloaded_params(module) or getattr(module, _BY_US, False)


def set_fetching(module: nn.Module, on: bool) -> None:
    """Whether accelerate's hook fetches the weights of a module, or somebody else brings them."""
    hook: Any = module._hf_hook
    hook.offload = on
    setattr(module, _BY_US, not on)


def device_of(module: nn.Module) -> torch.device:
    """The device that a module runs on, going by its first weight."""
    found: Any = ((part, w) for part in module.modules() for w in part.parameters(recurse=False))
    holder: Any = module  # a packed layer has no weight, and says itself where it is
    first, weight = next(found, (holder, holder))
    if not streams(first):
        return weight.device
    hook: Any = first._hf_hook
    return torch.empty(0, device=hook.execution_device).device  # with its index, as weights have it


def in_shards(module: nn.Module) -> bool:
    """Whether processes hold parts of a module's weights: by ZeRO-3, FSDP2 or a plan of parts."""
    return any(hasattr(w, "ds_id") or isinstance(w, DTensor) for w in module.parameters())


def current(device: torch.device) -> AbstractContextManager[Any]:
    """While this lasts, a GPU is the current one: streams, graphs and kernels go by that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def gathered(*modules: nn.Module | None, write: bool = False) -> Iterator[None]:
    """While this lasts, weights that DeepSpeed ZeRO-3 or FSDP2 has sharded are whole; all call.

    Args:
        write: keep what is written into them, under ZeRO-3 by process 0.
    """
    given = [module for module in modules if module is not None]
    with _gathered_zero3(given, write), _gathered_fsdp2(given, write):
        yield


@contextmanager
def _gathered_zero3(modules: Sequence[nn.Module], write: bool) -> Iterator[None]:
    weights = {weight for module in modules for weight in module.parameters()}
    sharded: list[Any] = [weight for weight in weights if hasattr(weight, "ds_id")]
    if not write:  # those that are whole already must stay so afterwards
        sharded = [weight for weight in sharded if weight.ds_status.name != "AVAILABLE"]
    if not sharded:
        yield
        return
    import deepspeed

    sharded.sort(key=lambda weight: weight.ds_id)  # in the same order on all processes
    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if write else None):
        yield


@contextmanager
def _gathered_fsdp2(modules: Sequence[nn.Module], write: bool) -> Iterator[None]:
    parts = {id(part): part for module in modules for part in module.modules()}
    owned: list[tuple[nn.Module, str, Any]] = [
        (part, name, weight)
        for part in parts.values()
        for name, weight in part._parameters.items()
        if isinstance(weight, DTensor)
    ]
    whole: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for part, name, weight in owned:
        if getattr(part, NOT_READ, False):
            raise OptionError(
                f"the {name} of a {type(part).__name__} is read whole, and the processes that "
                "decode hold parts of it; load the target without tensor_parallel for this."
            )
        if id(weight) not in whole:
            full = nn.Parameter(weight.detach().full_tensor(), weight.requires_grad)
            whole[id(weight)] = full
        part._parameters[name] = whole[id(weight)]
    # After loading, FSDP2's hooks would take these for the shards.
    hooks = {id(part): (part, part._load_state_dict_post_hooks) for part, _, _ in owned}
    for part, _ in hooks.values():
        part._load_state_dict_post_hooks = OrderedDict()
    try:
        yield
    finally:
        for part, name, weight in owned:
            part._parameters[name] = weight
        for part, kept in hooks.values():
            part._load_state_dict_post_hooks = kept
    for _, _, weight in owned if write else ():
        found = whole[id(weight)].detach()
        own = distribute_tensor(found, weight.device_mesh, weight.placements)
        weight.detach().copy_(own)


def device_and_dtype(model: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """Where a model runs and in which type: both change when it is moved or recast."""
    return device_of(model), model.dtype


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """A module's own weight to read or copy from, on the device that the module runs on.

    All processes call for a weight that is sharded, and each gets a copy.

    Raises:
        UnsupportedTarget: it has no data, and no hook that could load it.
    """
    with align_module_device(module), gathered(module):
        weight = getattr(module, name)
        if hasattr(weight, "ds_id"):
            weight = weight.detach().clone()
    if weight.is_meta:
        raise UnsupportedTarget(
            f"the {name} of a {type(module).__name__} has no data and no offloading hook of its "
            "own; load the target with from_pretrained, with a device_map where it does not fit."
        )
    return weight


def keep_resident(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Load the weights of a model's layers to stay; embedding and output layer remain tied."""
    streamed = [part for layer in layers for part in layer.modules() if has_offloaded_params(part)]
    for part in streamed:
        hook: Any = part._hf_hook
        setattr(part, _WAS_IN, {name: _place(part, name) for name in part._parameters})
        hook.pre_forward(part)
        hook.offload = False  # it goes on moving inputs, and weights no longer
    first, last = _ends(model)
    tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    here = not any(map(has_offloaded_params, (first, last)))
    if streamed and tied and here and device_of(first) == device_of(last):
        last.weight = first.weight


def streamed_from(model: PreTrainedModel) -> str:
    """The share of a model's bytes that is streamed in, and from where, such as `90% from disk`.

    Empty where nothing is. The share is rounded to a tenth, since it may depend on what memory was
    free. It is the same with any drafter: it leaves out embedding, output layer and an adapter's
    modules, and other layers that stay for a drafter count as streamed in.
    """
    ends, sizes = _ends(model), Counter[str]()
    for module in model.modules():
        if hasattr(module, "_hf_hook") and module not in ends:
            for name, weight in module.named_parameters(recurse=False):
                sizes[_place(module, name)] += weight.numel() * weight.element_size()
    places = [place for place in ("cpu", "disk") if sizes[place]]
    share = round(10 * (1 - sizes[""] / max(sizes.total(), 1)))
    return f"{10 * share}% from {' and '.join(places)}" if places else ""


def _ends(model: PreTrainedModel) -> tuple[Any, Any]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def _place(module: nn.Module, name: str) -> str:
    """Where a module's weight is fetched from, or was before `keep_resident`: `cpu` or `disk`;
    empty where it always stayed."""
    if not streams(module):
        return getattr(module, _WAS_IN, {}).get(name, "")
    hook: Any = module._hf_hook
    kept, prefix = hook.weights_map, ""
    if hasattr(kept, "prefix"):
        kept, prefix = kept.dataset, kept.prefix
    in_memory = getattr(kept, "state_dict", kept)  # accelerate's loader holds that, and files
    return "cpu" if f"{prefix}{name}" in in_memory else "disk"
