"""Write a drafter for another engine: vLLM, SGLang, TensorRT-LLM, llama.cpp, transformers.

headstart export runs/my-model/heads exported --to vllm
headstart export ORG/NAME exported --target ORG/MODEL --to original
"""

import argparse
from pathlib import Path

from headstart.inputs import check_name, load_speculator
from headstart.terminal import quiet_stdout

from . import options as shared

_FORMAT = (
    "vllm, sglang, tensorrt-llm, llama.cpp, speculators, transformers, or original, that of the "
    "method's authors"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drafter", metavar="ARTIFACT", help=f"{shared.ARTIFACT}; or a drafter of another project")
    add("folder", metavar="FOLDER", type=Path, help="a new folder to write to")
    add("--to", metavar="FORMAT", required=True, help=_FORMAT)
    add("--target", metavar="MODEL", help=shared.TARGET)
    add("--trust-remote-code", action="store_true", help=shared.TRUST)
    add("--allow-pickle", action="store_true", help=shared.PICKLE)


def run(options: argparse.Namespace) -> int:
    """Print the folder, and the line that starts the engine with it."""
    check_name(options.drafter)
    from headstart.heads import Drafter
    from headstart.heads.artifacts.export import check_format, export_drafter
    from headstart.heads.artifacts.files import check_is_free

    check_format(options.to)
    check_is_free(options.folder)
    options.tree = "plain"  # the drafter is needed, whatever a plan says
    speculator = load_speculator(options)
    drafter = speculator.drafter
    assert drafter is None or isinstance(drafter, Drafter), "one drafter is named"
    with quiet_stdout():
        line = export_drafter(drafter, options.to, options.folder, speculator.tokenizer)
    print(options.folder)
    if line:
        print(line)
    return 0
