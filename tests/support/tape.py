"""A CUDA graph for the CPU: operations are recorded once and then repeated on the same addresses.

What a graph cannot do shows here too: no Python runs again, what the host knew is built in, and a
tensor that the work made anew is written where it lay when it was recorded.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from headstart.infer import Speculator
from headstart.infer.graphs import RoundGraphs
from tests.support.families import LENGTHS
from tests.support.tiny import prompts

READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
"""Reads of the device by the host, which no graph holds."""
NEW = 24
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.8}


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        # A single number is built into a kernel's call; more of the host's data would be copied.
        copied = name == "lift_fresh" and args[0].dim() > 0
        if name in READS or copied:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        found = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, found))
        return found


class Tape:
    """Records work; `taped` counts how often, `replayed` how often it was repeated."""

    def __init__(self) -> None:
        self.taped = self.replayed = 0

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        record = _Record()
        with record:
            work()
        self.taped += 1
        calls = [call for call in record.calls if not _is_view(call[0])]

        def replay() -> None:
            self.replayed += 1
            for function, args, kwargs, found in calls:
                again = function(*args, **kwargs)
                for old, new in zip(_tensors(found), _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


def _is_view(function: Any) -> bool:
    """Whether all that is returned are views, which hold what their base holds."""
    aliases = [entry.alias_info for entry in function._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, Tensor)]


def on_tape(speculator: Speculator, capture: Callable | None = None) -> Tape:
    """Give the speculator a tape in place of graphs."""
    tape = Tape()
    speculator.graphs = RoundGraphs(capture or tape)
    return tape


def decode(speculator: Speculator, batch: int = 4, turn: int = 0, **options: Any) -> Tensor:
    ids, mask = prompts([length + turn for length in LENGTHS[:batch]])
    given: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False} | options
    if given["do_sample"]:
        given["seed"] = [11 + turn, 12, 13, 14 + turn][:batch]
    return speculator.generate(ids, attention_mask=mask, **given)
