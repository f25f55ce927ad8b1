"""Generation on every available engine: batches of prompts, sampling, streaming, and truncated answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crosstune.config.load import make_config
from crosstune.core.sampling import Sampling
from crosstune.data.render.rendering import encode_prompt
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import open_session as open_by_plan
from crosstune.torch_engine.generate.general import cast_once
from crosstune.torch_engine.loading.adapters import AdaptedLinear
from crosstune.torch_engine.open import open_session as open_torch

Prompts = list[list[int]]
WORDS = ["red", "green", "blue", "a much longer colour", "none", "white"]


@pytest.fixture(params=["cpu", "mlx"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "mlx":
        pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> Prompts:
    tokenizer = Tokenizer.from_folder(tiny_model)
    return [encode_prompt([{"role": "user", "content": f"Say {word}."}], tokenizer) for word in WORDS]


def open_session(backend: str, model: Path, **options: Any) -> Any:
    config = make_config(backend=backend, precision="fp32", model_name=str(model), **options)
    return open_by_plan(make_plan(config), ModelFolder(name=str(model), path=model, source="folder"))


def test_generation_of_several_prompts_is_that_of_each_alone(
    backend: str, tiny_model: Path, prompts: Prompts
) -> None:
    session = open_session(backend, tiny_model)
    assert len({len(prompt) for prompt in prompts}) > 1
    stops = sorted(Tokenizer.from_folder(tiny_model).stop_ids)
    together = session.generate(prompts, max_new_tokens=8, stop_ids=stops)
    assert together == [session.generate([p], max_new_tokens=8, stop_ids=stops)[0] for p in prompts]
    third = together[0][2]
    [cut] = session.generate(prompts[:1], max_new_tokens=8, stop_ids=[third])
    assert cut == together[0][: together[0].index(third)]


def test_sampling_follows_its_seed_and_leaves_training_alone(
    backend: str, tiny_model: Path, prompts: Prompts
) -> None:
    session = open_session(backend, tiny_model, lora_dropout=0.3)
    before = session.export_state().random
    answers = [
        session.generate(prompts[:1], max_new_tokens=8, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]
    options: Any = {"max_new_tokens": 8, "sampling": Sampling(temperature=1.0, seed=1)}
    twice = session.generate(prompts[:1] * 2, **options)
    assert session.generate(prompts[:1], earlier={tuple(prompts[0]): 1}, **options) == twice[1:]
    assert twice[0] == answers[0][0] != twice[1]
    for name, array in session.export_state().random.items():
        np.testing.assert_array_equal(array, before[name])


def test_streamed_tokens_are_the_answer(backend: str, tiny_model: Path, prompts: Prompts) -> None:
    heard: list[int] = []
    [answer] = open_session(backend, tiny_model).generate(
        prompts[:1], max_new_tokens=6, on_token=heard.append
    )
    assert heard == answer
    assert len(answer) == 6


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16_autocast"}, {"precision": "fp32"}, {"train_type": "dora"}, {"train_type": "full"}],
    ids=str,
)
def test_what_is_cast_once_gives_the_logits_of_casts_in_every_pass(
    tiny_model: Path, prompts: Prompts, options: dict[str, Any]
) -> None:
    asked = {"backend": "cpu", "model_name": str(tiny_model), "precision": "fp32"} | options
    session = open_torch(make_plan(make_config(**asked)), model_folder=tiny_model)
    with torch.no_grad():
        for name, parameter in session.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    tokens = torch.tensor(prompts[:1])
    state = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
    with torch.inference_mode(), session.precision.context(session.device):
        plain = session.model(tokens).logits
        with cast_once(session.model, session.precision):
            assert torch.equal(session.model(tokens).logits, plain)
            held = [module.held for module in session.model.modules() if isinstance(module, AdaptedLinear)]
            assert all(pair is not None for pair in held)
    assert not any(module.held for module in session.model.modules() if isinstance(module, AdaptedLinear))
    after = session.model.state_dict()
    assert after.keys() == state.keys()
    for name, tensor in state.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)
    embedding, head = session.model.get_input_embeddings(), session.model.get_output_embeddings()
    assert embedding.weight is head.weight or not session.model.config.tie_word_embeddings


def test_weights_that_change_are_cast_again(tiny_model: Path, prompts: Prompts) -> None:
    session = open_session("cpu", tiny_model)
    first = session.generate(prompts[:1], max_new_tokens=8)
    with torch.no_grad():
        for name, parameter in session.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    assert session.generate(prompts[:1], max_new_tokens=8) != first
