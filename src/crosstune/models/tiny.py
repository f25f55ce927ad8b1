"""Make a tiny random Llama with a real tokenizer, without a framework, for `doctor` and tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.models.llama_layout import WEIGHTS, Llama, write_configs, write_tokenizer
from crosstune.models.weights import Tensor, write_safetensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_STD = 0.02

# Enough ordinary English for a few hundred merges.
_TEXT = """
A language model reads a text one token at a time and says which token it expects next. Training shows it many texts
and moves its weights a little after each of them, so that the right token becomes more likely. The loss is the mean
surprise of the model: it falls quickly at first and slowly later. When a question is asked, the answer is written in
the same way, token after token, until the model writes the end of its turn. You are a helpful assistant. What is the
capital of France? The capital of France is Paris. How many people live there? Please translate this sentence into
Spanish, and then write a short story about a ship that sailed around the world with its captain and seven sailors.
The user gives an instruction and the system follows it: turn on the light in the kitchen, set the alarm for eight in
the morning, play some music, add two numbers, count the letters of a word, explain why the sky is blue, describe the
weather of tomorrow, list three reasons for learning to cook, compare the first answer with the second one, and say
which of them is better. One, two, three, four, five, six, seven, eight, nine, ten. Monday, Tuesday, Wednesday,
Thursday, Friday, Saturday and Sunday. Red, green, yellow, black and white. {"name": "value", "number": 10}
"""


TINY = Llama(
    vocab=512,
    hidden=64,
    intermediate=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_context=2048,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tied=False,
    dtype="float32",
    bos=SPECIAL.index("<|im_start|>"),
    eos=SPECIAL.index("<|im_end|>"),
    pad=SPECIAL.index("<|endoftext|>"),
)


def tiny_model(folder: Path, *, seed: int = 0, **sizes: Any) -> Path:
    """Write a tiny random model into `folder` and return it; `sizes` replace fields of TINY."""
    llama = replace(TINY, **sizes)
    llama = replace(llama, head_dim=llama.hidden // llama.num_heads)
    folder.mkdir(parents=True, exist_ok=True)
    write_configs(folder, llama)
    random = np.random.default_rng(seed)
    tensors = [
        Tensor(name=name, dtype="F32", shape=shape, rows=_values(random, name, shape))
        for name, shape in llama.tensor_shapes().items()
    ]
    write_safetensors(folder / WEIGHTS, tensors)
    pad, bos, eos = SPECIAL
    write_tokenizer(
        folder,
        _train_tokenizer(llama.vocab),
        special={"bos": bos, "eos": eos, "unk": pad, "pad": pad},
        chat_template=CHATML,
        max_context=llama.max_context,
    )
    return folder


def _values(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
    if name.endswith("norm.weight"):
        yield np.ones(shape, dtype="<f4")
    else:
        yield (random.standard_normal(shape, dtype=np.float32) * np.float32(_STD)).astype("<f4")


def _train_tokenizer(vocab: int) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer=trainer)
    return tokenizer
