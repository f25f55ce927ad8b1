"""Rows of plain text: the ids of transformers' tokenizer, with one BOS token where it adds one, and one EOS token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from crosstune.data.read.formats import to_conversation
from crosstune.data.tokens.encode import Encoder
from crosstune.data.tokens.tokenizer import Tokenizer

BOS, EOS = 1, 2
TEXTS = ("Hello world", " a few words", "a\n\nfew ", "more, hello <s> again </s> and", "hello\n")


def make_tokenizer(folder: Path, *, scheme: str, added: str) -> Path:
    """Write a tokenizer that marks the beginnings of words as SentencePiece does, and adds special tokens itself."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[assignment]
    rust.decoder = decoders.Metaspace(prepend_scheme=scheme)  # type: ignore[assignment]
    rust.train_from_iterator(
        ["Hello world and a few words more, hello again.\n"] * 5,
        trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False),
    )
    rust.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=added, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    folder.mkdir()
    rust.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tokens_of(row: dict[str, str], tokenizer: Tokenizer, form: str) -> list[int]:
    encoder = Encoder(tokenizer=tokenizer, form=form, whole=False)
    text = encoder.render(to_conversation(row, form), row)
    ((tokens, mask, *_),) = encoder.to_tokens([text])
    assert len(mask) == len(tokens)
    return [int(token) for token in tokens]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("added", ["$A", "<s> $A", "<s> $A </s>", "$A </s>"])
def test_ids_are_those_of_transformers(tmp_path: Path, scheme: str, added: str) -> None:
    folder = make_tokenizer(tmp_path / "model", scheme=scheme, added=added)
    tokenizer, reader = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        theirs = reader(text)["input_ids"]
        assert tokens_of({"text": text}, tokenizer, "text") == (
            theirs if theirs[-1] == EOS else [*theirs, EOS]
        )
    # Written in the text already, neither is added again.
    for text in ("<s>Hello world", "Hello world</s>", "<s>Hello world</s>"):
        found = tokens_of({"text": text}, tokenizer, "text")
        assert found.count(EOS) == 1 and found[-1] == EOS
        assert found.count(BOS) == int("<s>" in added or "<s>" in text)
        assert found[0] == BOS or found.count(BOS) == 0


@pytest.mark.parametrize("added", ["$A", "<s> $A"])
def test_a_prompt_and_its_completion_have_one_of_each(tmp_path: Path, added: str) -> None:
    tokenizer = Tokenizer.from_folder(make_tokenizer(tmp_path / "model", scheme="first", added=added))
    found = tokens_of({"prompt": "Hello", "completion": "world"}, tokenizer, "prompt_completion")
    assert found.count(EOS) == 1
    assert found.count(BOS) == int("<s>" in added)
