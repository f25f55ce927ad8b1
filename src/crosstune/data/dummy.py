"""Generate the dataset `dummy`: random tokens that fill the context, for benchmarks without data."""

from __future__ import annotations

import hashlib

import numpy as np

from crosstune.data.corpus import Corpus
from crosstune.data.named_datasets import DEFAULT_SAMPLES, DUMMY
from crosstune.data.store import MemoryFiles, StoreWriter
from crosstune.data.tokenizer import Tokenizer


def dummy_corpus(tokenizer: Tokenizer, num_examples: int, *, context_length: int) -> Corpus:
    """Return examples that depend only on the vocabulary size, fully supervised; -1 for the default number."""
    num_examples = DEFAULT_SAMPLES if num_examples == -1 else num_examples
    vocabulary = tokenizer.rust.get_vocab_size()
    memory = MemoryFiles()
    writer = StoreWriter(memory.files)
    for index in range(num_examples):
        random = np.random.Generator(np.random.Philox(key=(0, index)))
        tokens = random.integers(0, vocabulary, size=context_length, dtype=np.int32)
        writer.append(tokens, np.ones(context_length, dtype=np.bool_), row=index)
    identity = hashlib.sha256(f"{DUMMY} {num_examples} {context_length} {vocabulary}".encode()).hexdigest()
    return Corpus(
        store=memory.to_store(
            {
                "rows": num_examples,
                "empty": 0,
                "unlocated_answers": 0,
                "unused_columns": [],
                "ignored_by_template": [],
            }
        ),
        kept=np.arange(num_examples, dtype=np.int64),
        limit=context_length,
        form=DUMMY,
        identity=identity,
    )
