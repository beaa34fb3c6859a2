"""The teacher's distribution is the target's."""

from typing import Any

import pytest
import torch

from headstart.heads import OptionError
from headstart.train.losses.teacher import Teacher
from tests.support.losses import embedding_target


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "scaled", "logit_scale": 3.0}, {"kind": "scaled", "logits_scaling": 1 / 3},
     {"kind": "capped", "final_logit_softcapping": 2.0}],
)  # fmt: skip
def test_the_teacher_says_what_the_target_says(options: dict[str, Any]) -> None:
    model = embedding_target(**options)
    ids = torch.arange(5)[None]
    said = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(Teacher(model)(model.embedding(ids)[0]), said)


def test_logits_that_nobody_can_follow_are_refused() -> None:
    with pytest.raises(OptionError, match=r"train\.loss=cross_entropy") as caught:
        Teacher(embedding_target(kind="scaled"))
    assert "\n" not in str(caught.value)
