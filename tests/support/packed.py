"""A drafter in training, the same documents as rows of their own and packed, and gradients."""

from typing import Any

import torch
from torch import Tensor

from headstart.heads import FAMILIES, TrainableDrafter, family
from headstart.train.fit.joint import training_classes
from headstart.train.fit.target_with_drafter import TargetWithDrafter
from tests.support.tiny import VOCAB

LENGTHS = [9, 6, 11]  # of the documents


def module_of(name: str, options: dict[str, Any], target: Any, loss: str) -> TargetWithDrafter:
    config: Any = family(name).config_class
    options = {**FAMILIES[name].small, **options}
    made = family(name)(config.for_target(target, **options)).to(target.dtype).bind(target)
    assert isinstance(made, TrainableDrafter)
    made.init_from_target(torch.arange(VOCAB))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    module = training_classes(made)[0](target, made, 0.8, loss)
    if made.adapter is not None:
        with torch.no_grad():
            for parameter in made.adapter.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return module


def batches() -> tuple[dict[str, Any], dict[str, Any]]:
    """Three documents a row each, and as two rows: two documents in one, one and padding."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(1, VOCAB, (n,), generator=generator) for n in LENGTHS]
    marks = [torch.rand(n, generator=generator) < 0.8 for n in LENGTHS]
    plain = {"rows": None, "tokens": torch.zeros(3, 11).long()}
    plain["supervised"] = torch.zeros(3, 11).bool()
    wide = sum(LENGTHS[:2])
    packed = {"rows": None, "tokens": torch.zeros(2, wide).long()}
    packed |= {"supervised": torch.zeros(2, wide).bool(), "positions": torch.zeros(2, wide).long()}
    packed["segments"] = torch.full((2, wide), -1, dtype=torch.int32)
    places = [(0, 0, 0), (0, LENGTHS[0], 1), (1, 0, 0)]
    for number, (text, mark) in enumerate(zip(texts, marks, strict=True)):
        plain["tokens"][number, : len(text)], plain["supervised"][number, : len(text)] = text, mark
        row, first, segment = places[number]
        part = (row, slice(first, first + len(text)))
        packed["tokens"][part], packed["supervised"][part] = text, mark
        packed["positions"][part], packed["segments"][part] = torch.arange(len(text)), segment
    return plain, packed


def slopes(module: TargetWithDrafter, batch: dict[str, Any]) -> tuple[float, Tensor]:
    """The loss, and all gradients in one vector."""
    adapter = module.drafter.adapter
    factors = [] if adapter is None else adapter.parameters()
    more = {} if adapter is None else {"weight": 0.5}
    loss = module(**batch, **more)["loss"]
    trained = [p for p in [*module.drafter.parameters(), *factors] if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return loss.item(), torch.cat([part.flatten() for part in found if part is not None])


def apart(one: tuple[float, Tensor], two: tuple[float, Tensor]) -> float:
    """How far two gradients are apart, relative to their size."""
    return ((one[1] - two[1]).norm() / two[1].norm()).item()
