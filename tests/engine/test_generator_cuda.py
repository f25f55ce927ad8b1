"""The generator on an NVIDIA GPU: CUDA graphs against single steps and transformers, families, quantized bases, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from fast_models import CONFIGS, VOCABULARY, make_model, quantize_base

from crosstune.config.load import make_config
from crosstune.core.answers import Answer
from crosstune.core.quantization import QuantSpec
from crosstune.core.sampling import GREEDY, Sampling
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.generate import answers as batching
from crosstune.torch_engine.generate.answers import sample_answers
from crosstune.torch_engine.generate.fast import FastRows
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.fp8_weights import why_no_fp8
from crosstune.torch_engine.open import open_session

pytestmark = pytest.mark.cuda

STOP, NEW = 1, 40
NF4 = QuantSpec(quantizer="bnb", bits=4, group_size=64)
FP8 = QuantSpec(quantizer="fp8", bits=8, group_size=0)


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(3, VOCABULARY, length).tolist() for length in lengths]


def make(
    name: str, dtype: torch.dtype, spec: QuantSpec | None = None, **changed: Any
) -> tuple[Any, FastDecoder]:
    model, adapters = make_model(name, **changed)
    model.to("cuda", dtype).eval()
    if spec is not None:
        quantize_base(adapters, spec)
    fp8 = spec is FP8 and why_no_fp8(torch.device("cuda"), dtype) is None
    return model, FastDecoder(model, dtype=dtype, fp8=fp8)


def answer(decoder: FastDecoder, prompts: Any, **options: Any) -> list[Answer]:
    asked = {"max_new_tokens": NEW, "stop_ids": [STOP], "sampling": GREEDY} | options
    with torch.inference_mode():
        return sample_answers(FastRows(decoder), prompts, **asked)


def plain_log_probs(decoder: FastDecoder, prompt: Any, one: Answer) -> torch.Tensor:
    """Return the log probabilities of an answer by a pass through the fast layers without a cache."""
    ids = torch.tensor([[*prompt, *one.tokens]], device="cuda")
    with torch.inference_mode():
        logits = decoder.logits(decoder.hidden(ids))[len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_give_the_answers_of_transformers_in_fp32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_STEPS_BEFORE_GRAPH", 3)
    model, decoder = make(name, torch.float32)
    prompts = prompts_of(5, 19, 11, 30, 2, 19, 1)
    found = answer(decoder, prompts)
    for prompt, one in zip(prompts, found, strict=True):
        np.testing.assert_allclose(one.log_probs, plain_log_probs(decoder, prompt, one), atol=2e-4)
        if name == "llama, a window that it does not use":
            continue  # transformers' cache drops tokens that the attention sees
        ids = torch.tensor([prompt], device="cuda")
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": STOP}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        assert list(one.tokens) == expected.tolist()
    replaced = answer(decoder, prompts, most_rows=3)
    assert [one.tokens for one in replaced] == [one.tokens for one in found]


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen3, QK norms", "gemma3"])
@pytest.mark.parametrize("spec", [None, NF4, FP8], ids=["dense", "nf4", "fp8"])
def test_a_graph_computes_what_single_steps_do(name: str, spec: QuantSpec | None) -> None:
    if spec is NF4:
        pytest.importorskip("bitsandbytes", reason="the bnb extra is not installed")
    _, decoder = make(name, torch.bfloat16, spec, hidden_size=128, head_dim=32, intermediate_size=256)
    rows = FastRows(decoder)
    assert rows.by_kernel and rows.allows_graph
    prompts = prompts_of(5, 70, 130, 30, 2)
    for sampling in (GREEDY, Sampling(temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=1.1, seed=3)):
        # Without stop tokens: single steps drop ended rows, and matmuls of fewer rows round differently.
        graphed = answer(decoder, prompts, sampling=sampling, stop_ids=[])
        assert graphed == answer(decoder, prompts, sampling=sampling, stop_ids=[], uses_graph=False)
        if sampling is GREEDY:
            for prompt, one in zip(prompts, graphed, strict=True):
                expected = plain_log_probs(decoder, prompt, one)
                assert (torch.tensor(one.log_probs) - expected).abs().mean() < (0.1 if spec is FP8 else 0.05)


def test_long_answers_grow_the_cache_and_capture_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_FIRST_COLUMNS", 16)
    _, decoder = make("llama", torch.float32)
    prompts = prompts_of(4, 9, 2)
    found = answer(decoder, prompts, max_new_tokens=150, stop_ids=[])
    for prompt, one in zip(prompts, found, strict=True):
        assert len(one.tokens) == 150
        np.testing.assert_allclose(one.log_probs, plain_log_probs(decoder, prompt, one), atol=2e-4)


def test_an_answer_does_not_depend_on_its_neighbours() -> None:
    _, decoder = make("llama", torch.float32)
    prompts = prompts_of(5, 19, 11, 7, 2, 13)
    prompts += [prompts[0]] * 40
    sampling = Sampling(temperature=0.9, top_k=40, seed=5)
    found = answer(decoder, prompts, sampling=sampling, most_rows=8)
    for place in (0, 3, 5):
        [alone] = answer(decoder, [prompts[place]], sampling=sampling)
        assert alone.tokens == found[place].tokens
    assert len({tuple(one.tokens) for one in found[6:]}) >= 35  # some may stop at once


def test_a_session_frees_what_it_used(tiny_model: Path) -> None:
    config = make_config(backend="cuda", precision="bf16", model_name=str(tiny_model))
    session: Any = open_session(make_plan(config), model_folder=tiny_model)
    heard: list[int] = []
    session.sample([[5, 6, 7]], max_new_tokens=30, on_token=heard.append)
    before = torch.cuda.memory_allocated()
    found = session.sample([[5, 6, 7], [8, 9]] * 20, max_new_tokens=30, sampling=Sampling(temperature=1.0))
    assert len(found) == 40 and heard
    assert torch.cuda.memory_allocated() == before


def test_other_families_decode_with_their_modules() -> None:
    from crosstune.torch_engine.generate.general import GeneralRows

    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=96, eos_token_id=1, bos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    model: Any = hf.AutoModelForCausalLM.from_config(config).to("cuda").eval()
    prompts = prompts_of(5, 19, 11, 2, 13)
    with torch.inference_mode():
        rows = GeneralRows(model, torch.device("cuda"))
        found = sample_answers(
            rows, prompts, max_new_tokens=NEW, stop_ids=[STOP], sampling=GREEDY, most_rows=2
        )
    for prompt, one in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        assert list(one.tokens) == expected.tolist()
