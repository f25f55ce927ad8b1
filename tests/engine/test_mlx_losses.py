"""The loss of the MLX engine on models of many kinds: cut before their heads, and computed again in the backward pass,
they have the gradients of the plain way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from crosstune.core.errors import UserError
from crosstune.mlx_engine.adapters import canonical_name
from crosstune.mlx_engine.optimizer import put
from crosstune.mlx_engine.task import Arrays
from crosstune.mlx_engine.tasks import causal_lm
from crosstune.mlx_engine.tasks.causal_lm import CausalLoss, document_caches
from crosstune.mlx_engine.wrap_call import recompute_in_backward

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
OLD = {"n_ctx": 256, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "layer_norm_epsilon": 1e-5}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"rope_theta": 1e4},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gemma2": {
        "query_pre_attn_scalar": 16.0,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "cohere": {"logit_scale": 0.25, "layer_norm_eps": 1e-5},
    "phi": {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "gpt2": OLD,
}


def make_model(kind: str, **more: Any) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(
        module.ModelArgs.from_dict(SHAPE | {"model_type": kind} | KINDS.get(kind, {}) | more)
    )
    mx.random.seed(0)
    model.update(tree_map(lambda array: array + 0.05 * mx.random.normal(array.shape), model.parameters()))
    mx.eval(model.parameters())
    return model


ONE = mx.array(1.0)


def make_feed() -> Arrays:
    draw = np.random.default_rng(0)
    return {
        "input_ids": mx.array(draw.integers(1, 100, (2, 12)).astype(np.int32)),
        "places": mx.array(np.sort(draw.choice(24, 9, replace=False)).astype(np.int32)),
        "targets": mx.array(draw.integers(1, 100, 9).astype(np.int32)),
        "counted": mx.array(np.full(9, 0.37, np.float32)),
        "answers": mx.array(np.repeat([0, 1], [4, 5]).astype(np.int32)),
    }


def trained(model: Any) -> dict[str, mx.array]:
    return {canonical_name(name): array for name, array in tree_flatten(model.trainable_parameters())}


def gradients(model: Any, loss: Callable[[dict[str, mx.array]], mx.array]) -> tuple[float, dict[str, Any]]:
    weights = trained(model)

    def of(weights: dict[str, mx.array]) -> mx.array:
        put(model, weights)
        return loss(weights)

    try:
        value, found = mx.value_and_grad(of)(weights)
        return float(value), {name: np.array(array) for name, array in found.items()}
    finally:
        put(model, weights)


def plain(model: Any, feed: Arrays) -> tuple[float, dict[str, Any]]:
    def loss(weights: dict[str, mx.array]) -> mx.array:
        logits = model(feed["input_ids"]).reshape(-1, 128)[feed["places"]]
        picked = mx.take_along_axis(logits, feed["targets"][:, None], axis=-1)[:, 0]
        return ((mx.logsumexp(logits, axis=-1) - picked) * feed["counted"]).sum()

    return gradients(model, loss)


def check_same(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, array in expected[1].items():
        scale = float(np.abs(array).max())
        np.testing.assert_allclose(found[1][name], array, atol=2e-5 * scale, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_cut_has_the_gradients_of_a_whole_one(kind: str) -> None:
    model, feed = make_model(kind), make_feed()
    expected = plain(model, feed)
    loss = CausalLoss(model, places_at_a_time=4)
    check_same(gradients(model, lambda weights: loss.scaled(feed, weights, ONE)[0]), expected)
    assert float(loss(feed)[0]) == pytest.approx(expected[0], rel=1e-5)


def test_a_head_that_is_zero_still_learns() -> None:
    model, feed = make_model("llama"), make_feed()
    model.lm_head.weight = mx.zeros_like(model.lm_head.weight)
    expected = plain(model, feed)
    loss = CausalLoss(model)
    found = gradients(model, lambda weights: loss.scaled(feed, weights, ONE)[0])
    check_same(found, expected)
    assert np.abs(found[1]["lm_head.weight"]).max() > 0
    assert not mx.isnan(model.lm_head.weight).any()


def test_arrays_inside_a_tuple_are_recomputed_with_their_gradients() -> None:
    """Layers of Gemma 4 hand keys and values on to later ones."""
    shared = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16, "sliding_window": 64}
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
    kinds = ["sliding_attention", "full_attention"] * 2
    model, feed = make_model("gemma4_text", **shared, **more, layer_types=kinds), make_feed()
    loss = CausalLoss(model)
    expected = gradients(model, lambda weights: loss.scaled(feed, weights, ONE)[0])
    for layer in model.layers:
        recompute_in_backward(layer)
    check_same(gradients(model, lambda weights: loss.scaled(feed, weights, ONE)[0]), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_model_whose_documents_are_blind_to_each_other_may_be_packed_and_is_tried_once(kind: str) -> None:
    loss = CausalLoss(make_model(kind))
    loss.ensure_separates_documents()
    loss.model = None  # a second trial would need it
    loss.ensure_separates_documents()


def test_a_model_that_counts_positions_from_the_beginning_of_a_row_is_refused() -> None:
    loss = CausalLoss(make_model("gpt2"))
    for _ in range(2):
        with pytest.raises(UserError, match="--packing cannot be used with a gpt2 model") as caught:
            loss.ensure_separates_documents()
        assert "when another document precedes it" in caught.value.why


@pytest.mark.parametrize("shift", [1, 4])
def test_a_mask_that_lands_on_the_wrong_row_is_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        causal_lm,
        "document_caches",
        lambda model, segments: document_caches(model, mx.roll(segments, shift, axis=0)),
    )
    with pytest.raises(UserError, match="--packing"):
        CausalLoss(make_model("llama")).ensure_separates_documents()


def test_a_model_that_takes_no_mask_is_refused() -> None:
    """mlx-lm's Gemma 2 groups its heads in a dimension of their own, which a mask of four dimensions does not fit."""
    with pytest.raises(UserError, match="a gemma2 model on MLX") as caught:
        CausalLoss(make_model("gemma2")).ensure_separates_documents()
    assert "does not accept a document mask" in caught.value.why


def test_the_scale_and_what_counts_multiply_the_loss() -> None:
    model, feed = make_model("llama"), make_feed()
    loss = CausalLoss(model)
    plain_loss = float(loss(feed)[0])
    scaled, found = gradients(model, lambda weights: loss.scaled(feed, weights, mx.array(4.0))[0])
    assert scaled == pytest.approx(4 * plain_loss, rel=1e-5)
    expected = plain(model, feed)[1]
    check_same((0.0, found), (0.0, {name: 4 * array for name, array in expected.items()}))
    feed["counted"] = feed["counted"] * 0
    assert float(loss(feed)[0]) == 0.0


def test_a_model_that_cannot_be_cut_has_the_same_loss_and_gradients() -> None:
    model, feed = make_model("llama"), make_feed()
    expected = plain(model, feed)
    loss = CausalLoss(model)
    loss._split, loss._head_weights = None, []
    check_same(gradients(model, lambda weights: loss.scaled(feed, weights, ONE)[0]), expected)
    assert float(loss(feed)[0]) == pytest.approx(expected[0], rel=1e-5)
