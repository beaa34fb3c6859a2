"""The kernels of each instruction set that this processor has, for each type."""

from collections.abc import Iterator

import pytest
import torch

from headstart.heads.core.cpu_compile import INSTRUCTION_SETS, instruction_set, kernels

_KINDS = [(each, dtype) for each in INSTRUCTION_SETS for dtype in each.dtypes]


@pytest.fixture(params=_KINDS, ids=lambda kind: f"{kind[0].name}-{str(kind[1])[6:]}")
def kernel_type(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A type that kernels run in, which are meanwhile those of one instruction set."""
    chosen, dtype = request.param
    if not chosen.is_here:
        pytest.skip(f"this processor has no {chosen.name}")
    with instruction_set(chosen.name):
        if kernels(dtype) is None:
            pytest.skip("needs a C compiler, and a system that grants what the processor has")
        yield dtype
