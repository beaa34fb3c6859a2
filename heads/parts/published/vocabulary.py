"""The draft vocabulary of a trimmed output layer, as other projects write it.

`d2t` is each draft token's id in the target minus its own, or that id itself; `t2d`, a mask over
the target's tokens, decides which where it is there.
"""

from typing import Any

import torch
from torch import Tensor

from ...core import ArtifactError


def read_vocabulary(found: dict[str, Tensor], size: int | None) -> dict[str, Any]:
    """Put the draft vocabulary in the place of d2t and t2d among a checkpoint's tensors.

    Returns:
        The config's fields that say so; none where there is none, or it is the whole of the
        target's, `size`.

    Raises:
        ArtifactError: d2t and t2d contradict each other or the target.
    """
    offsets, mask = found.pop("d2t", None), found.pop("t2d", None)
    if offsets is None:
        return {}
    for name, tensor in (("d2t", offsets), ("t2d", mask)):
        if tensor is not None and (tensor.dim() != 1 or tensor.is_floating_point()):
            raise ArtifactError(
                f"its {name} is {tensor.dtype} of shape {list(tensor.shape)}; expected one whole "
                "number or truth value for each token: download it again."
            )
    ids = offsets.long() + torch.arange(len(offsets))
    if mask is not None and not torch.equal(ids, kept := mask.nonzero().flatten()):
        if not torch.equal(offsets.long(), kept):
            raise ArtifactError(
                f"its d2t and t2d contradict each other, {len(ids)} and {len(kept)} draft tokens, "
                "not the same ones; download it again."
            )
        ids = kept
    rising = bool((ids.diff() > 0).all())
    if not rising or ids[0] < 0 or (size is not None and ids[-1] >= size):
        raise ArtifactError(
            f"its d2t names {len(ids)} tokens from {int(ids.min())} to {int(ids.max())}, "
            f"{'ascending' if rising else 'out of order'}; expected ascending ids below {size}."
        )
    return {} if len(ids) == size else put_vocabulary(found, ids)


def put_vocabulary(found: dict[str, Tensor], ids: Tensor) -> dict[str, Any]:
    """Add a draft vocabulary [Vd] to a drafter's tensors; returns the config's fields."""
    found["vocabulary"] = ids
    return {"output": "trimmed", "draft_vocab_size": len(ids)}


def write_vocabulary(tensors: dict[str, Tensor], size: int) -> None:
    """Put d2t and t2d in the place of a drafter's vocabulary, if it is trimmed.

    Args:
        size: how many tokens the target has.
    """
    if (ids := tensors.pop("vocabulary", None)) is None:
        return
    mask = torch.zeros(size, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    tensors |= {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": mask}
