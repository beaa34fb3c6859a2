"""Runs llama.cpp's converter on a model with the quickstart's tokenizer.

    python to_gguf.py LLAMA_CPP FOLDER --outfile FILE [--target-model-dir FOLDER]

The converter knows tokenizers by a checksum. The quickstart's, trained on the machine it runs on,
splits text by the pattern of GPT-2, so its checksum is answered by that name.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv[0] = str(folder / "convert_hf_to_gguf.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
