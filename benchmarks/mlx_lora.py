"""Compare crosstune's MLX engine with mlx-lm's LoRA trainer: same model, same examples, same rank, in one run.

    python benchmarks/mlx_lora.py                     a Llama shape of 1.2B random weights, on MLX's default device
    python benchmarks/mlx_lora.py --small             a few million parameters, to see that it runs

Two loads: rows that are full (every row has --context_length tokens), and short examples, which mlx-lm pads to the longest
of a batch and crosstune packs into full rows. Each side runs twice, in turn, in separate processes; the faster run counts.
Padding is not counted as tokens. The adapters of both have rank 16 on all seven linear layers, over a bf16 base; both
update with AdamW. crosstune keeps adapters and moments in fp32, mlx-lm in fp32 too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RANK, ALPHA = 16, 32
LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
WARM_STEPS = 4
H200_BF16_FLOPS = 790e12


def make_model(folder: Path, *, small: bool) -> dict[str, int]:
    """A Llama folder of random bf16 weights, written with MLX alone."""
    import mlx.core as mx

    shape = {"hidden": 256, "layers": 4, "intermediate": 704, "vocab": 1024, "heads": 8}
    if not small:
        shape = {"hidden": 2048, "layers": 16, "intermediate": 8192, "vocab": 32000, "heads": 16}
    hidden, intermediate, vocab = shape["hidden"], shape["intermediate"], shape["vocab"]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["heads"],
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(0)

    def matrix(rows: int, columns: int) -> mx.array:
        return (0.02 * mx.random.normal((rows, columns))).astype(mx.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden), "lm_head.weight": matrix(vocab, hidden)}
    weights["model.norm.weight"] = mx.ones(hidden, dtype=mx.bfloat16)
    for layer in range(shape["layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = mx.ones(hidden, dtype=mx.bfloat16)
        for name in LINEARS:
            rows = intermediate if name in ("mlp.gate_proj", "mlp.up_proj") else hidden
            columns = intermediate if name == "mlp.down_proj" else hidden
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    per_layer = 4 * hidden * hidden + 3 * hidden * intermediate
    return shape | {"frozen": shape["layers"] * per_layer + vocab * hidden}


def make_examples(load: str, *, vocab: int, length: int, count: int) -> list[list[int]]:
    draw = np.random.default_rng(1)
    if load == "full":
        lengths = np.full(count, length)
    else:  # short answers, a few long ones: the shape of instruction data
        lengths = np.clip(draw.lognormal(np.log(length / 16), 0.8, count), 8, length // 2).astype(int)
    return [draw.integers(3, vocab, int(n)).tolist() for n in lengths]


def run_mlx_lm(folder: Path, own: argparse.Namespace, examples: list[list[int]]) -> dict[str, float]:
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, lazy=False)
    model.freeze()
    settings = {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0, "keys": LINEARS}
    linear_to_lora_layers(model, len(model.layers), settings)
    reports: list[dict[str, float]] = []

    class Keep(TrainingCallback):  # type: ignore[misc]
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            reports.append(dict(train_info))

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArgs(
            batch_size=own.batch_size,
            iters=own.steps,
            steps_per_report=own.steps - own.steps // 2,
            steps_per_eval=10**9,
            steps_per_save=10**9,
            # it cuts a row of the full length by one token, unless it may be one longer
            max_seq_length=own.context_length + 1,
            adapter_file=str(Path(scratch) / "adapters.safetensors"),
        )
        data = [(tokens, 0) for tokens in examples]
        train(model, optim.AdamW(learning_rate=1e-4), data, args=arguments, training_callback=Keep())
    return {
        "tokens_per_s": reports[-1]["tokens_per_second"],
        "peak_gib": mx.get_peak_memory() / 2**30,
        "loss": reports[-1]["train_loss"],
    }


def run_crosstune(folder: Path, own: argparse.Namespace, examples: list[list[int]]) -> dict[str, float]:
    from crosstune.config.load import make_config
    from crosstune.data.batches.packing import PackedOrder
    from crosstune.data.batches.token_batch import Example, pack_rows, split_rows
    from crosstune.loop.step import prepare_window, take_step
    from crosstune.mlx_engine.open import open_session
    from crosstune.planner.gather import make_plan

    asked = {"model_name": str(folder), "backend": "mlx", "precision": "bf16", "lora_rank": RANK}
    plan = make_plan(
        make_config(**asked, lora_alpha=ALPHA, batch_size=own.batch_size, packing=own.load == "short")
    )
    session = open_session(plan, model_folder=folder)
    rows = [
        Example(tokens=np.array(tokens, np.int32), supervised=np.ones(len(tokens), bool), index=number)
        for number, tokens in enumerate(examples)
    ]
    if own.load == "short":
        lengths = np.array([len(tokens) for tokens in examples])
        order = PackedOrder(lengths, capacity=own.context_length, seed=0)
        packed = [[rows[int(d)] for d in row] for row in order.rows(0, order.num_rows(1))]
        starts = range(0, len(packed), own.batch_size)
        batches = [pack_rows(packed[start : start + own.batch_size], pad_id=0) for start in starts]
    else:
        batches = list(split_rows(rows, batch_size=own.batch_size, pad_id=0))
    tokens, seconds, loss = 0, 0.0, 0.0
    for step in range(own.steps):
        started = time.perf_counter()
        result = take_step(session, prepare_window(session, [batches[step % len(batches)]]), lr=1e-4)
        if step >= own.steps // 2:
            seconds += time.perf_counter() - started
            tokens += result.num_tokens
            loss = result.loss
    return {
        "tokens_per_s": tokens / seconds,
        "peak_gib": session.memory().peak_bytes / 2**30,
        "loss": loss,
    }


SIDES = {"mlx-lm": run_mlx_lm, "crosstune": run_crosstune}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--context_length", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--load", choices=("full", "short", "both"), default="both")
    parser.add_argument("--side", choices=tuple(SIDES), help="one side alone, for the process it runs in")
    parser.add_argument("--model", type=Path)
    own = parser.parse_args()
    if own.small:
        own.context_length = min(own.context_length, 128)
    if own.side:
        vocab = json.loads((own.model / "config.json").read_text())["vocab_size"]
        count = own.batch_size * 8 if own.load == "full" else own.batch_size * 160
        examples = make_examples(own.load, vocab=vocab, length=own.context_length, count=count)
        print(json.dumps(SIDES[own.side](own.model, own, examples)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        shape = make_model(Path(scratch) / "model", small=own.small)
        loads = ("full", "short") if own.load == "both" else (own.load,)
        for load in loads:
            compare(Path(scratch) / "model", own, load, shape)


def compare(folder: Path, own: argparse.Namespace, load: str, shape: dict[str, int]) -> None:
    best: dict[str, dict[str, float]] = {}
    for _ in range(own.repeat):
        for side in SIDES:
            words = ["--side", side, "--model", str(folder), "--load", load, "--steps", str(own.steps)]
            words += ["--batch_size", str(own.batch_size), "--context_length", str(own.context_length)]
            done = subprocess.run(
                [sys.executable, __file__, *words], capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            if side not in best or found["tokens_per_s"] > best[side]["tokens_per_s"]:
                best[side] = found
    # Frozen weights need a forward matmul and the gradient of its input: 4 operations per weight and token.
    limit = H200_BF16_FLOPS / (4 * shape["frozen"])
    print(f"\n{load} rows of {own.context_length} tokens, batch {own.batch_size}\n")
    print("| | tok/s | peak GiB | of the bf16 limit of an H200 |\n|---|---|---|---|")
    for side, found in best.items():
        share = f"{found['tokens_per_s'] / limit:.0%}" if not own.small else "-"
        print(f"| {side} | {found['tokens_per_s']:,.0f} | {found['peak_gib']:.1f} | {share} |")
    ours, theirs = best["crosstune"], best["mlx-lm"]
    ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
    print(
        f"\nratio {ratio:.2f} in tokens/s, {ours['peak_gib'] / theirs['peak_gib']:.2f} in memory", flush=True
    )


if __name__ == "__main__":
    main()
