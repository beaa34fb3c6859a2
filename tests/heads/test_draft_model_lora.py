"""A draft model whose low-rank factors are trained, and merged when it is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.heads import Drafter, Manifest, OptionError, fingerprint, load_drafter, save_drafter
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.draft_model import DraftModel, DraftModelConfig
from headstart.infer import StaticTree
from headstart.train.fit.validate import measure_tau
from headstart.train.recipe import Train
from tests.support.counting import counting_rows, counting_target
from tests.support.tiny import one_line
from tests.support.training import (
    IDLE,
    check_same_checkpoints,
    drafter_of,
    killed_and_resumed,
    trainer_of,
)

LORA = {"rank": 4, "alpha": 8}
SPEC = Train(loss="forward_kl", learning_rate=1e-2, batch_size=4, max_steps=12, eval_every=4)


def random_target() -> Any:
    torch.manual_seed(1)
    return type(counting_target())(counting_target().config).eval()


def student(lora: dict[str, Any] | None = LORA) -> DraftModel:
    made = drafter_of(random_target(), "draft_model", layers=1, lora=lora)
    assert isinstance(made, DraftModel)
    return made


def test_only_the_factors_learn_and_the_saved_student_is_whole(tmp_path: Path) -> None:
    made, ids = student(), counting_rows(2, 9)
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    base = {n: p.detach().clone() for n, p in made.named_parameters() if n not in trained}
    plain = student(None)
    with torch.no_grad():
        assert torch.equal(made.model(ids).logits, plain.model(ids).logits)
    trainer_of(made, tmp_path / "run", SPEC, lambda _: IDLE).fit()
    now = dict(made.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())
    made.eval().save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        expected = made.model(ids).logits
        assert (expected - plain.model(ids).logits).abs().max() > 1e-2
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert loaded.num_parameters() == plain.model.num_parameters()
    # The student as it is saved drops the factors, which are in it.
    made.load_state_dict(loaded.state_dict())
    assert not any(".lora_" in name for name, _ in made.named_parameters())
    made.save_checkpoint(tmp_path / "again")
    assert not (tmp_path / "again" / "adapter").exists()


def test_the_artifact_of_a_trained_student_loads(tmp_path: Path) -> None:
    made, ids = student(), counting_rows(2, 9)
    trainer_of(made, tmp_path / "run", SPEC, lambda _: IDLE).fit()
    kept = Manifest("draft_model", "target", fingerprint(made.target))
    save_drafter(made.eval(), tmp_path / "artifact", kept)
    source = DrafterSource(tmp_path / "artifact")
    source.check_files()
    loaded: Any = load_drafter(source, made.target)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.model(ids).logits, made.model(ids).logits, rtol=1e-5, atol=1e-5
        )


def test_a_resumed_run_ends_with_the_same_factors(tmp_path: Path) -> None:
    def validate(drafter: Drafter) -> dict[str, Any]:
        prompts = list(counting_rows(2, 4))
        return measure_tau(drafter.target, drafter, StaticTree.chain(2), "greedy", prompts, 6)

    killed_and_resumed(
        lambda folder, check: trainer_of(student(LORA | {"dropout": 0.2}), folder, SPEC, check),
        validate, tmp_path,
    )  # fmt: skip
    check_same_checkpoints(tmp_path, "model.safetensors", "adapter/adapter_model.safetensors")


@pytest.mark.parametrize(
    "lora",
    [{"rank": 0}, {"r": 4}, {"dropout": 1.0}, {"modules": "q_proj"}, {"rank": 2.5}, {"alpha": "x"}],
)
def test_what_no_adapter_can_be_is_refused(lora: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"drafter\.lora is") as caught:
        DraftModelConfig.for_target(random_target(), layers=1, lora=lora)
    assert one_line(caught.value)
