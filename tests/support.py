"""Small ways to use sessions, and facts that several tiers of tests share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.core.protocols import Backward, Batch, Session
from crosstune.data.batches.token_batch import TokenBatch, split_rows
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.loop.step import LossScale, needs_loss_scale, prepare_window, take_step
from crosstune.models.weights import read_arrays

FRAMEWORKS = frozenset({"torch", "transformers", "peft", "accelerate", "bitsandbytes", "mlx", "mlx_lm"})
STORED_FORMS = [
    ("bnb", 4, "nf4"),
    ("bnb", 4, "fp4"),
    ("bnb", 8, "auto"),
    ("hqq", 8, "auto"),
    ("hqq", 4, "auto"),
    ("hqq", 3, "auto"),
    ("hqq", 2, "auto"),
    ("hqq", 1, "auto"),
    ("quanto", 8, "int"),
    ("quanto", 8, "float8"),
    ("quanto", 4, "auto"),
    ("quanto", 2, "auto"),
]
"""Every quantizer, bit width and kind that the torch engine stores weights in."""


def train_step(
    session: Session, window: Sequence[Batch], *, lr: float, scale: LossScale | None = None
) -> Backward:
    """Take one optimizer step as the loop does, on batches that are not prepared yet."""
    if scale is None:
        scale = LossScale(enabled=needs_loss_scale(session.plan.precision))  # type: ignore[attr-defined]
    return take_step(session, prepare_window(session, window), lr=lr, scale=scale)


def assert_close_after_adam(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, lr: float, num_steps: int
) -> None:
    """Compare weights by how far Adam can move them: lr in each step.

    Adam divides a gradient by its own size, so a gradient that is all rounding still moves its weight by lr, either way.
    Single weights may thus differ by one step; on average they differ by little of the whole path.
    """
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        distance = np.abs(np.asarray(found[name], np.float64) - np.asarray(array, np.float64))
        assert distance.max() <= 2 * lr, f"{name}: {distance.max():.1e} of 2 x {lr}"
        assert distance.mean() <= 1e-3 * lr * num_steps, (
            f"{name}: {distance.mean():.1e} of {num_steps} x {lr}"
        )


def assert_same_gradients(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, bound: float = 1e-5
) -> None:
    """Compare gradients by the norm of each: an element that is a small sum of large terms has the rounding of the terms."""
    assert found.keys() == expected.keys() and expected
    for name, array in expected.items():
        wanted = _on_host(array)
        distance = np.linalg.norm(_on_host(found[name]) - wanted)
        assert distance <= bound * np.linalg.norm(wanted), f"{name}: {distance / np.linalg.norm(wanted):.1e}"


def _on_host(array: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array, np.float64)


def find_nonfinite(session: Session, window: Sequence[Batch]) -> str:
    return session.find_nonfinite(prepare_window(session, window))


def short_batches(folder: Path) -> list[TokenBatch]:
    """Return two batches of two short conversations of different lengths, in the tokens of a model folder."""
    tokenizer = Tokenizer.from_folder(folder)
    words = ["red", "green and blue", "a much longer colour", "none"]
    examples = [
        encode_conversation(
            [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word} it is"}],
            tokenizer,
            index=index,
            whole=False,
        )
        for index, word in enumerate(words)
    ]
    return list(split_rows(examples, batch_size=2, pad_id=0))


def tiny_of(family: str, folder: Path, vocab: int) -> Path:
    """A random model of another family with the tiny model's vocabulary."""
    import torch
    import transformers as hf

    config = tiny_config(family, vocab)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # a fresh model has none that are not zero, a trained one has
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    return folder


def tiny_config(family: str, vocab: int) -> Any:
    """The config of a tiny model of a family."""
    import transformers as hf

    shared = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    four = shared | {"num_hidden_layers": 4}
    mamba = {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    delta = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return {
        "llama": lambda: hf.LlamaConfig(**shared, tie_word_embeddings=False),
        "qwen2": lambda: hf.Qwen2Config(**shared),
        "qwen3": lambda: hf.Qwen3Config(**shared, head_dim=16),
        "mistral": lambda: hf.MistralConfig(**shared, sliding_window=16),
        "gemma": lambda: hf.GemmaConfig(**shared, head_dim=16),
        "gemma2": lambda: hf.Gemma2Config(**shared, head_dim=16, sliding_window=16),
        "phi3": lambda: hf.Phi3Config(**shared),
        "phi": lambda: hf.PhiConfig(**shared),
        "opt": lambda: hf.OPTConfig(**shared, ffn_dim=128, word_embed_proj_dim=64),
        "opt_post_norm": lambda: hf.OPTConfig(
            **shared, ffn_dim=128, word_embed_proj_dim=64, do_layer_norm_before=False
        ),
        "starcoder2": lambda: hf.Starcoder2Config(**shared),
        "gpt_neox": lambda: hf.GPTNeoXConfig(**shared, tie_word_embeddings=False),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=vocab,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=256,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        "mixtral": lambda: hf.MixtralConfig(**shared, num_local_experts=4),
        "gpt_oss": lambda: hf.GptOssConfig(**shared, head_dim=16, num_local_experts=4, sliding_window=7),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(
            **shared, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
        ),
        "glm4_moe": lambda: hf.Glm4MoeConfig(
            **shared,
            head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
        "qwen2_moe": lambda: hf.Qwen2MoeConfig(
            **shared,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        "deepseek_v3": lambda: hf.DeepseekV3Config(
            **(shared | {"num_key_value_heads": 4}),
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
        "mamba": lambda: hf.MambaConfig(
            vocab_size=vocab, hidden_size=64, num_hidden_layers=2, state_size=8, pad_token_id=0
        ),
        "qwen3_5": lambda: hf.Qwen3_5TextConfig(
            **four, **delta, head_dim=16, layer_types=["linear_attention"] * 3 + ["full_attention"]
        ),
        "qwen3_next": lambda: hf.Qwen3NextConfig(
            **four, **delta, **experts, head_dim=16, num_experts=4, shared_expert_intermediate_size=32
        ),
        "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
            **shared,
            **mamba,
            layer_types=["mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
        ),
        "nemotron_h": lambda: hf.NemotronHConfig(
            **four,
            **experts,
            layers_block_type=["mamba", "attention", "mamba", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=1,
            chunk_size=16,
            head_dim=16,
            n_routed_experts=4,
            moe_shared_expert_intermediate_size=32,
        ),
        "falcon_h1": lambda: hf.FalconH1Config(**shared, **mamba, mamba_d_ssm=128),
        "lfm2": lambda: hf.Lfm2Config(**shared, layer_types=["conv", "full_attention"], block_ff_dim=96),
        "jamba": lambda: hf.JambaConfig(
            **shared,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            use_mamba_kernels=False,
        ),
    }[family]()


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def tuned_run(home: Path, model: Path, rows: Sequence[dict[str, str]], *, steps: int) -> Path:
    """Train an adapter on rows of prompt and completion, on the CPU."""
    from crosstune.config.load import make_config
    from crosstune.runs.pipeline import train

    data = home / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"model_name": str(model), "dataset": str(data), "output_dir": str(home), "name": "tuned"}
    asked |= {"backend": "cpu", "precision": "fp32", "train_type": "lora", "lr": 5e-3, "skip_eval": True}
    return train(make_config(**asked, max_steps=steps)).folder


def result_arrays(run: Path) -> dict[str, Any]:
    """The arrays of a run's result, in fp32."""
    [file] = [*run.glob("adapter/*.safetensors"), *run.glob("model/*.safetensors")]
    return {name: np.asarray(array, np.float32) for name, (_, array) in read_arrays(file).items()}
