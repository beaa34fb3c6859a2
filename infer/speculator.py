"""The public face of decoding: a callable for `model.generate(custom_generate=…)`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.heads import Drafter, OptionError, Sampling, load_drafter
from headstart.heads.core import row_seeds

from .loop import Decoding, Emitted, Stats
from .policies import StaticTree
from .rules import EXPANSION, check_pair
from .target import Target

_UNSUPPORTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class Speculator:
    """Decodes a target with a drafter, with the target's own output distribution.

    Give it to `model.generate(…, custom_generate=speculator)`, or call `speculator.generate(…)`,
    which is the same: generation config, logits processors, stopping criteria and streamers of
    transformers apply as they are.

    Args:
        target: a causal language model of transformers, in eval mode.
        drafter: bound to that target, or None to decode plainly in the same runtime.
        tree: a `StaticTree`, or what `StaticTree.parse` reads; the deepest chain when None.
        rule: `greedy`, `match` or `coupled`; None takes `greedy`, or `coupled` when
            sampling.
        tokenizer: only kept for callers.

    Attributes:
        stats: what the last call did.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None = None,
        *,
        tree: StaticTree | str | Sequence[Sequence[int]] | None = None,
        rule: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if drafter is not None:
            drafter.bind(target)
        if rule is not None:
            check_pair(EXPANSION.get(rule, "topk"), rule)
        self.drafter, self.rule, self.tokenizer = drafter, rule, tokenizer
        if tree is None:
            tree = "plain" if drafter is None else f"chain:{drafter.max_depth or 4}"
        self.tree = tree if isinstance(tree, StaticTree) else StaticTree.parse(tree)
        self.tree.check(drafter)
        self.target = Target(
            target, () if drafter is None else tuple(drafter.config.feature_layers)
        )
        self.stats = Stats()

    @property
    def model(self) -> PreTrainedModel:
        """The target."""
        return self.target.model

    def generate(self, input_ids: Tensor | None = None, **options: Any) -> Any:
        """`model.generate(input_ids, custom_generate=self, **options)`; also takes `seed`.

        Streamers must come this way: `generate` does not hand them on to a callable.
        """
        call = functools.partial(self, streamer=options.pop("streamer", None))
        generate: Any = self.model.generate
        return generate(input_ids, custom_generate=call, **options)

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        seed: int | Sequence[int] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode, as `generate` calls it.

        Args:
            input_ids: [B, P] int64, padded on the left.
            seed: one seed for the batch, or one per row; drawn from torch's default generator when
                None, so `transformers.set_seed` governs it.

        Returns:
            [B, P + new] int64, or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate`.
        """
        config = generation_config or model.generation_config
        if model is not self.model:
            raise OptionError(
                "this speculator was made for another model; make one with Speculator(model, …)."
            )
        _refuse(config, self.model)
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.dtype)
        if input_ids.shape[1] == 0 or not bool(mask[:, -1].all()):
            raise OptionError(
                "the prompts are empty or padded on the right; expected at least one token a row, "
                "padded on the left: set tokenizer.padding_side = 'left'."
            )
        criteria = StoppingCriteriaList(stopping_criteria or [])
        limit = min(
            (c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=None
        )
        if limit is None or limit <= input_ids.shape[1]:
            raise OptionError(
                f"the length limit is {limit} and the prompt has {input_ids.shape[1]} tokens; set "
                "max_new_tokens to at least 1."
            )
        eos = [
            i for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.tolist()
        ]
        others = [c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
        sampling = self._sampling(config, logits_processor, seed, input_ids)
        rule = self._rule(sampling)
        decoding = Decoding(
            self.target,
            self.drafter,
            self.tree,
            sampling,
            coupled=EXPANSION[rule] == "coupled",
            eos=eos,
            criteria=StoppingCriteriaList(others),
            pad=_pad(config, eos),
        )
        self.stats = decoding.stats
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for emitted in run(decoding, input_ids, mask, limit - input_ids.shape[1]):
            if streamer is not None:
                streamer.put(torch.from_numpy(emitted.tokens[0, : emitted.count[0]]))
        if streamer is not None:
            streamer.end()
        sequences = decoding.sequences
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _sampling(
        self,
        config: GenerationConfig,
        processors: LogitsProcessorList | None,
        seed: int | Sequence[int] | None,
        input_ids: Tensor,
    ) -> Sampling:
        kept = LogitsProcessorList(processors or [])
        if not config.do_sample:
            return Sampling(None, kept)
        batch = input_ids.shape[0]
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        if not isinstance(seed, int) and len(seed) != batch:
            raise OptionError(
                f"found {len(seed)} seeds for {batch} rows; give one seed, or one per row."
            )
        return Sampling(row_seeds(seed, batch, input_ids.device), kept)

    def _rule(self, sampling: Sampling) -> str:
        natural = "greedy" if sampling.seeds is None else "coupled"
        rule = self.rule or natural
        if (rule == "greedy") != (natural == "greedy"):
            if natural == "greedy":
                return "greedy"  # without sampling, match and coupled have no noise and are greedy
            raise OptionError(
                "rule 'greedy' with do_sample=True; drop the rule, or set do_sample=False."
            )
        return rule


def run(decoding: Decoding, ids: Tensor, mask: Tensor, new_tokens: int) -> Iterator[Emitted]:
    """Prefill and decode until every row has ended, yielding what each step emits."""
    yield decoding.prefill(ids, mask, new_tokens)
    while not decoding.finished:
        yield decoding.round()


def _pad(config: GenerationConfig, eos: Sequence[int]) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return int(eos[0]) if eos else 0


def _refuse(config: GenerationConfig, model: PreTrainedModel) -> None:
    if (config.num_beams or 1) > 1:
        raise OptionError(
            f"num_beams is {config.num_beams}; speculative decoding keeps one hypothesis: "
            "set num_beams=1."
        )
    for name in _UNSUPPORTED:
        if config.return_dict_in_generate and getattr(config, name, False):
            raise OptionError(f"{name}=True is not supported while speculating; set it to False.")
    if model.training:
        raise OptionError(
            "the target is in training mode, where dropout is random; call model.eval()."
        )


def load(
    target: PreTrainedModel | str | Path,
    drafter: Drafter | str | Path | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tree: StaticTree | str | Sequence[Sequence[int]] | None = None,
    rule: str | None = None,
    **options: Any,
) -> Speculator:
    """Load target and drafter and return the Speculator over them.

    Args:
        target: a model, or the folder or Hub name of one (its tokenizer is then loaded too).
        drafter: a drafter, or the folder or Hub name of an artifact; None decodes plainly.
        options: passed to `AutoModelForCausalLM.from_pretrained`, such as `dtype`.

    Raises:
        ArtifactError: the drafter is damaged or was trained for another target.
        UnsupportedTarget: the target cannot be driven by a token tree.
    """
    if isinstance(target, str | Path):
        model = AutoModelForCausalLM.from_pretrained(target, **options).eval()
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(target)
    else:
        model = target
    if isinstance(drafter, str | Path):
        drafter = load_drafter(drafter, model, tokenizer)
    return Speculator(model, drafter, tree=tree, rule=rule, tokenizer=tokenizer)
