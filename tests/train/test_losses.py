"""Labels and losses of every depth, with numbers that can be worked out by hand."""

import importlib.machinery
import math
import subprocess
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.heads import Drafter, OptionError
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.redrafter import ReDrafter, ReDrafterConfig
from headstart.train import losses, recipe
from headstart.train.losses import IGNORED, LOSSES, Teacher, draft_loss, head_labels, label_counts
from tests.support.paths import ROOT

LN2 = math.log(2)


class Fixed(nn.Module):
    """Two depths whose logits are the features, times a weight that is 1."""

    def __init__(self, depths: int = 2, width: int = 2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.train_depths, self.draft_vocabulary = depths, None
        self.config, self.adapter = SimpleNamespace(vocab_size=width), None

    def draft_hidden_states(
        self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
    ) -> Tensor:
        return (features[where] * self.scale).expand(depths, -1, -1)

    def draft_logits(self, depth: int) -> Any:
        return lambda states: states

    def predicted_features(self, states: Tensor) -> Tensor:
        return states


def every(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def test_head_k_predicts_the_token_k_plus_one_ahead() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    none = IGNORED
    assert head_labels(tokens, every(tokens), 3).tolist() == [
        [[12, 13, 14, none, none]],
        [[13, 14, none, none, none]],
        [[14, none, none, none, none]],
    ]


def test_only_supervised_tokens_are_labels() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    supervised = torch.tensor([[False, False, False, True, False]])
    labels = head_labels(tokens, supervised, 2)
    assert labels[0, 0].tolist() == [IGNORED, 13, IGNORED, IGNORED, IGNORED]
    assert labels[1, 0].tolist() == [13, IGNORED, IGNORED, IGNORED, IGNORED]
    assert label_counts(labels).tolist() == [1, 1]


def test_a_trimmed_vocabulary_drops_what_it_lacks() -> None:
    tokens = torch.tensor([[0, 0, 9, 3, 7, 20]])
    labels = head_labels(tokens, every(tokens), 1, vocabulary=torch.tensor([3, 9]))
    assert labels[0, 0].tolist() == [1, 0, IGNORED, IGNORED, IGNORED, IGNORED]


def test_a_row_shorter_than_the_heads_reach_has_no_label() -> None:
    tokens = torch.tensor([[5, 6]])
    assert head_labels(tokens, every(tokens), 4).eq(IGNORED).all()


def fixed_loss(drafter: Any, features: Tensor, labels: Tensor, decay: float, **more: Any) -> Tensor:
    return draft_loss(
        drafter, features, torch.zeros_like(labels[0]), labels, label_counts(labels), decay, **more
    )


@pytest.mark.parametrize("kept", [2**20, 3, 1])
def test_pinned_numbers(kept: int) -> None:
    # Four tokens: depth 1 has labels at positions 0 and 1, depth 2 at position 0.
    tokens = torch.tensor([[0, 0, 0, 1]])
    labels = head_labels(tokens, every(tokens), 2)
    assert label_counts(labels).tolist() == [2, 1]
    flat = torch.zeros(1, 4, 2)
    assert fixed_loss(Fixed(), flat, labels, 0.8, kept=kept).item() == pytest.approx(
        0.8 * LN2 + 0.64 * LN2
    )
    # Token 0 has probability 3/4. Depth 1 wants 0 and 1, depth 2 wants 1.
    leaning = torch.tensor([math.log(3.0), 0.0]).expand(1, 4, 2)
    wrong, right = math.log(4), math.log(4 / 3)
    assert fixed_loss(Fixed(), leaning, labels, 0.5, kept=kept).item() == pytest.approx(
        0.5 * (right + wrong) / 2 + 0.25 * wrong
    )


@pytest.mark.parametrize("kept", [2**20, 1])
def test_pinned_distances_of_features(kept: int) -> None:
    """Depth k at position t foretells the feature at t + k; what has no label is left out."""
    tokens = torch.tensor([[0, 0, 0, 1]])
    labels = head_labels(tokens, every(tokens), 2)
    final = torch.tensor([[[7.0, 7.0], [1.0, 0.0], [2.0, 0.0], [9.0, 9.0]]])
    flat = torch.zeros(1, 4, 2)  # the logits, and what is foretold
    # Smooth L1 of 0 and 1 is 1/2, of 0 and 2 it is 3/2; the mean is over two entries.
    first, second = (0.25 + 0.75) / 2, 0.75
    given: dict[str, Any] = {"final": final, "kept": kept, "feature_weight": 10.0}
    assert fixed_loss(Fixed(), flat, labels, 0.5, **given).item() == pytest.approx(
        0.5 * (LN2 + 10 * first) + 0.25 * (LN2 + 10 * second)
    )


def test_without_a_label_the_loss_is_zero_and_reaches_every_parameter() -> None:
    drafter = Fixed()
    labels = torch.full((2, 1, 4), IGNORED)
    loss = fixed_loss(drafter, torch.randn(1, 4, 2), labels, 0.8)
    loss.backward()
    assert loss.item() == 0.0 and drafter.scale.grad is not None
    assert drafter.scale.grad.item() == 0.0


def test_the_recipe_names_every_loss() -> None:
    assert tuple(LOSSES) == recipe.LOSSES


# p = (1/2, 1/2) and q = (1/4, 3/4), in nats.
PINNED = {
    "soft_cross_entropy": (math.log(4) + math.log(4 / 3)) / 2,
    "forward_kl": (math.log(4) + math.log(4 / 3)) / 2 - LN2,
    "reverse_kl": math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4,
    "jensen_shannon": (
        math.log(4 / 3) / 2 + math.log(4 / 5) / 2 + math.log(2 / 3) / 4 + 3 * math.log(6 / 5) / 4
    )
    / 2,
    "total_variation": 1 / 4,
    "acceptance": math.log(4 / 3),
}
SOFT = [name for name, divergence in LOSSES.items() if divergence is not None]


@pytest.mark.parametrize("name", SOFT)
def test_pinned_divergences(name: str) -> None:
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    divergence = LOSSES[name]
    assert divergence is not None
    assert divergence(p, q).item() == pytest.approx(PINNED[name], rel=1e-5)
    nothing = LN2 if name == "soft_cross_entropy" else 0.0
    assert divergence(p, p).item() == pytest.approx(nothing, abs=1e-6)


@pytest.mark.parametrize("name", SOFT)
def test_divergences_stay_finite_far_apart(name: str) -> None:
    """A point mass against another: what float32 cannot hold must not become NaN."""
    divergence = LOSSES[name]
    assert divergence is not None
    logits = torch.tensor([[0.0, 500.0]], requires_grad=True)
    loss = divergence(torch.tensor([[0.0, -500.0]]), logits.log_softmax(-1))
    loss.sum().backward()
    assert loss.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()


def target(width: int = 11, size: int = 6, **more: Any) -> Any:
    """Just enough of a language model: its features are its embeddings."""
    embedding, layer = nn.Embedding(width, size), nn.Linear(size, width, bias=False)
    config = SimpleNamespace(vocab_size=width, hidden_size=size, model_type="tiny", **more)
    config.get_text_config = lambda decoder: config

    class Target(nn.Module):
        body: Any
        last: Any

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = embedding, layer
            self.config, self.device = config, torch.device("cpu")

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def get_output_embeddings(self) -> nn.Module:
            return self.layer

        def get_decoder(self) -> Any:
            return self.body

        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            logits = self.layer(self.body(input_ids)[0])
            return SimpleNamespace(logits=self.last(logits))

    made = Target()
    made.body = nn.Sequential(embedding, _Tuple())
    made.last = {"scaled": lambda x: x * 3, "capped": lambda x: torch.tanh(x / 2) * 2}.get(
        more.get("kind", ""), lambda x: x
    )
    return made.requires_grad_(False)


class _Tuple(nn.Module):
    def forward(self, states: Tensor) -> tuple[Tensor]:
        return (states,)


OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {"output": "shared"},
    "own": {"output": "own"},
    "trimmed": {"output": "trimmed", "draft_vocab_size": 8},
}


def made(family: str, output: str) -> Drafter:
    shape = {"hidden_size": 6, "vocab_size": 11, **OPTIONS[output]}
    drafter: Drafter = (
        Medusa(MedusaConfig(heads=3, **shape))
        if family == "medusa"
        else ReDrafter(ReDrafterConfig(depths=3, **shape))
    )
    object.__setattr__(drafter, "_target", (target(),))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
        if output == "trimmed":
            drafter.vocabulary.copy_(torch.tensor([0, 1, 3, 4, 6, 7, 8, 10]))  # type: ignore[operator]
    return drafter


FAMILIES = [
    *(("medusa", output) for output in OPTIONS),
    *(("redrafter", output) for output in ("own", "trimmed")),
]


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens [4, 9], features, final features and what is supervised; the last row is not."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, (4, 9), generator=generator)
    features = torch.randn(4, 9, 6, generator=generator)
    final = torch.randn(4, 9, 6, generator=generator)
    supervised = torch.rand(4, 9, generator=generator) < 0.6
    supervised[3] = False
    return tokens, features, final, supervised


def gradients(
    drafter: Drafter, name: str, parts: list[slice], kept: int = 2**20
) -> tuple[float, list[Tensor]]:
    """The loss of a batch of four rows, computed in parts, and its gradients."""
    tokens, features, final, supervised = batch()
    labels = head_labels(tokens, supervised, 3, drafter.draft_vocabulary)
    counts = label_counts(labels)
    teacher = Teacher(drafter.target, drafter.draft_vocabulary)
    drafter.zero_grad()
    total = 0.0
    for part in parts:
        loss = draft_loss(
            drafter, features[part], tokens[part], labels[:, part], counts, 0.8, name, teacher,
            final[part], kept,
        )  # fmt: skip
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def by_formula(drafter: Drafter, name: str) -> tuple[float, list[Tensor]]:
    """The same from the definition: every logit at once, one position after another."""
    tokens, features, final, supervised = batch()
    vocabulary = drafter.draft_vocabulary
    known = torch.arange(11) if vocabulary is None else vocabulary
    states = drafter.draft_hidden_states(
        features, tokens, torch.ones_like(supervised), 3
    ).unflatten(1, (4, 9))
    divergence, total = LOSSES[name], torch.zeros(())
    drafter.zero_grad()
    for depth in (1, 2, 3):
        losses = []
        for row in range(4):
            for at in range(9 - depth - 1):
                word = tokens[row, at + depth + 1]
                if not supervised[row, at + depth + 1] or word not in known:
                    continue
                log_q = drafter.draft_logits(depth)(states[depth - 1, row, at]).log_softmax(-1)
                if divergence is None:
                    losses.append(-log_q[known.tolist().index(int(word))])
                    continue
                said = drafter.target.get_output_embeddings()(final[row, at + depth])  # type: ignore[misc]
                p = said.softmax(-1)[known]
                losses.append(divergence((p / p.sum()).log()[None], log_q[None])[0])
        total = total + 0.8**depth * torch.stack(losses).mean()
    total.backward()
    return total.item(), [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


@pytest.mark.parametrize(("family", "output"), FAMILIES)
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_and_splits_give_the_formulas_gradient(family: str, output: str, name: str) -> None:
    drafter = made(family, output)
    expected = by_formula(drafter, name)
    assert expected[0] > 0 and len(expected[1]) == len(list(drafter.parameters()))
    for parts, kept in (
        ([slice(0, 4)], 2**20),
        ([slice(0, 1), slice(1, 4)], 2**20),
        ([slice(i, i + 1) for i in range(4)], 2**20),
        ([slice(0, 4)], 40),
        ([slice(0, 4)], 1),
    ):
        found = gradients(drafter, name, parts, kept)
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        for a, b in zip(expected[1], found[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_teacher_speaks_for_the_position_of_its_depth() -> None:
    """A drafter that says what the target says at t + k has nothing to learn; elsewhere it has."""
    model, size = target(), 6

    class Echo(nn.Module):
        train_depths, draft_vocabulary = 2, None
        config = SimpleNamespace(vocab_size=11)
        late = 0

        def draft_hidden_states(
            self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
        ) -> Tensor:
            steps = (self.late + k for k in range(1, depths + 1))
            return torch.stack([features.roll(-step, 1)[where] for step in steps])

        def draft_logits(self, depth: int) -> Any:
            return model.layer

    tokens = torch.randint(11, (2, 8))
    final = torch.randn(2, 8, size)
    labels = head_labels(tokens, every(tokens), 2)
    drafter, options = Echo(), {"loss": "forward_kl", "teacher": Teacher(model), "final": final}
    assert fixed_loss(drafter, final, labels, 1.0, **options).item() == pytest.approx(0, abs=1e-6)
    drafter.late = 1
    assert fixed_loss(drafter, final, labels, 1.0, **options).item() > 0.1


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "scaled", "logit_scale": 3.0}, {"kind": "scaled", "logits_scaling": 1 / 3},
     {"kind": "capped", "final_logit_softcapping": 2.0}],
)  # fmt: skip
def test_the_teacher_says_what_the_target_says(options: dict[str, Any]) -> None:
    model = target(**options)
    ids = torch.arange(5)[None]
    said = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(Teacher(model)(model.embedding(ids)[0]), said)


def test_logits_that_nobody_can_follow_are_refused() -> None:
    with pytest.raises(OptionError, match=r"train\.loss=cross_entropy") as caught:
        Teacher(target(kind="scaled"))
    assert "\n" not in str(caught.value)


def test_a_fused_kernel_is_taken_on_a_gpu_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for liger_kernel; the numbers of both ways are compared on a GPU below."""
    asked = []
    kernel = types.ModuleType("liger_kernel.transformers.functional")
    kernel.liger_cross_entropy = lambda *given, **how: asked.append(how) or torch.ones(())  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    losses.hard_loss.cache_clear()
    logits, labels = torch.randn(5, 9), torch.tensor([1, -100, 3, 8, 0])
    try:
        assert losses.hard_loss("cuda")(logits, labels) == 1
        assert asked == [{"ignore_index": -100, "reduction": "sum"}]
        own = losses.hard_loss("cpu")(logits.bfloat16(), labels)
    finally:
        losses.hard_loss.cache_clear()
    rows = labels >= 0
    expected = -logits.bfloat16().float().log_softmax(-1)[rows, labels[rows]].sum()
    torch.testing.assert_close(own, expected)


@pytest.mark.gpu
def test_a_fused_kernel_says_the_same() -> None:
    pytest.importorskip("liger_kernel")
    logits, labels = torch.randn(64, 1000, device="cuda"), torch.randint(1000, (64,)).cuda()
    labels[::7] = -100
    found = []
    for device in ("cuda", "cpu"):
        mine = logits.clone().requires_grad_()
        loss = losses.hard_loss(device)(mine * 1, labels)
        loss.backward()
        assert mine.grad is not None
        found.append((loss, mine.grad))
    torch.testing.assert_close(found[0], found[1])


MEMORY = """
import re, sys, torch
from pathlib import Path
from torch import nn
from tests.train.test_losses import target
from headstart.heads.redrafter import ReDrafter, ReDrafterConfig
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.losses import Teacher, draft_loss, head_labels, label_counts, _KEPT_LOGITS
family, name, width, positions, depths = *sys.argv[1:3], *map(int, sys.argv[3:6])
size = 16
if family == "medusa":
    config = MedusaConfig(hidden_size=size, vocab_size=width, heads=depths, output="shared")
    drafter = Medusa(config)
else:
    drafter = ReDrafter(ReDrafterConfig(hidden_size=size, vocab_size=width, depths=depths))
model = target(width, size)
object.__setattr__(drafter, "_target", (model,))
tokens = torch.randint(width, (1, positions + depths + 1))
final = torch.randn(1, positions + depths + 1, size)
labels = head_labels(tokens, torch.ones_like(tokens, dtype=torch.bool), depths)[:, :, :positions]
labels = nn.functional.pad(labels, (0, depths + 1), value=-100)
teacher = None if name == "cross_entropy" else Teacher(model)
for parameter in drafter.parameters():
    parameter.grad = torch.zeros_like(parameter)
small = labels.clone()
small[:, :, 4:] = -100
def step(labels, kept=_KEPT_LOGITS):
    draft_loss(
        drafter, final, tokens, labels, label_counts(labels), 0.8, name, teacher, final, kept
    ).backward()
    # Not ru_maxrss, which a new process takes over from the one that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e6
before = step(small)  # what torch itself takes at its first step
for kept in map(int, sys.argv[6:] or [_KEPT_LOGITS]):
    print(step(labels, kept or _KEPT_LOGITS) - before)
"""


def peak_gigabytes(
    family: str, name: str, width: int, positions: int, depths: int, *kept: int
) -> list[float]:
    """What forward and backward take above inputs, weights and gradients, in a fresh process.

    Args:
        kept: see `draft_loss`, 0 for its default; a peak for each, which must ascend.
    """
    arguments = [family, name, *map(str, (width, positions, depths, *kept))]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_chunks_bound_the_memory() -> None:
    """Two chunks at each of two depths; their logits are 0.13 GB in every float32 tensor."""
    chunked, whole = peak_gigabytes("medusa", "jensen_shannon", 128_000, 128, 2, 0, 2**30)
    assert chunked < 0.4 and whole > 2 * chunked, (chunked, whole)


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("family", ["medusa", "redrafter"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_large_vocabulary_takes_little_memory(family: str, name: str) -> None:
    (peak,) = peak_gigabytes(family, name, 128_000, 2048, 5)
    print(f"{family}, {name}: {peak:.2f} GB")  # shown by `pytest -rP`
    assert peak < 0.6
