"""What a recipe may say: strict dataclasses, one a section of the file.

`@strict` checks a field's type and range whenever it is set, and reads annotations, which must not
be strings. Nothing here imports torch, so that `--help` and a mistyped recipe answer at once.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict

from headstart.infer.rules.registry import RULES

from ..losses import LOSSES, WEIGHTS, loss_of
from .fields import (
    RecipeError,
    check_sampling,
    device_map_field,
    loss_field,
    number,
    one_of,
    plan_field,
    positive,
    trackers_field,
    tree_field,
)
from .text import Chat, Corpus, Distill


@strict
@dataclass
class Scratch:
    """A small Llama trained from random weights, for runs without a model hub."""

    vocab_size: int = number(1024, ge=257)  # 256 bytes and the end-of-text token
    hidden_size: int = positive(128)  # D
    layers: int = number(12, ge=1, le=1024)  # of the decoder
    heads: int = positive(2)  # of attention
    intermediate_size: int = positive(384)  # of the MLP
    context: int = positive(1024)  # tokens of a text, at most
    sequence_length: int = positive(128)  # tokens a training row
    batch_size: int = positive(8)  # rows a step
    muon_lr: float = positive(16e-3)  # learning rate of the layers' matrices
    adamw_lr: float = positive(4e-3)  # learning rate of the other weights
    warmup_ratio: float = number(0.05, ge=0, lt=1)  # share of its training
    # of its training, which goes on up to twice as long until min_tokens are learnt
    max_seconds: float | None = positive(80.0)
    max_tokens: int | None = positive(None)  # of its training
    min_tokens: int | None = positive(None)  # see max_seconds
    # nats a token; a run whose training loss ends above says so
    expected_loss: float | None = positive(None)


@strict
@dataclass
class TargetSpec:
    """The model that is made faster: a path or Hub name, or one trained here."""

    model: str | None = None  # a folder or a Hub name
    scratch: Scratch | None = None  # instead of model
    # 4bit needs bitsandbytes
    dtype: str = one_of("float32", "bfloat16", "float16", "float64", "auto", "4bit")
    revision: str | None = None  # of a model on the Hub: a commit, a tag or a branch
    # where its layers go, as for from_pretrained: auto, balanced, …, or a mapping of modules to
    # devices; null: all on the process's own. A target over several GPUs takes one process.
    device_map: str | dict[str, Any] | None = device_map_field(default=None)  # noqa: RUF009
    # auto: tensor parallelism by transformers' plan for the target; or styles by the names of
    # modules, to change that plan
    tp_plan: str | dict[str, Any] | None = plan_field(default=None)  # noqa: RUF009
    attn_implementation: str | None = None  # eager, sdpa, flash_attention_2, …; null: its own

    def __post_init__(self) -> None:
        if self.tp_plan is not None and (self.device_map is not None or self.dtype == "4bit"):
            other = "dtype 4bit" if self.device_map is None else f"device_map {self.device_map}"
            raise RecipeError(
                f"target.tp_plan: found target.{other} too, with which a target cannot be divided "
                "among processes; set one of them to null, or the dtype to bfloat16"
            )


@strict
@dataclass
class DrafterSpec:
    """The drafter's family; all other keys are options of that family's config class."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)


@strict
@dataclass
class OnPolicy:
    """Text that the drafter writes while it is trained, with the target's probabilities there."""

    lmbda: float = number(0.5, gt=0, le=1)  # λ of GKD: share of the steps that train on it
    temperature: float = number(1.0, ge=0)  # of the drafter's sampling
    every: int = positive(8)  # steps whose text is written at once, which bounds its age


@strict
@dataclass
class Train:
    """How the drafter is trained."""

    # all but cross_entropy compare with the target's probabilities; or the weights of several
    loss: str | dict[Any, Any] = loss_field(default="cross_entropy")  # noqa: RUF009
    learning_rate: float = positive(1e-3)  # after the warm-up; then a cosine to 0
    batch_size: int = positive(8)  # rows a process and forward
    gradient_accumulation: int = positive(1)  # micro-batches a step
    group_by_length: bool = True  # the rows of a batch have about the same length
    # short rows stand behind each other in one of packed_length tokens, and do not see each other;
    # batch_size then counts those. null: where target and drafter keep them apart
    packing: bool | None = False
    packed_length: int | None = positive(None)  # null: as many as the longest row has
    # threads that read rows ahead, in each process
    dataloader_workers: int = number(0, ge=0, le=256)
    # rows a step, of all processes and micro-batches; replaces gradient_accumulation, so that a
    # step is the same on any number of GPUs
    rows_per_step: int | None = positive(None)
    max_steps: int = positive(1000)  # training ends at the first limit that it reaches
    epochs: float | None = positive(None)  # over the rows
    max_seconds: float | None = positive(None)  # of training
    warmup_ratio: float = number(0.1, ge=0, lt=1)  # share of the training
    weight_decay: float = number(0.0, ge=0)  # AdamW's
    clip: float = positive(1.0)  # the norm that gradients are clipped to
    optimizer: str = one_of("adamw", "adamw_8bit")  # adamw_8bit needs bitsandbytes
    beta1: float = number(0.9, ge=0, lt=1)  # Adam's decay of the mean of gradients
    beta2: float = number(0.999, ge=0, lt=1)  # Adam's decay of the mean of their squares
    epsilon: float = positive(1e-8)  # which Adam adds to the root of that mean
    head_decay: float = number(0.8, gt=0, le=1)  # weight of head k is head_decay ** k
    # of each position and head: what acceptance gains from it (D-PACE), or the target's probability
    # of the tokens before its label (PARD-2)
    position_weights: str = one_of(*WEIGHTS)
    eval_every: int | None = positive(None)  # steps between validations by real decoding
    feature_weight: float = number(0.0, ge=0)  # of the distance to the target's features (EAGLE)
    feature_cache_mb: float = number(512.0, ge=0)  # keep the target's features up to this size
    # where that is too little: the first rows' features in files of so many GB, from which later
    # epochs and runs read them; 0 computes them anew each time
    feature_disk_gb: float = number(0.0, ge=0)
    # a drafter of the same family to start from: a folder or Hub name; null: new weights
    from_: str | None = None
    # continue from the last checkpoint of this run's longest training that differs only in its
    # length, with the new schedule from there on; false: a longer training starts anew
    extend: bool = False
    activation_checkpointing: bool = False  # compute activations again: less memory, slower
    compile: bool = False  # torch.compile of the drafter's forward
    on_policy: OnPolicy | None = None  # null: all text is the target's
    # where the figures go beside metrics.jsonl: any of tensorboard, wandb, trackio
    report_to: list[str] = trackers_field(default_factory=list)  # noqa: RUF009

    def accumulation(self, processes: int) -> int:
        """Micro-batches a step; RecipeError where `rows_per_step` is not divided by theirs."""
        rows, each = self.rows_per_step, self.batch_size * processes
        if rows is None:
            return self.gradient_accumulation
        if rows % each:
            raise RecipeError(
                f"train.rows_per_step is {rows}, and {processes} processes with train.batch_size "
                f"{self.batch_size} compute {each} rows at once; expected a multiple of that: "
                "change train.batch_size"
            )
        return rows // each

    def __post_init__(self) -> None:
        loss = loss_of(self.loss)
        if self.on_policy is not None and (loss.divergence is None or loss.labels):
            others = [name for name, loss in LOSSES.items() if loss.divergence is not None]
            raise RecipeError(
                f"train.on_policy: {loss.name} would train the drafter on its own text; set "
                f"train.loss to one that compares with the target: {', '.join(others)}"
            )


@strict
@dataclass
class Decode:
    """How drafts are grown, accepted and measured."""

    # chain:K, cartesian:A,B,…, sparse:N, a list of paths (lists of integers), or a file of them
    tree: str | list[Any] = tree_field(default="chain:4")  # noqa: RUF009
    # one of those whose text is that of plain decoding
    rule: str = one_of(*(name for name, rule in RULES.items() if rule.same_text))
    # what validation and the benchmark continue: "same" as distillation (distill.prefix; prompts of
    # at most distill.prefix_tokens, given ones as distill.max_length allows), or "window"
    prefix: str = one_of("same", "window")
    prompts: int = positive(24)  # of the stage bench, which headstart quickstart has
    prefix_tokens: int = positive(64)  # of a window or a start
    new_tokens: int = positive(128)  # after each prompt, at most
    sampled: float | None = positive(None)  # the stage bench measures this temperature, too
    temperature: float | None = positive(None)  # in validation, of rules that sample; null: 1
    top_p: float | None = number(None, gt=0, le=1)  # the same; null: all tokens
    top_k: int | None = positive(None)  # the same; null: all tokens
    validation_prompts: int = positive(8)  # other held-out ones, decoded at each validation

    def __post_init__(self) -> None:
        check_sampling(self.rule, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@strict
@dataclass
class Hardware:
    """What a run is planned for. It decides nothing: estimates of hours and memory read it."""

    gpus: int = positive(1)  # of all nodes
    memory_gb: float = positive(80.0)  # of each GPU, in 1e9 bytes
    tflops: float = positive(312.0)  # of each, dense products in bfloat16, its data sheet's peak
    bandwidth: float = positive(2039.0)  # of each one's memory, 1e9 bytes a second
    launch: str | None = None  # the launch file, see `headstart launch-file`; null: no launcher


@strict
@dataclass
class Recipe:
    """One training run, from text to measured drafter; results go to `output/name/`."""

    name: str  # of the run's folder
    drafter: DrafterSpec  # what is trained
    target: TargetSpec
    seed: int = number(0, ge=0, lt=2**32)  # as NumPy takes it
    output: str = "runs"  # the folder of all runs
    # another run in `output` whose stages corpus, target and distill are used: run there where it
    # has not finished them, and here where it has finished them with other settings
    shares: str | None = None
    corpus: Corpus = field(default_factory=Corpus)
    chat: Chat = field(default_factory=Chat)
    distill: Distill = field(default_factory=Distill)
    train: Train = field(default_factory=Train)
    decode: Decode = field(default_factory=Decode)
    hardware: Hardware | None = None

    def __post_init__(self) -> None:
        if (self.target.model is None) == (self.target.scratch is None):
            raise RecipeError(
                "target: expected exactly one of model and scratch; "
                "set the other to null, e.g. target.scratch=null"
            )
        if self.corpus.source == "target" and self.corpus.writer is None:
            if self.target.model is None:
                raise RecipeError(
                    "corpus.source: a target that is trained here has nothing to write from; "
                    "expected a text, or target.model"
                )
            # The corpus stage's fingerprint must name the model that writes its text.
            name, revision = self.target.model, self.target.revision
            hub = revision is not None and not Path(name).expanduser().is_dir()
            writer = f"{name}@{revision}" if hub else name
            self.corpus = dataclasses.replace(self.corpus, writer=writer)
        for key in ("name", "shares"):
            name = getattr(self, key)
            if name is not None and (name in {"", ".", ".."} or "/" in name or "\\" in name):
                raise RecipeError(f"{key}: {name!r} cannot name a folder; use letters and digits")

    @property
    def folder(self) -> Path:
        """Where this run's stages write."""
        return Path(self.output) / self.name

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers (JSON-ready), as fingerprints and manifests need them."""
        found = dataclasses.asdict(self)
        found["train"]["from"] = found["train"].pop("from_")
        return found
