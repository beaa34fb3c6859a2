"""The public face of decoding: a callable for `model.generate(custom_generate=…)`."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.heads import Drafter, DrafterGroup, OptionError
from headstart.heads.core import (
    alone,
    current,
    device_and_dtype,
    in_parts,
    language_model_in,
    release_threads,
)

from .decoding_method import DecodingMethod, Given
from .depth import RoundTimes
from .generate_options import (
    Ending,
    check_autocast,
    check_config,
    read_inputs,
    read_sampling,
)
from .graphs import RoundGraphs, captures_rounds, never_captured
from .loop import Decoding
from .own_options import read_logprobs
from .request import Request
from .rules.registry import choose_rule, find_rule
from .stats import Drafted, Record, Stats
from .streamer import hand_on
from .tensor_parallel import leads, runner_of
from .trees.adaptive import AdaptiveTree
from .trees.by_request import USUAL, Kind, TreesByRequest, heat_of
from .trees.expansions import Expansion
from .trees.parse import default_tree, parse_tree
from .trees.policy import Policy
from .trees.shapes import ADAPTIVE

Method = TypeVar("Method", bound=Callable[..., Any])
_Tree = Policy | str | Sequence[Sequence[int]] | None
Trees = _Tree | Mapping[Kind, _Tree]


class _Requests(threading.local):
    """How many requests the thread is in; more than one where they call each other."""

    def __init__(self) -> None:
        self.open = 0


_requests = _Requests()


def _one_request(method: Method) -> Method:
    """Have a Speculator's method wait for other threads, and refuse a call from within itself.

    A thread that is in a request already does not wait: the other might wait for it in turn.
    """

    @functools.wraps(method)
    def alone(self: Speculator, *args: Any, **options: Any) -> Any:
        if not self._lock.acquire(blocking=not _requests.open):
            spare = self._spare()
            try:
                return getattr(spare, method.__name__)(*args, **options)
            finally:
                self.stats = spare.stats
        try:
            with self.reserved():
                return method(self, *args, **options)
        finally:
            self._lock.release()

    return alone  # type: ignore[return-value]


class Speculator(DecodingMethod):
    """Decodes a target with a drafter, with the target's own output distribution.

    Give it to `model.generate(…, custom_generate=speculator)`, or call `speculator.generate(…)`:
    what transformers takes applies as it is. A logits processor of the user's own is shown the
    whole batch once per distinct length of the rows; a stopping criterion gets no scores.

    It decodes one request at a time: another thread's call waits until the last one has ended (a
    `Batcher` decodes those of several threads together), and a call from within a request, by its
    processors, criteria or streamer, is refused. Several speculators, and plain `generate`, may run
    on one model in threads of their own at once.

    Args:
        target: a causal language model of transformers, in eval mode, also as a peft model. It may
            be moved or recast between requests.
        drafter: bound to that target, or None to decode plainly in the same runtime; or several,
            whose trees are verified together, see `Union`.
        tree: a tree's name, such as `"chain:4"`, `"cartesian:3,2,1"`, `"best-first:32,8,5"` or
            `"plain"`, also with `"adaptive:"` before it, see `AdaptiveTree`; a list of rank paths;
            or a policy. Or a mapping from (batch size,
            temperature) to these, of which each request takes the nearest. None is the deepest
            chain (of each drafter).
        rule: which drafted tokens are accepted when sampling: `coupled` (None takes it), `match`,
            `rejection`, `block`, `traversal`; or `typical`, which alone does not keep the target's
            distribution. Without sampling every rule is `greedy`.
        expansion: how the children of a node are chosen when sampling: `topk`, `coupled`,
            `with_replacement` or `without_replacement`. None: the rule's own, or `topk` where that
            would be biased by the tree.
        tokenizer: only needed for `stop_strings`.
        graphs: whether rounds are captured as CUDA graphs and replayed, and overlap with the host's
            reading; None for on a GPU only, and not for weights that are streamed in. A graph has
            the model's weights and hooks built in: after changing them, make a new speculator.
        attention: how the target attends to trees: `masked`, under a mask over all slots; `tree`,
            see `heads/core/tree_attention.py`; `auto`, that on CUDA where it passes a trial.
        compile: on a CPU, whether layers of target and drafters run by faster kernels or on packed
            weights: True, False, or `auto` where a short trial finds that faster. A packed copy
            takes their size in memory once more. Elsewhere True, or a mode of `torch.compile`,
            compiles the target's forwards, so that the first round of each batch size takes long;
            `auto` does not. Sums are rounded otherwise, so near-ties may be decided otherwise than
            without; on a CPU float64 runs as it is.
        fused: whether norms, rotary embedding with cache write, and products of the same states are
            a kernel each in the target's forwards over trees, see `heads/core/fused.py`; packed
            ones are, and of compiled ones the products. None: on a GPU where a trial passes.
        prefix_caching: whether a single prompt that begins as an earlier text, as the next turn of
            a chat does, is run from where they differ, see `KeptTexts`. The cache then holds
            features, too. Sums may be rounded otherwise than of a whole prompt, so near-ties may
            fall otherwise. Prompts of a target with recurrent layers are run whole all the same.

    Attributes:
        trees: by kind of request, which another speculator takes as `tree`.
        stats: what the last call did: `tau`, `drafted`, `logprobs` and more, see `Stats`.
        decoding_drafters: the drafters, or packed copies of them.
        remembers: whether drafters that keep earlier answers (`suffix`) are given those of its
            requests. It may be set.

    Raises:
        OptionError: an argument that cannot be used, by name.
        UnsupportedTarget: a model that cannot decode token trees exactly, with the reason.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | DrafterGroup | Sequence[Drafter] | None = None,
        *,
        tree: Trees = None,
        rule: str | None = None,
        expansion: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        graphs: bool | None = None,
        attention: str = "auto",
        compile: bool | str = False,
        fused: bool | None = None,
        prefix_caching: bool = False,
    ):
        target = language_model_in(target)
        self.drafters = DrafterGroup.of(drafter)
        self.drafters.bind(target)
        self.rule, self.tokenizer = rule, tokenizer
        trees = tree if isinstance(tree, Mapping) else {USUAL: tree}
        self.trees = TreesByRequest({kind: self._policy(each) for kind, each in trees.items()})
        record = find_rule(rule)
        self.expansion: Expansion = record.check_expansion(expansion)
        if expansion is None and any(each.bias(self.expansion) for each in self.trees.values()):
            self.expansion = "topk"  # which no tree biases, and every rule that draws takes
        for each in self.trees.values():
            record.check_tree(each)
            each.check(self.drafter, self.expansion)  # type: ignore[arg-type]
            if isinstance(each, AdaptiveTree) and in_parts(target) and not leads(target):
                raise OptionError(
                    f"the target's layers are divided among processes, and with tree {each.label} "
                    "each would choose depths by its own clock; give a tree without adaptive."
                )
        self.stats = Stats()
        self._runs = {"attention": attention, "compile": compile, "fused": fused}
        self._captures, self.prefix_caching = graphs, prefix_caching
        self.remembers = True
        self._lock, self._decodes = threading.RLock(), False
        self._set_up(target)
        self._release_threads()

    def _policy(self, tree: _Tree) -> Policy:
        if tree is None or tree == ADAPTIVE:
            own = default_tree(self.drafters.drafters)
            return own if tree is None else AdaptiveTree(own)
        return parse_tree(tree)

    def _set_up(self, target: PreTrainedModel) -> None:
        """Find how the target is run, where it is and in its dtype."""
        place = device_and_dtype(target)
        # Autocast would give what a trial caches other types than requests find.
        quiet = torch.autocast(place[0].type, enabled=False)
        with alone(target), quiet, current(place[0]):
            self.target = runner_of(target, self.drafters.feature_layers, **self._runs)
            self.target.keeps_texts = self.prefix_caching
            self.decoding_drafters = self.target.drafters_to_run(self.drafters)
        if self._captures and (reason := never_captured(target)) is not None:
            raise OptionError(f"graphs is True, and {reason}; leave graphs out.")
        captured = captures_rounds(target) if self._captures is None else self._captures
        self.graphs = RoundGraphs.on(self.device) if captured else None
        self._times = dict[tuple[Policy, int, bool], RoundTimes]()
        self._place = place

    @property
    def in_request(self) -> bool:
        """Whether the calling thread is in a request of it, by a processor, say."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._decodes
        finally:
            self._lock.release()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Meanwhile nothing else decodes with it: other threads wait."""
        with self._lock:
            if self._decodes:
                raise OptionError(
                    "this speculator was called from within its own request, by a processor, "
                    "criterion or streamer; make another one with Speculator(model, …) for that."
                )
            self._decodes = True
            _requests.open += 1
            try:
                yield
            finally:
                self._decodes = False
                _requests.open -= 1
                self._release_threads()

    def _release_threads(self) -> None:
        """Let another thread decode as fast on a CPU."""
        if self.device.type == "cpu":
            release_threads()

    def _spare(self) -> Speculator:
        """Another speculator like this one, for a single request; it captures no rounds."""
        spare = copy.copy(self)
        spare.target, spare.graphs, spare._times = self.target.spare(), None, {}
        spare._lock, spare._decodes = threading.RLock(), False
        return spare

    def __copy__(self) -> Speculator:
        found: Any = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Speculator cannot be pickled or deep-copied, since it has locks and captured "
            "rounds; load it in each process with headstart.load."
        )

    def __repr__(self) -> str:
        names = [type(each).__name__ for each in self.drafters.drafters]
        return (
            f"Speculator({type(self.model).__name__}, {' + '.join(names) or 'no drafter'}, "
            f"tree={self.tree.label!r}, rule={self.rule or 'greedy, or coupled when sampling'!r})"
        )

    @property
    def tree(self) -> Policy:
        """The tree of a single prompt that is decoded greedily."""
        return self.tree_of()

    def tree_of(self, batch: int = 1, temperature: float = 0.0) -> Policy:
        """The tree of requests of so many prompts, sampled at a temperature; 0 is greedily."""
        return self.trees.of(batch, temperature)

    def times_of(self, batch: int, temperature: float) -> RoundTimes | None:
        """What is known of the rounds of such requests, where their tree is adaptive; else None."""
        tree = self.tree_of(batch, temperature)
        if not isinstance(tree, AdaptiveTree):
            return None
        kind = tree, batch, temperature > 0
        # Of each kind of rounds that are captured, the first runs as written, then one is captured.
        warm = 1 if self.graphs is None else 2
        return self._times.setdefault(kind, RoundTimes(tree.levels, warm))

    @property
    def drafter(self) -> Drafter | DrafterGroup | None:
        """The only drafter; the group where there are several, None where there is none."""
        found = self.drafters.drafters
        return self.drafters if len(found) > 1 else next(iter(found), None)

    @property
    def model(self) -> PreTrainedModel:
        return self.target.model

    @property
    def device(self) -> torch.device:
        return self.target.device

    @_one_request
    def _write_nothing(self, rows: int) -> None:
        self.stats = Stats(self.tree.max_depth)
        self.stats.drafted = Drafted.nothing(rows)

    @_one_request
    # What a request leaves for the next one must not be made under a caller's inference mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _decode(self, given: Given, streamer: BaseStreamer | None) -> Any:
        request, ending, mask = self.request_of(*given)
        model, input_ids, config = given.model, given.input_ids, given.generation_config
        if streamer is not None and len(input_ids) > 1:
            raise OptionError(
                f"a streamer takes one row, found {len(input_ids)}; stream one prompt a call."
            )
        width, record = input_ids.shape[1], request.record
        decoding = Decoding(request, self.graphs)
        self.stats = decoding.stats
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for emitted in decoding.run(input_ids, mask, ending.limit - width):
            hand_on(streamer, emitted)
        if streamer is not None:
            streamer.end()
        if self.remembers and request.drafters.remembers:
            decoding.remember()
        sequences, self.stats.drafted = decoding.sequences, request.rows.drafted()
        self.stats.logprobs = request.rows.logprobs()
        ending.warn_of_length(sequences)
        if not (config or model.generation_config).return_dict_in_generate:
            return sequences
        found: Any = {} if record is None else record.steps(sequences.shape[1] - width, ending.pad)
        return GenerateDecoderOnlyOutput(sequences=sequences, **found)  # type: ignore[arg-type]

    def request_of(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None,
        stopping_criteria: StoppingCriteriaList | None,
        generation_config: GenerationConfig | None,
        seed: int | Sequence[int] | Tensor | None,
        logprobs: int | None,
        model_kwargs: dict[str, Any],
    ) -> tuple[Request, Ending, Tensor]:
        """The request that `generate` describes, how it ends, and the prompts' mask [B, P]."""
        config = generation_config or model.generation_config
        if model._modules is not self.model._modules:  # `without_stop_strings` may be in between
            raise OptionError(
                "this speculator was made for another model; make one with Speculator(model, …)."
            )
        check_config(config, self.model)
        check_autocast(self.model)
        if device_and_dtype(self.model) != self._place:
            self.drafters.bind(self.model)  # which refuses one that was left on another device
            self._set_up(self.model)
        vocab = self.target.vocabulary
        mask = read_inputs(input_ids, model_kwargs, vocab)
        ending = Ending.of(stopping_criteria, config, input_ids.shape[1])
        if config.do_sample and seed is None and in_parts(self.model) and not leads(self.model):
            raise OptionError(
                "the target's layers are divided among processes, each of which would draw a seed "
                "of its own; give all of them the same seed."
            )
        sampling = read_sampling(config, logits_processor, seed, input_ids, vocab)
        rule = choose_rule(self.rule, bool(config.do_sample))
        rule.check_sampling(sampling)
        heat = heat_of(config.do_sample, config.temperature)
        request = Request(
            self.target,
            self.decoding_drafters,
            self.tree_of(len(input_ids), heat),
            sampling,
            rule=rule,
            expansion=self.expansion if rule.samples else rule.children,
            eos=ending.eos,
            criteria=ending.others,
            pad=ending.pad,
            record=Record.asked(config),
            times=self.times_of(len(input_ids), heat),
            logprobs=read_logprobs(logprobs, vocab),
        )
        return request, ending, mask
