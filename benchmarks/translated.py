"""Tokens per forward with a draft model of another tokenizer, here and with transformers.

    python -m benchmarks.translated PATH/OF/stories260k PATH/OF/DRAFT_MODEL

Both draft four tokens in a row. Openings of stories are continued by 128 tokens.
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.stories import story_writer
from headstart.heads import load_drafter
from headstart.infer import Speculator
from headstart.infer.measure.own_text import decode_texts

NEW, DRAFTED = 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter")
    options = parser.parse_args()
    model, prompts = story_writer(options.target)
    both = [AutoTokenizer.from_pretrained(name) for name in (options.target, options.drafter)]
    drafter: Any = load_drafter(options.drafter, model, both[0])
    known = drafter.translation
    print(f"{len(known.ids):,} of the target's {len(both[0]):,} tokens are the drafter's, too")

    assistant: Any = AutoModelForCausalLM.from_pretrained(options.drafter).eval()
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = DRAFTED, "constant"
    settings.assistant_confidence_threshold = 0.0

    def of_transformers() -> float:
        """Tokens per forward of the target, greedy; it cannot sample with every pair."""
        forwards = [0]

        def counted(*call: Any) -> None:
            forwards[0] += 1

        hook, written = model.register_forward_hook(counted), 0
        for prompt in prompts:
            ids: Tensor = prompt.unsqueeze(0)
            text = model.generate(
                ids, assistant_model=assistant, tokenizer=both[0], assistant_tokenizer=both[1],
                attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0,
                do_sample=False,
            )  # fmt: skip
            written += text.shape[1] - ids.shape[1]
        hook.remove()
        return written / forwards[0]

    for temperature in (0.0, 1.0):
        speculator = Speculator(model, drafter, tree=f"chain:{DRAFTED}")
        decode_texts(speculator, prompts, NEW, temperature)
        print(f"temperature {temperature:g}   τ {speculator.stats.tau:.2f}", flush=True)
    print(f"transformers, greedy: {of_transformers():.2f} tokens a forward")


if __name__ == "__main__":
    main()
