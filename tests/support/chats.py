"""Chat templates in the dialects of well-known models, and small tokenizers to render them with.

The templates are written for these tests; they follow the dialects' tokens and their habits.
"""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% set day = strftime_now('%d %b %Y') if strftime_now is defined %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ day }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ system if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system: ' + m.content) }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought = '' %}{% set said = m.content %}"
    "{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}<|im_end|>\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
REASONER = (  # opens the thinking in the prompt, and drops it from every answer
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
VICUNA = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% else %}A chat.{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %} USER: {{ m.content }}{% else %} ASSISTANT: {{ m.content }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PHI = (  # the end of a whole chat is not the end of a turn
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
MARKED = (  # marks what is to be trained on, without the end of the turn
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% else %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARMONY = (  # as GPT-OSS: thinking is a field of a message, and refused in its content
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('found <|channel|> in content') }}"
    "{% endif %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TOOLS = (  # as Qwen2.5 writes tools and calls of them
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n{{ m.content }}"
    "{% for call in m.tool_calls %}{% set called = call.function %}<tool_call>"
    '{"name": "{{ called.name }}", "arguments": {{ called.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = [
    "<s>", "</s>", "<bos>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "<start_of_turn>",
    "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|end|>", "<|endoftext|>",
]  # fmt: skip
ORDINARY = ["<think>", "</think>"]  # tokens of their own that are text, as Qwen3 has them


@cache
def _bytes(greedy_spaces: bool = False) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    # A few merges, so that tokens may cross the ends of words.
    merges = [("Ġ", "T"), ("h", "e"), ("Ċ", "Ċ"), ("Ġ", "a")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # Line ends are words of their own, as for Llama-3 and Qwen; `greedy_spaces`: as for GPT-2.
    words = Regex(r"[^\r\n\w]?\w+|\s*[\r\n]+|\s+|[^\s\w]+")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=greedy_spaces)
    split = [] if greedy_spaces else [pre_tokenizers.Split(words, "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, of_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def _pieces() -> Tokenizer:
    alphabet = [chr(code) for code in range(33, 127)] + ["▁", "\n"]
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def chat_tokenizer(
    template: str | dict[str, str] | None,
    end: str = "</s>",
    pieces: bool = False,
    gpt2: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer with that template, or several by names.

    It is of bytes, or of `pieces` as sentencepiece makes them.
    """
    backend = Tokenizer.from_str((_pieces() if pieces else _bytes(gpt2)).to_str())
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False) for token in ORDINARY])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end)
    tokenizer.chat_template = template  # type: ignore[assignment]
    return tokenizer
