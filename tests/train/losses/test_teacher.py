"""The teacher: what the target says, of the draft vocabulary alone where there is one."""

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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", [[0, 3, 4, 9], [0, 1, 2, 3]])
def test_of_a_draft_vocabulary_only_its_rows_are_computed(
    vocabulary: list[int], bias: bool
) -> None:
    model = embedding_target(kind="capped", final_logit_softcapping=2.0)
    model.layer.bias = torch.nn.Parameter(torch.randn(11)) if bias else None
    teacher, features = Teacher(model, torch.tensor(vocabulary)), torch.randn(7, 6)
    expected = model.last(model.layer(features))[:, vocabulary].log_softmax(-1)
    model.layer.forward = None  # what calls it fails
    torch.testing.assert_close(teacher(features), expected)
    kept, _ = teacher._own_rows() or (None, None)
    assert kept is not None
    copied = kept.data_ptr() != model.layer.weight.data_ptr()
    assert copied is (vocabulary[-1] == 9), "the first rows take no memory of their own"


def test_a_layer_that_is_not_plain_is_called() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = embedding_target()
    model.layer = layer = Doubled(6, 11, bias=False)
    features = torch.randn(3, 6)
    found = Teacher(model, torch.tensor([1, 2, 5]))(features)
    torch.testing.assert_close(found, layer(features)[:, [1, 2, 5]].log_softmax(-1))
