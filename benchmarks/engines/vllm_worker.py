"""Runs in vLLM's environment: `python vllm_worker.py JOB.json FOUND.json`.

JOB is an object with `target`, `dtype`, `speculative` (vLLM's settings), `prompts` (lists of token
ids) and `new_tokens`. FOUND gets for each prompt the token ids that each step wrote.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main(job: dict[str, Any]) -> list[list[list[int]]]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    model = LLM(
        job["target"], dtype=job["dtype"], max_model_len=1024, max_num_seqs=4, enforce_eager=True,
        enable_prefix_caching=False, speculative_config=job["speculative"],
    )  # fmt: skip
    engine, found = model.llm_engine, []
    for number, prompt in enumerate(job["prompts"]):
        sampling = SamplingParams(
            temperature=0, max_tokens=job["new_tokens"], output_kind=RequestOutputKind.DELTA
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        steps: list[list[int]] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                if new := list(output.outputs[0].token_ids):
                    steps.append(new)
        found.append(steps)
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
