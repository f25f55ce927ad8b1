"""Define the built-in chat templates, and read --chat_template: a built-in name or a Jinja file."""

from __future__ import annotations

from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.core.names import did_you_mean
from crosstune.data.render.types import PLAIN_TEMPLATE
from crosstune.data.tokens.tokenizer import TEMPLATE_LIMIT, try_template
from crosstune.files.plain_files import UnreadableFile, read_plain_text

# For formats without a system turn: write the system's instructions at the start of the next user turn.
_SYSTEM_FIRST = (
    "{% set told = namespace(text='') %}{% for m in messages %}"
    "{% if m.role in ('system', 'developer') %}{% set told.text = m.content + '\n\n' %}"
)

TEMPLATES = {
    "plain": PLAIN_TEMPLATE,
    "chatml": (
        "{{ leading_bos }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ leading_bos }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral": (
        "{{ leading_bos }}"
        + _SYSTEM_FIRST
        + "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
        "{% else %}[INST] {{ told.text }}{{ m.content | trim }} [/INST]{% set told.text = '' %}"
        "{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ leading_bos }}" + _SYSTEM_FIRST + "{% elif m.role == 'assistant' %}"
        "<start_of_turn>model\n{{ m.content | trim }}<end_of_turn>\n"
        "{% else %}<start_of_turn>user\n{{ told.text }}{{ m.content | trim }}<end_of_turn>\n{% set told.text = '' %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "phi3": (
        "{{ leading_bos }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "zephyr": (
        "{{ leading_bos }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "vicuna": (
        "{{ leading_bos }}" + _SYSTEM_FIRST + "{% elif m.role == 'assistant' %}"
        "ASSISTANT: {{ m.content | trim }}{{ eos_token }}\n"
        "{% else %}{{ told.text }}USER: {{ m.content | trim }}\n{% set told.text = '' %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "alpaca": (
        "{{ leading_bos }}" + _SYSTEM_FIRST + "{% elif m.role == 'assistant' %}"
        "### Response:\n{{ m.content }}{{ eos_token }}\n\n"
        "{% else %}{{ told.text }}### Instruction:\n{{ m.content }}\n\n{% set told.text = '' %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
}
"""Name -> template. `leading_bos` is the BOS token of a tokenizer that prepends it, otherwise empty."""


def plain_template(*, leading_bos: bool) -> str:
    """Return the template for models that lack one, readable by other tools."""
    return _for_other_tools(PLAIN_TEMPLATE, leading_bos=leading_bos)


def read_template(value: str, *, adds_bos: bool = False) -> str:
    """Return a built-in template, or a file's template after a trial."""
    path = Path(value).expanduser()
    if value in TEMPLATES and not path.is_file():
        return _for_other_tools(TEMPLATES[value], leading_bos=adds_bos)
    if not path.is_file():
        hint = did_you_mean(value, TEMPLATES)
        raise UserError(
            f"No chat template '{value}'.",
            why="it is neither a local file nor a built-in template.",
            do=f"{hint}Pass the path of a Jinja file, or one of: {', '.join(TEMPLATES)}.",
        )
    try:
        text = read_plain_text(path, limit=TEMPLATE_LIMIT)
    except UnreadableFile as error:
        raise UserError(f"The chat template {path} cannot be read.", why=error.why, do=error.do) from error
    if not text.strip():
        raise UserError(f"The chat template {path} is empty.")
    try_template(text.encode(), path=path)
    return text


def _for_other_tools(template: str, *, leading_bos: bool) -> str:
    """Return a built-in template without `leading_bos`, a variable of crosstune only."""
    return template.replace("{{ leading_bos }}", "{{ bos_token }}" if leading_bos else "")
