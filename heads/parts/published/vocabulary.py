"""The draft vocabulary of a trimmed output layer, as other projects write it.

`d2t` is each draft token's id in the target minus its own, or that id itself; `t2d`, a mask over
the target's tokens, decides which where it is there.
"""

import torch
from torch import Tensor

from ...core import ArtifactError


def read_vocabulary(offsets: Tensor, mask: Tensor | None, size: int | None) -> Tensor | None:
    """The draft vocabulary [Vd], ascending; None where it is the whole of the target's, `size`.

    Raises:
        ArtifactError: `offsets`, d2t, and `mask`, t2d, contradict each other or the target.
    """
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
    return None if len(ids) == size else ids


def write_vocabulary(ids: Tensor, size: int) -> dict[str, Tensor]:
    """d2t and t2d of a draft vocabulary [Vd] of a target's `size` tokens."""
    mask = torch.zeros(size, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": mask}
