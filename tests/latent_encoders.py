"""Write small sentence encoders for tests: a BERT of two layers with a tokenizer of whole words."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sees", "dogs", "the", ","]
SPECIAL = [("[CLS]", 2), ("[SEP]", 3)]


def make_tokenizer(template: str, *, as_bert: bool = False) -> Tokenizer:
    """Return a tokenizer that splits at spaces, or one that cleans and splits texts as BERT's does: it drops accents and
    spaces around punctuation."""
    rust = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if as_bert:
        rust.normalizer = normalizers.BertNormalizer()
        rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.add_special_tokens(WORDS[:4])
    rust.post_processor = processors.TemplateProcessing(single=template, special_tokens=SPECIAL)
    return rust


def write_encoder(folder: Path, *, template: str = "[CLS] $A [SEP]", as_bert: bool = False) -> Path:
    """Write an encoder as sentence-transformers saves it; return its folder."""
    folder.mkdir(exist_ok=True)
    make_tokenizer(template, as_bert=as_bert).save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
    )
    transformers.BertModel(config).eval().save_pretrained(folder)
    return folder
