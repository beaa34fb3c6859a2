"""The public face of decoding: a callable for `model.generate(custom_generate=…)`."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.heads import Drafter, OptionError, Sampling, load_drafter
from headstart.heads.artifacts.files import read_tree
from headstart.heads.artifacts.plan import read_plan
from headstart.heads.core import offloaded, row_seeds
from headstart.heads.group import DrafterGroup, members

from .graphs import Rounds
from .loop import Decoding
from .record import Record
from .request import Ending, check_config, check_processors, read_inputs
from .rules.registry import choose_rule, find_rule
from .stats import Emitted, Stats
from .target import Target
from .trees.children import Expansion
from .trees.parse import parse_tree
from .trees.policy import Policy
from .trees.union import Union


class Speculator:
    """Decodes a target with a drafter, with the target's own output distribution.

    Give it to `model.generate(…, custom_generate=speculator)`, or call `speculator.generate(…)`:
    generation config, logits processors and stopping criteria of transformers apply as they are.
    A processor of the user's own is shown the whole batch once per distinct length of the rows; a
    stopping criterion gets no scores.

    Args:
        target: a causal language model of transformers, in eval mode.
        drafter: bound to that target, or None to decode plainly in the same runtime; or several,
            whose trees are verified together, see `Union`.
        tree: a policy, or what `parse_tree` reads; the deepest chain (of each) when None.
        rule: who is accepted when sampling, a name in `RULES`; None takes `coupled`. All but
            `typical` keep the target's distribution. Without sampling every rule is `greedy`.
        expansion: how children are chosen when sampling, see `Children`; None takes what the rule
            is best with.
        tokenizer: only needed for `stop_strings`.
        graphs: whether rounds are captured as CUDA graphs and replayed, and overlap with the host's
            reading; None for on a GPU only, and not for weights that are streamed in. A graph has
            the model's weights and hooks built in: after changing them, make a new speculator.
        attention: how the target attends to trees: `masked`, under a mask over all slots; `tree`,
            see `heads.core.tree_attention`; `auto`, that on CUDA, where the target passes a trial.
        compile: whether the target's forwards are compiled, or the mode of `torch.compile`, see
            `Target`. The first round of each batch size then takes long, and types of 16 bits round
            otherwise, so near-ties may fall otherwise than without.

    Attributes:
        stats: what the last call did.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | Sequence[Drafter] | None = None,
        *,
        tree: Policy | str | Sequence[Sequence[int]] | None = None,
        rule: str | None = None,
        expansion: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        graphs: bool | None = None,
        attention: str = "auto",
        compile: bool | str = False,
    ):
        if drafter is not None and not isinstance(drafter, Drafter):
            drafter = DrafterGroup(drafter) if len(drafter) > 1 else next(iter(drafter), None)
        if drafter is not None:
            drafter.bind(target)
        self.drafter, self.rule, self.tokenizer = drafter, rule, tokenizer
        self.tree = own_tree(members(drafter)) if tree is None else parse_tree(tree)
        record = find_rule(rule)
        self.expansion: Expansion = record.check_expansion(expansion)
        record.check_tree(self.tree)
        self.tree.check(drafter, self.expansion)
        layers = () if drafter is None else tuple(drafter.config.feature_layers)
        self.target = Target(target, layers, attention, compile)
        self.stats = Stats()
        device, streamed = self.device, offloaded(target)
        if graphs and streamed:
            raise OptionError(
                "graphs is True, and the target's weights are streamed in for each forward, which "
                "no graph repeats; leave graphs out, or load the target whole."
            )
        captured = device.type == "cuda" and not streamed if graphs is None else graphs
        self.rounds = Rounds.on(device) if captured else None

    @property
    def model(self) -> PreTrainedModel:
        """The target."""
        return self.target.model

    @property
    def device(self) -> torch.device:
        """Where the target runs, wherever its weights are kept."""
        return self.target.device

    def generate(self, input_ids: Tensor | None = None, **options: Any) -> Any:
        """`model.generate(input_ids, custom_generate=self, **options)`, and what that cannot do.

        These work here alone, since `generate` keeps them from a callable or refuses them: a
        `streamer`; `stop_strings` (with `tokenizer`, unless the speculator has it);
        `max_new_tokens=0`, which returns the prompt; `temperature=0`, which is greedy. Also takes
        `seed`.

        Raises:
            OptionError: an option that cannot be honoured, by name.
        """
        input_ids = options.pop("inputs", None) if input_ids is None else input_ids
        for name in ("assistant_model", "custom_generate", "synced_gpus"):
            if options.pop(name, None):
                raise OptionError(
                    f"{name} was given; the speculator decodes by itself, on one process: leave "
                    "it out."
                )
        streamer = options.pop("streamer", None)
        tokenizer = options.pop("tokenizer", None) or self.tokenizer
        if self._setting("temperature", options) == 0 and self._setting("do_sample", options):
            _set(options, do_sample=False, temperature=1.0)
        if strings := self._setting("stop_strings", options):
            criteria = StoppingCriteriaList(options.pop("stopping_criteria", None) or [])
            if not any(type(criterion) is StopStringCriteria for criterion in criteria):
                if tokenizer is None:
                    raise OptionError(
                        "stop_strings need the target's tokenizer, found none; pass tokenizer=…."
                    )
                criteria.append(StopStringCriteria(tokenizer, strings))
            options["stopping_criteria"] = criteria
            _set(options, stop_strings=None)
            options.pop("stop_strings", None)
        if input_ids is not None and input_ids.shape[-1] == 0 and "inputs_embeds" not in options:
            raise OptionError("the prompts are empty; expected at least one token a row.")
        if self._setting("max_new_tokens", options) == 0 and input_ids is not None:
            return self._nothing(input_ids, streamer, options)
        _check_padding(input_ids, options, self)
        generate: Any = self.model.generate
        with _without_stop_strings(self.model.generation_config):
            call = functools.partial(self, streamer=streamer)
            return generate(input_ids, custom_generate=call, **options)

    def _setting(self, name: str, options: dict[str, Any]) -> Any:
        """An option as `generate` resolves it: the call's, its config's, the model's."""
        if name in options:
            return options[name]
        given = getattr(options.get("generation_config"), name, None)
        return getattr(self.model.generation_config, name, None) if given is None else given

    def _nothing(self, ids: Tensor, streamer: BaseStreamer | None, options: dict[str, Any]) -> Any:
        self.stats = Stats(self.tree.max_depth)
        ids = ids.repeat_interleave(self._setting("num_return_sequences", options) or 1, dim=0)
        if streamer is not None:
            streamer.put(ids.cpu())
            streamer.end()
        if self._setting("return_dict_in_generate", options):
            return GenerateDecoderOnlyOutput(sequences=ids)  # type: ignore[arg-type]
        return ids

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
            [B, P + new] int64, or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate`. In
            its `scores` and `logits`, a row that has ended is certain of the padding token.

        Raises:
            OptionError: something was asked for that cannot be honoured, by name.
            DecodingError: the target's logits are NaN, or it has no further position.
        """
        config = generation_config or model.generation_config
        if model is not self.model:
            raise OptionError(
                "this speculator was made for another model; make one with Speculator(model, …)."
            )
        check_config(config, self.model)
        embedding: Any = self.model.get_input_embeddings()
        vocab = max(embedding.weight.shape[0], self.model.config.get_text_config().vocab_size)
        mask = read_inputs(input_ids, model_kwargs, vocab)
        batch, width = input_ids.shape
        ending = Ending.of(stopping_criteria, width)
        sampling = self._sampling(config, logits_processor, seed, input_ids)
        check_processors(sampling.processors or LogitsProcessorList(), batch, width)
        if streamer is not None and batch > 1:
            raise OptionError(f"a streamer takes one row, found {batch}; stream one prompt a call.")
        rule = choose_rule(self.rule, bool(config.do_sample))
        rule.check_sampling(sampling)
        wanted = [bool(config.output_scores), bool(config.output_logits)]
        record = Record(*wanted) if config.return_dict_in_generate and any(wanted) else None
        decoding = Decoding(
            self.target,
            self.drafter,
            self.tree,
            sampling,
            rule=rule,
            expansion=self.expansion if rule.samples else rule.children,
            eos=ending.eos,
            criteria=ending.others,
            pad=_pad(config, ending.eos),
            record=record,
            rounds=self.rounds,
        )
        self.stats = decoding.stats
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for emitted in run(decoding, input_ids, mask, ending.limit - width):
            if streamer is not None:
                streamer.put(torch.from_numpy(emitted.tokens[0, : emitted.count[0]]))
        if streamer is not None:
            streamer.end()
        sequences = decoding.sequences
        ending.remind(sequences)
        if not config.return_dict_in_generate:
            return sequences
        found: dict[str, Any] = {}
        if record is not None:
            new = sequences.shape[1] - width
            found = {name: record.steps(name, new, decoding.pad) for name in ("scores", "logits")}
        return GenerateDecoderOnlyOutput(sequences=sequences, **found)  # type: ignore[arg-type]

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


def run(decoding: Decoding, ids: Tensor, mask: Tensor, new_tokens: int) -> Iterator[Emitted]:
    """Prefill and decode until every row has ended, yielding what each step emits."""
    begun = time.perf_counter()
    first = decoding.prefill(ids, mask, new_tokens)
    decoding.stats.prefill_seconds = time.perf_counter() - begun
    yield first
    begun = time.perf_counter()
    while not decoding.finished:
        yield decoding.round()
    decoding.stats.decode_seconds = time.perf_counter() - begun


def _pad(config: GenerationConfig, eos: Sequence[int]) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return int(eos[0]) if eos else 0


def _set(options: dict[str, Any], **values: Any) -> None:
    """Set options of a call, in its generation config where it has one, in a copy."""
    if options.get("generation_config") is None:
        options.update(values)
        return
    config = options["generation_config"] = copy.deepcopy(options["generation_config"])
    for name, value in values.items():
        options.pop(name, None)
        setattr(config, name, value)


@contextmanager
def _without_stop_strings(config: GenerationConfig) -> Iterator[None]:
    """Keep the model's own stop strings from `generate`, which has no tokenizer for a callable."""
    strings, config.stop_strings = config.stop_strings, None
    try:
        yield
    finally:
        config.stop_strings = strings


def _check_padding(
    input_ids: Tensor | None, options: dict[str, Any], speculator: Speculator
) -> None:
    """Refuse what looks padded on the right where `generate` would take the padding for text.

    It infers no mask when the padding token is an end token too.
    """
    if input_ids is None or input_ids.shape[0] < 2 or options.get("attention_mask") is not None:
        return
    eos, pad = (speculator._setting(name, options) for name in ("eos_token_id", "pad_token_id"))
    eos = torch.as_tensor([] if eos is None else eos).flatten().tolist()
    pad = eos[0] if pad is None and eos else pad
    if pad in eos and input_ids.shape[1] and bool((input_ids[:, -1] == pad).any()):
        raise OptionError(
            f"a prompt ends with token {pad}, which is padding and end token, and there is no "
            "attention_mask; pass it, and pad on the left: tokenizer.padding_side = 'left'."
        )


def load(
    target: PreTrainedModel | str | Path,
    drafter: Drafter | str | Path | Sequence[Drafter | str | Path] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tree: Policy | str | Sequence[Sequence[int]] | None = None,
    rule: str | None = None,
    expansion: str | None = None,
    graphs: bool | None = None,
    attention: str = "auto",
    allow_pickle: bool = False,
    compile: bool | str = False,
    **options: Any,
) -> Speculator:
    """Load target and drafter and return the Speculator over them.

    Args:
        target: a model, or the folder or Hub name of one (its tokenizer is then loaded too).
        drafter: a drafter, or the folder or Hub name of one, see `load_drafter`; None decodes
            plainly; several decode together, see `Union`.
        tree: see `Speculator`; None takes the artifact's plan for this machine, where nothing pays
            to decode plainly, or else the tree that it was measured with; of several, each one's.
        rule, expansion, graphs, attention, compile: see `Speculator`.
        allow_pickle: see `load_drafter`.
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
    single = drafter is None or isinstance(drafter, Drafter | str | Path)
    given: Any = [drafter] if single else drafter
    found: list[Any] = [each for each in given if each is not None]
    trees: list[Any] = [None] * len(found)
    for number, name in enumerate(found):
        if isinstance(name, Drafter):
            continue
        if tree is None:
            plan = read_plan(name, model)
            pays = plan is not None and (plan.tree or len(found) == 1)
            trees[number] = plan.tree if plan and pays else read_tree(name)
        found[number] = load_drafter(name, model, tokenizer, allow_pickle=allow_pickle)
    if trees == [[]]:
        found = []  # it does not pay; it was loaded all the same, as it may have adapted the target
    if tree is None:
        tree = own_tree(found, trees)
    return Speculator(
        model,
        found,
        tree=tree,
        rule=rule,
        expansion=expansion,
        tokenizer=tokenizer,
        graphs=graphs,
        attention=attention,
        compile=compile,
    )


def own_tree(drafters: Sequence[Any], trees: Sequence[Any] = ()) -> Policy:
    """The tree that drafters decode with where none is given: the union of each one's.

    Args:
        trees: of some of them; the deepest chain is taken for the others.
    """
    parts = [
        parse_tree(tree or f"chain:{drafter.max_depth or 4}")
        for drafter, tree in itertools.zip_longest(drafters, trees[: len(drafters)])
    ]
    if len(parts) > 1:
        return Union(parts)
    return parts[0] if parts else parse_tree("plain")
