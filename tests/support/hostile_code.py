"""Code such as a model repository may hold, which leaves a file where it was run."""

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()

class Config(LlamaConfig):
    model_type = "own_llama"

class Model(LlamaForCausalLM):
    config_class = Config

class Own(PreTrainedTokenizerFast):
    pass
"""
