"""The MLX engine equals the torch engine: losses, gradients, optimizers, states and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
import mlx.core as mx
from support import train_step

from crosstune.config.load import load_config, make_config
from crosstune.core.errors import UserError
from crosstune.core.protocols import Session, SessionState
from crosstune.data.batches.token_batch import Example, TokenBatch, pack_rows, pad_rows, split_rows
from crosstune.mlx_engine.model_folders import make_view
from crosstune.models.locate import ModelFolder
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import open_session as open_by_plan

NUM_STEPS = 5
SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = 7  # shorter than the documents, so that a sliding window is at work within them
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "gemma": lambda: transformers.GemmaConfig(**SHAPE, head_dim=16, hidden_activation="gelu"),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, head_dim=16, sliding_window=64),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**SHAPE),
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERTS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=None),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, **ROUTED, num_experts=4, head_dim=16, norm_topk_prob=True
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SHAPE, **ROUTED, n_routed_experts=4, n_shared_experts=1, head_dim=16, first_k_dense_replace=1
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random models of several kinds, made when they are first asked for."""
    home = tmp_path_factory.mktemp("kinds")

    def get(kind: str) -> Path:
        folder = home / kind
        if not folder.exists():
            torch.manual_seed(1)
            make_tiny(folder, vocab=512)  # for its tokenizer
            (folder / "model.safetensors").unlink()
            AutoModelForCausalLM.from_config((KINDS | EXPERTS)[kind]()).float().save_pretrained(folder)
        return folder

    return get


def documents(lengths: list[int]) -> list[Example]:
    random = np.random.default_rng(0)
    return [
        Example(
            tokens=random.integers(3, 512, length).astype(np.int32),
            supervised=random.random(length) < 0.6,
            index=index,
        )
        for index, length in enumerate(lengths)
    ]


EXAMPLES = documents([11, 20, 17, 9, 24, 30, 20, 12, 16, 26, 31, 14])
WINDOWS = [list(split_rows(EXAMPLES[start : start + 6], batch_size=3, pad_id=0)) for start in (0, 6, 3, 2)]


def open_session(backend: str, folder: Path, **options: Any) -> Session:
    asked = {"backend": backend, "precision": "fp32", "model_name": str(folder), "context_length": 64}
    model = ModelFolder(name=str(folder), path=folder, source="folder")
    return open_by_plan(make_plan(make_config(**(asked | options))), model)


def pair(folder: Path, **options: Any) -> tuple[Session, Session]:
    return open_session("cpu", folder, **options), open_session("mlx", folder, **options)


def window(step: int) -> list[TokenBatch]:
    return WINDOWS[step % len(WINDOWS)]


def worst_loss(ours: Session, theirs: Session, *, num_steps: int = NUM_STEPS, lr: float = 1e-3) -> float:
    """The largest relative difference of a loss over some steps."""
    worst = 0.0
    for step in range(num_steps):
        expected = train_step(theirs, window(step), lr=lr).loss
        worst = max(worst, abs(train_step(ours, window(step), lr=lr).loss - expected) / expected)
    return worst


def largest_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[n] - a).max() / max(1e-6, np.abs(a).max())) for n, a in theirs.items())


@pytest.mark.parametrize(
    ("kind", "train_type"),
    [*((kind, "lora") for kind in KINDS), ("llama", "full"), ("gemma", "full"), ("gemma3", "dora")],
)
def test_steps_have_the_losses_of_torch(folders: Any, kind: str, train_type: str) -> None:
    torch_session, mlx_session = pair(folders(kind), train_type=train_type)
    assert mlx_session.num_parameters() == torch_session.num_parameters()
    assert worst_loss(mlx_session, torch_session) < 1e-5


@pytest.mark.parametrize(("kind", "train_type"), [("llama", "dora"), ("llama", "full"), ("gemma2", "lora")])
def test_gradients_are_those_of_torch(folders: Any, kind: str, train_type: str) -> None:
    """Adam's first moment after its first step is a tenth of the gradient. Not from the start, where B is zero."""
    torch_session, mlx_session = pair(folders(kind), train_type=train_type, apply_gradient_clipping=False)
    for step in range(3):
        train_step(torch_session, window(step), lr=1e-2)
    state = replace(torch_session.export_state(), moments={})
    gradients = []
    for session in (mlx_session, torch_session):
        session.import_state(state)
        train_step(session, window(3), lr=1e-3)
        gradients.append(dict(session.export_state().moments["first_moment"]))
    assert min(np.abs(array).max() for array in gradients[1].values()) > 0
    assert largest_difference(*gradients) < 1e-4


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "lion", "sgd", "adadelta", "adafactor"])
def test_optimizers_make_the_updates_of_torch(folders: Any, optimizer: str) -> None:
    """Measured against how far the weights have moved: they hardly do, and would agree without that."""
    options = {"optimizer": optimizer, "wd": 0.1, "train_type": "full"}
    torch_session, mlx_session = pair(folders("llama"), **options)
    start = torch_session.export_state().weights
    assert worst_loss(mlx_session, torch_session, num_steps=5) < 1e-5
    torch_state, mlx_state = torch_session.export_state(), mlx_session.export_state()
    for name, weight in torch_state.weights.items():
        moved = np.linalg.norm(weight - start[name])
        assert np.linalg.norm(mlx_state.weights[name] - weight) < 1e-3 * moved, name
    assert mlx_state.moments.keys() == torch_state.moments.keys()
    for slot, arrays in torch_state.moments.items():
        assert {n: a.shape for n, a in arrays.items()} == {
            n: a.shape for n, a in mlx_state.moments[slot].items()
        }


def test_lora_plus_and_rank_stabilized_scale_are_those_of_torch(folders: Any) -> None:
    torch_session, mlx_session = pair(
        folders("llama"), loraplus_lr_ratio=8.0, use_rslora=True, lora_rank=4, wd=0.3
    )
    assert worst_loss(mlx_session, torch_session) < 1e-5


@pytest.mark.parametrize("kind", EXPERTS)
def test_adapters_of_experts_train_move_and_save_as_on_torch(folders: Any, kind: str, tmp_path: Path) -> None:
    """From factors that are not 0: A of gate and up is shared, and B has the rows of both."""
    torch_session, mlx_session = pair(folders(kind), lora_rank=4)
    assert mlx_session.trained_shapes() == torch_session.trained_shapes()
    assert any(".experts." in name for name in mlx_session.trained_shapes())
    for step in range(3):
        train_step(torch_session, window(step), lr=1e-2)
    mlx_session.import_state(torch_session.export_state())
    assert worst_loss(mlx_session, torch_session, num_steps=4) < 1e-5
    torch_state, mlx_state = torch_session.export_state(), mlx_session.export_state()
    assert (
        largest_difference(dict(mlx_state.moments["first_moment"]), dict(torch_state.moments["first_moment"]))
        < 1e-3
    )

    names = []
    for session, place in ((torch_session, "torch"), (mlx_session, "mlx")):
        session.import_state(torch_state)
        saved = session.save_result(tmp_path / place)
        assert saved is not None
        names.append(
            {name: array.tobytes() for name, array in load_file(saved / "adapter_model.safetensors").items()}
        )
    assert names[0] == names[1]


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 3e-3), ("lion", 5e-4)])
def test_a_state_moves_to_mlx_and_back_without_a_mark(folders: Any, optimizer: str, lr: float) -> None:
    """Four steps on torch, four on MLX, four on torch again: the curve of twelve steps on torch."""

    def train(session: Session, steps: range) -> list[float]:
        return [train_step(session, window(step), lr=lr).loss for step in steps]

    def open_at(state: SessionState, backend: str = "cpu") -> Session:
        session = open_session(backend, folders("llama"), optimizer=optimizer)
        session.import_state(state)
        return session

    session = open_session("cpu", folders("llama"), optimizer=optimizer)
    losses = train(session, range(4))
    session = open_at(session.export_state(), "mlx")
    losses += train(session, range(4, 8))
    state = session.export_state()
    losses += train(open_at(state), range(8, 12))
    expected = train(open_session("cpu", folders("llama"), optimizer=optimizer), range(12))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    # Without its moments the curve is another: the bound above can fail.
    lost = train(open_at(replace(state, moments={})), range(8, 12))
    assert np.abs(np.array(lost) / expected[8:] - 1).max() > 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3"])
def test_packed_rows_have_the_loss_of_torch_and_of_documents_alone(folders: Any, kind: str) -> None:
    mlx_session = open_session("mlx", folders(kind))
    rows = [EXAMPLES[:3], EXAMPLES[3:5], EXAMPLES[5:7]]
    packed = pack_rows(rows, pad_id=0)
    alone = mlx_session.evaluate([pad_rows([e], pad_id=0) for row in rows for e in row])
    assert mlx_session.evaluate([packed]).loss == pytest.approx(alone.loss, rel=1e-5)
    torch_session = open_session("cpu", folders(kind))
    assert mlx_session.evaluate([packed]).loss == pytest.approx(
        torch_session.evaluate([packed]).loss, rel=1e-5
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_greedy_answers_are_those_of_torch(folders: Any, kind: str) -> None:
    torch_session, mlx_session = pair(folders(kind))
    for step in range(4):
        train_step(torch_session, window(step), lr=1e-2)
    mlx_session.import_state(torch_session.export_state())
    prompts = [list(map(int, example.tokens)) for example in EXAMPLES[:4]]
    answers = torch_session.generate(prompts, max_new_tokens=12)
    assert mlx_session.generate(prompts, max_new_tokens=12) == answers
    assert len({tuple(answer) for answer in answers}) > 1


def test_a_mask_that_a_model_spreads_over_heads_is_found_out(folders: Any) -> None:
    """mlx-lm's Gemma 2 lays the mask of a row over a group of heads; with as many rows as groups nothing fails."""
    session = open_session("mlx", folders("gemma2"))
    with pytest.raises(UserError, match="gemma2"):
        session.evaluate([pack_rows([EXAMPLES[:2], EXAMPLES[2:4]], pad_id=0)])
    prompts = [list(map(int, example.tokens)) for example in EXAMPLES[:2]]
    alone = [session.generate([prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert session.generate(prompts, max_new_tokens=6) == alone


def test_a_window_that_mlx_lm_does_not_heed_bounds_the_context(folders: Any) -> None:
    with pytest.raises(UserError, match="--context_length 65"):
        open_session("mlx", folders("gemma2"), context_length=65)
    open_session("mlx", folders("gemma3"), context_length=65)


@pytest.mark.parametrize("train_type", ["lora", "dora"])
def test_peft_and_mlx_lm_load_the_adapter_and_give_our_logits(
    folders: Any, train_type: str, tmp_path: Path
) -> None:
    from mlx_lm import load
    from peft import AutoPeftModelForCausalLM

    folder = folders("qwen2")
    session = open_session(
        "mlx", folder, train_type=train_type, lora_rank=3, lora_target_modules="k_proj,up_proj"
    )
    for step in range(4):
        train_step(session, window(step), lr=1e-2)
    saved = session.save_result(tmp_path)
    assert saved == tmp_path / "adapter"
    ids = [list(map(int, EXAMPLES[1].tokens))]
    ours = np.array(session.model(mx.array(ids)))  # type: ignore[attr-defined]
    peft = AutoPeftModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(peft(torch.tensor(ids)).logits.numpy(), ours, rtol=1e-4, atol=1e-5)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(ids)).logits
    assert np.abs(base.numpy() - ours).max() > 1e-2
    respelled = make_view(folder, tmp_path / "view")
    model, _ = load(str(respelled), adapter_path=str(saved / "mlx"))
    np.testing.assert_allclose(np.array(model(mx.array(ids))), ours, rtol=1e-4, atol=1e-5)


def test_transformers_and_mlx_lm_load_the_model_and_give_our_logits(folders: Any, tmp_path: Path) -> None:
    from mlx_lm import load

    session = open_session("mlx", folders("llama"), train_type="full")
    train_step(session, window(0), lr=1e-2)
    saved = session.save_result(tmp_path)
    assert saved == tmp_path / "model"
    ids = [list(map(int, EXAMPLES[1].tokens))]
    ours = np.array(session.model(mx.array(ids)))  # type: ignore[attr-defined]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)(torch.tensor(ids)).logits
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.array(load(str(saved))[0](mx.array(ids))), ours)
    again = open_session("cpu", saved)
    assert again.evaluate(window(0)).loss == pytest.approx(session.evaluate(window(0)).loss, rel=1e-5)


def test_every_key_of_the_installed_mlx_lm_is_known(tmp_path: Path) -> None:
    """--mlx_config accepts a file with all of mlx-lm's defaults."""
    from mlx_lm.lora import CONFIG_DEFAULTS

    path = tmp_path / "mlx.json"
    path.write_text(json.dumps(CONFIG_DEFAULTS))
    load_config(["--mlx_config", str(path)])
