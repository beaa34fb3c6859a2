"""Where weights that are streamed in come from, and that they are read as accelerate reads them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import has_offloaded_params
from transformers import AutoModelForCausalLM

from headstart.heads import DecodingError
from headstart.heads.core.weight_sources import InFile, InMemory, OpenFiles, sources_of
from tests.support.streamed import PLACES, deep, streamed
from tests.support.tiny import tiny


def check(model: Any) -> list[Any]:
    """Each source gives what accelerate's hook would fetch."""
    found = list[Any]()
    for module in filter(has_offloaded_params, model.modules()):
        sources = sources_of(module)
        assert sources is not None
        for name, source in sources.items():
            own = torch.empty_like(getattr(module, name), device="cpu")
            source.read(own, OpenFiles())
            hook: Any = module._hf_hook
            fetched = hook.weights_map[name].to(own.dtype)
            assert torch.equal(own.view(torch.uint8), fetched.view(torch.uint8))
            assert source.attached and source.like.shape == own.shape
            found.append(source)
    return found


@pytest.mark.parametrize("place", (*PLACES, "both"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_they_are_what_accelerate_fetches(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = tiny("llama")
    whole = whole if dtype == torch.float64 else type(whole)(whole.config).to(dtype)
    kinds = {type(source) for source in check(streamed(whole, place, tmp_path))}
    assert kinds == {"cpu": {InMemory}, "both": {InMemory, InFile}}.get(place, {InFile})


def test_another_type_than_the_file_has(tmp_path: Path) -> None:
    """A checkpoint in float32 that is loaded in bfloat16."""
    deep().float().save_pretrained(tmp_path)
    deep().double()
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map={"": "disk"}
    )
    found = check(model)
    assert {source.dtype for source in found} == {torch.float32}
    assert {source.like.dtype for source in found} == {torch.bfloat16}


def test_what_is_not_plain_has_no_source(tmp_path: Path) -> None:
    """Accelerate brings it, or says what is wrong with it."""
    model = streamed(tiny("llama"), "map", tmp_path)
    layer, hook = model.lm_head, model.lm_head._hf_hook
    hook.tied_params_names = {"weight"}
    assert sources_of(layer) is None
    hook.tied_params_names = set()
    found = sources_of(layer)
    assert found is not None
    index: Any = hook.weights_map.dataset.index
    index["lm_head.weight"] = dict(index["lm_head.weight"])
    assert not found["weight"].attached, "accelerate has another place for it"
    for wrong in ({"weight_name": "other"}, {"safetensors_file": str(tmp_path / "none")}):
        before = index["lm_head.weight"]
        index["lm_head.weight"] = before | wrong
        assert sources_of(layer) is None
        index["lm_head.weight"] = before
    assert sources_of(layer) is not None
    layer._parameters["weight"] = torch.nn.Parameter(torch.empty(3, 3, device="meta"))
    assert sources_of(layer) is None


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    """Where nothing but the reading itself can tell."""
    model = streamed(tiny("llama"), "disk", tmp_path)
    sources: Any = sources_of(model.lm_head)
    source = sources["weight"]
    with open(source.path, "r+b") as file:
        file.truncate(source.stamp[1] - 8)
    shorter = source.path.stat()
    own = torch.empty_like(source.like, device="cpu")
    stamp = shorter.st_ino, shorter.st_size, shorter.st_mtime_ns
    with pytest.raises(DecodingError, match="it was changed"):
        source.read(own, OpenFiles())
    with pytest.raises(DecodingError, match="it ended early"):
        replace(source, stamp=stamp).read(own, OpenFiles())
