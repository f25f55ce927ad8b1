"""The generator against transformers' generate and a plain forward pass: families, replaced rows, adapters, quantized bases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from fast_models import CONFIGS, SHAPE, VOCABULARY, make_model, quantize_base

from crosstune.config.load import make_config
from crosstune.core.answers import Answer
from crosstune.core.quantization import QuantSpec
from crosstune.core.sampling import GREEDY, Sampling
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.generate import answers as batching
from crosstune.torch_engine.generate.answers import sample_answers
from crosstune.torch_engine.generate.fast import FastRows, longest_for_rope
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.open import open_session

STOP, NEW = 1, 16
CPU = torch.device("cpu")
OTHER = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHER |= {"eos_token_id": STOP, "bos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
GENERAL: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, eos_token_id=1, bos_token_id=2,
        initializer_range=0.2,
    ),
    "falcon, alibi": lambda: hf.FalconConfig(**OTHER, alibi=True),
    "gemma2, capped": lambda: hf.Gemma2Config(**SHAPE, head_dim=24, sliding_window=8),
    "mixtral": lambda: hf.MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=8),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SHAPE, **EXPERTS),
}  # fmt: skip
QUICK = ("mistral, window", "gemma3", "gpt2")


def draw_prompts(*lengths: int) -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(3, VOCABULARY, length).tolist() for length in lengths]


def transformers_answers(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": STOP}
        with torch.no_grad():
            rows = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(rows[0, len(prompt) :].tolist())
    return found


def answer(make: Callable[[], Any], prompts: Any, **options: Any) -> list[Answer]:
    asked = {"max_new_tokens": NEW, "stop_ids": [STOP], "sampling": GREEDY} | options
    with torch.inference_mode():
        return sample_answers(make(), prompts, **asked)


def fast_rows(model: Any) -> Callable[[], Any]:
    decoder = FastDecoder(model, dtype=torch.float32)
    return lambda: FastRows(decoder)


def general_rows(model: Any) -> Callable[[], Any]:
    from crosstune.torch_engine.generate.general import GeneralRows, has_plain_cache

    assert has_plain_cache(model)
    return lambda: GeneralRows(model, CPU)


def assert_log_probs(model: Any, prompts: Any, found: Sequence[Answer], *, bound: float = 1e-5) -> None:
    """Compare with a plain forward pass."""
    for prompt, one in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *one.tokens]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(one.log_probs, expected, atol=bound, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*CONFIGS, *GENERAL)
        # transformers' cache drops tokens of this one although its attention sees them.
        if name != "llama, a window that it does not use"
    ],
)
def test_greedy_answers_are_those_of_transformers(name: str) -> None:
    if name in CONFIGS:
        model, _ = make_model(name)
    else:
        model = hf.AutoModelForCausalLM.from_config(GENERAL[name]())
    model.eval()
    prompts = draw_prompts(5, 19, 11, 30, 2, 19, 1)
    expected = transformers_answers(model, prompts, NEW)
    kinds = [general_rows(model)] + ([fast_rows(model)] if name in CONFIGS else [])
    for make in kinds:
        for most_rows in (None, 3):  # all at once, and rows that are replaced
            found = answer(make, prompts, most_rows=most_rows)
            assert [one.tokens for one in found] == expected
            assert [one.stopped for one in found] == [tokens[-1] == STOP for tokens in expected]
            assert_log_probs(model, prompts, found)


def test_copies_merge_the_adapters_and_leave_the_model_alone() -> None:
    model, _ = make_model("llama, biases, tied head")
    model.eval()
    prompts = draw_prompts(5, 12, 3)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decoder = FastDecoder(model, dtype=torch.float32, copies=True)
    assert not any(group.adapters for group in decoder.groups().values())
    found = answer(lambda: FastRows(decoder), prompts)
    assert [one.tokens for one in found] == transformers_answers(model, prompts, NEW)
    assert_log_probs(model, prompts, found)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("quantizer", ["bnb", "fp8"])
def test_quantized_bases_with_adapters(quantizer: str) -> None:
    model, adapters = make_model("llama, biases, tied head")
    spec = QuantSpec(quantizer=quantizer, bits=4 if quantizer == "bnb" else 8, group_size=64)
    quantize_base(adapters, spec)
    model.eval()
    prompts = draw_prompts(5, 12, 3)
    decoder = FastDecoder(model, dtype=torch.float32)
    rows = FastRows(decoder)
    found = answer(lambda: rows, prompts)
    assert [one.tokens for one in found] == transformers_answers(model, prompts, NEW)
    assert_log_probs(model, prompts, found)
    weights = [group.weights for group in decoder.groups().values()]
    with decoder.dequantized():
        assert all(each.is_kept for each in weights) and answer(lambda: rows, prompts) == found
    assert not any(each.is_kept for each in weights)
    dense = sum(each.num_outputs * each.num_inputs for each in weights)
    assert 4 * dense <= decoder.dequantized_bytes() < 8 * dense


def test_an_answer_does_not_depend_on_its_neighbours() -> None:
    """Rows that start late, end early, and share prompts; also caches that grow and rows that are dropped."""
    model, _ = make_model("llama")
    model.eval()
    prompts = draw_prompts(5, 19, 11, 7, 2, 13)
    prompts += [prompts[0]] * 3
    sampling = Sampling(temperature=0.9, top_k=40, repetition_penalty=1.1, seed=5)
    for make in (fast_rows(model), general_rows(model)):
        found = answer(make, prompts, sampling=sampling, most_rows=4)
        together = answer(make, prompts, sampling=sampling)
        assert [one.tokens for one in together] == [one.tokens for one in found]
        for place in (0, 1, 4):
            [alone] = answer(make, [prompts[place]], sampling=sampling)
            assert alone.tokens == found[place].tokens
            np.testing.assert_allclose(alone.log_probs, found[place].log_probs, atol=1e-5)
        assert len({tuple(one.tokens) for one in found[6:]} | {tuple(found[0].tokens)}) == 4, "all different"


def test_equal_prompts_are_computed_once() -> None:
    model, _ = make_model("llama")
    [prompt, other] = draw_prompts(9, 6)
    asked, warm = [prompt] * 5 + [other] * 4, Sampling(temperature=1.0)
    for make in (fast_rows(model), general_rows(model)):
        computed: list[int] = []

        def make_counting(make: Any = make, computed: list[int] = computed) -> Any:
            rows = make()
            fill = rows.fill

            def count(prompts: Any, places: Any) -> torch.Tensor:
                computed.extend(map(len, prompts))
                found: torch.Tensor = fill(prompts, places)
                return found

            rows.fill = count
            return rows

        found = answer(make_counting, asked, sampling=warm, most_rows=3, max_new_tokens=6)
        assert computed == [9, 6]
        assert found == answer(make, asked, sampling=warm, most_rows=3, max_new_tokens=6)


def test_a_cache_grows_with_long_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_FIRST_COLUMNS", 3)
    model, _ = make_model("llama")
    model.eval()
    prompts = draw_prompts(4, 9, 2)
    for make in (fast_rows(model), general_rows(model)):
        found = answer(make, prompts, max_new_tokens=40)
        assert [one.tokens for one in found] == transformers_answers(model, prompts, 40)


def test_answers_arrive_as_they_end_and_tokens_as_they_are_made() -> None:
    model, _ = make_model("llama")
    prompts = draw_prompts(5, 8)
    heard: list[Any] = []
    make = fast_rows(model)
    found = answer(make, prompts, on_answer=heard.append, on_token=heard.append)
    assert sorted(heard, key=lambda one: one.tokens) == sorted(found, key=lambda one: one.tokens)
    heard.clear()
    [alone] = answer(make, prompts[:1], on_token=heard.append)
    assert heard == alone.tokens == found[0].tokens
    assert answer(make, prompts, max_new_tokens=0) == [Answer(tokens=[], log_probs=[], stopped=False)] * 2
    assert answer(make, []) == []
    [cut] = answer(make, prompts[:1], max_new_tokens=1)
    assert cut.tokens == alone.tokens[:1] and not cut.stopped
    [stopped] = answer(make, prompts[:1], stop_ids=[alone.tokens[0]])
    assert stopped.tokens == alone.tokens[:1] and stopped.stopped and stopped.content == []


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"kernels": "fast"}, "fast"),
        ({"kernels": "general"}, "none"),
        ({}, "copies"),
        ({"train_type": "full"}, "copies"),
        ({"train_type": "dora"}, "none"),
    ],
    ids=str,
)
def test_a_session_generates_while_it_trains(tiny_model: Path, options: dict[str, Any], layers: str) -> None:
    """With the layers of training, with copies of its weights, or with modules; weights are read anew in each call."""
    prompts = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8]]
    config = make_config(backend="cpu", precision="fp32", model_name=str(tiny_model), **options)
    session: Any = open_session(make_plan(config), model_folder=tiny_model)
    decoder = session._generating_decoder(40, 32)
    if options or session.task.decoder is None:  # a processor with fast products trains with the fast layers
        assert layers == ("none" if decoder is None else "copies" if decoder.copies else "fast")
        assert (session._generating_decoder(40, 8) is None) == (layers != "fast"), "not for short answers"
    for number in range(2):
        before = {name: tensor.data_ptr() for name, tensor in session.model.named_parameters()}
        for name, parameter in session.model.named_parameters():
            if "lora_B" in name or (options.get("train_type") == "full" and "down_proj" in name):
                parameter.data.normal_(std=0.1 + number)
        state = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
        found = session.sample(prompts, max_new_tokens=32)
        assert [one.tokens for one in found] == transformers_answers(session.model.eval(), prompts, 32)
        assert_log_probs(session.model, prompts, found)
        session.model.train()
        assert all(torch.equal(tensor, state[name]) for name, tensor in session.model.state_dict().items())
        for name, tensor in session.model.named_parameters():
            assert tensor.data_ptr() == before[name], "the memory of training stays as it is"


def test_models_with_states_use_transformers_generate() -> None:
    from crosstune.torch_engine.generate.general import has_plain_cache
    from crosstune.torch_engine.generate.stateful import sample_batches

    kinds = ["linear_attention", "full_attention"]
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    shape = SHAPE | {"num_hidden_layers": 2}
    config = hf.Qwen3NextConfig(**shape, **EXPERTS, **sizes, layer_types=kinds)
    model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
    assert not has_plain_cache(model)
    prompts = draw_prompts(5, 5, 5)
    options: dict[str, Any] = {"device": CPU, "max_new_tokens": 8, "stop_ids": [STOP], "on_token": None}
    heard: list[Answer] = []
    with torch.inference_mode():
        found = sample_batches(model, prompts, sampling=GREEDY, on_answer=heard.append, **options)
        warm = Sampling(temperature=1.0, seed=3)
        [alone] = sample_batches(model, prompts[1:2], sampling=warm, on_answer=None, **options)
        together = sample_batches(model, prompts, sampling=warm, on_answer=None, **options)
    assert [one.tokens for one in found] == transformers_answers(model, prompts, 8)
    assert len(heard) == 3 and together[1].tokens == alone.tokens
    with torch.inference_mode():
        twice = sample_batches(model, [prompts[1]] * 2, sampling=warm, on_answer=None, **options)
        earlier = {tuple(prompts[1]): 1}
        [second] = sample_batches(
            model, prompts[1:2], sampling=warm, earlier=earlier, on_answer=None, **options
        )
    assert second.tokens == twice[1].tokens != twice[0].tokens == alone.tokens
    assert_log_probs(model, prompts, found)


def test_a_model_without_training_keeps_its_fast_layers(tiny_model: Path) -> None:
    config = make_config(backend="cpu", precision="fp32", model_name=str(tiny_model))
    session: Any = open_session(make_plan(config), model_folder=tiny_model, trained=False)
    prompts = [[5, 6, 7, 8], [9, 10]]
    first = session.sample(prompts, max_new_tokens=4)
    decoder = session._decoder
    assert decoder is not None and not decoder.copies and session.task.decoder is None
    assert session.sample(prompts, max_new_tokens=4) == first and session._decoder is decoder
    assert_log_probs(session.model.eval(), prompts, first)


def test_rotary_frequencies_that_depend_on_the_length_are_left_to_transformers() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = hf.LlamaConfig(**SHAPE, rope_parameters=rope)
    assert longest_for_rope(config) == SHAPE["max_position_embeddings"]
    assert longest_for_rope(hf.LlamaConfig(**SHAPE)) == float("inf")
    assert longest_for_rope(copy.deepcopy(CONFIGS["gemma3"]())) == float("inf")


def test_mlx_answers_are_those_of_torch(tiny_model: Path) -> None:
    pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    from crosstune.mlx_engine import generate as mlx_generate
    from crosstune.models.locate import ModelFolder
    from crosstune.runs.open_parts import open_session as open_by_plan

    prompts = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11] * 9, [12, 13, 14]]
    folder = ModelFolder(name="tiny", path=tiny_model, source="folder")
    found: dict[str, list[list[Answer]]] = {}
    for backend in ("cpu", "mlx"):
        config = make_config(backend=backend, precision="fp32", model_name=str(tiny_model), train_type="full")
        session: Any = open_by_plan(make_plan(config), folder, trained=False)
        found[backend] = [
            session.sample(prompts, max_new_tokens=12, sampling=sampling)
            for sampling in (GREEDY, Sampling(temperature=0.7, top_p=0.9, seed=2))
        ]
        if backend == "mlx":
            rows = mlx_generate.MOST_ROWS
            try:
                mlx_generate.MOST_ROWS = 2
                replaced = session.sample(prompts, max_new_tokens=12)
            finally:
                mlx_generate.MOST_ROWS = rows
            assert [one.tokens for one in replaced] == [one.tokens for one in found["mlx"][0]]
    for ours, theirs in zip(found["cpu"], found["mlx"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert list(one.tokens) == list(other.tokens)
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)
