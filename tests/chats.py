"""Small model directories of Hugging Face, made by hand: tokenizers with BOS, EOS and templates."""

import json
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")

BOS, EOS, TURN_END = "<|begin|>", "<|endoftext|>", "<|turn_end|>"
SPECIAL = [EOS, BOS, TURN_END, "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>"]
TEXTS = ["the cat sat on the mat", "what is one and one? two. user assistant system"] * 20

# As Llama 3 writes it: BOS, then a head and the trimmed content of each message.
HEADS = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' }}\n"
    "    {{- message['content'] | trim + '<|turn_end|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|head|>assistant<|/head|>\\n\\n' }}\n{%- endif %}\n"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Llama 2 and Mistral write it: the answer ends the document.
INST = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user and assistant') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
TAGS = (
    "{% for message in messages %}\n{% if message['role'] == 'assistant' %}\n"
    "<|im_start|>assistant\n{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "\n{% else %}\n<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n"
)
# Leaves out the thoughts of all answers but the last, as Qwen 3 does.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"heads": HEADS, "chatml": CHATML, "inst": INST, "tags": TAGS}


def write_model_directory(
    folder: Path,
    template: str | None = None,
    *,
    adds_bos: bool = True,
    generation: dict | None = None,
    **settings,
) -> str:
    """Write a byte-level BPE tokenizer with its settings; return the folder."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.pre_tokenizer, model.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    if adds_bos:
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    values = {"bos_token": BOS, "eos_token": TURN_END, "tokenizer_class": "PreTrainedTokenizerFast"}
    values |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)
