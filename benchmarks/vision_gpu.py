"""Compare steps on rows with pictures with transformers + PEFT on one GPU, and peaks of memory with `plan`.

    python benchmarks/vision_gpu.py                    # both cases, about a minute on one H200
    python benchmarks/vision_gpu.py --cases gemma3 --seconds 4
    python benchmarks/vision_gpu.py --smoke            # the same code with tiny models on the CPU

Cases: a Qwen2.5-VL-3B shape with adapters of rank 16 in bf16, and a Gemma-3-4B shape with recomputation. Tower and projector
are frozen. Weights are random and made on the device; the folder's weight file is a sparse file, of which only the header is
read. Pictures of random colours are drawn here. Both sides get the same tensors, and run one after the other in a process.
"""

from __future__ import annotations

import argparse
import gc
import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

GIB = 2**30
RANK = 16
TARGETS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"


@dataclass(frozen=True, kw_only=True)
class Case:
    text: dict[str, Any]
    tower: dict[str, Any]
    processor: dict[str, Any]
    top: dict[str, Any] = field(default_factory=dict)
    rows: int = 4
    pictures: int = 1
    """Of a row."""
    size: tuple[int, int] = (896, 672)
    answer_words: int = 60
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "qwen2_5_vl": Case(
        text={
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "tie_word_embeddings": True,
        },
        tower={
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 2048,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        processor={"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 1003520}},
        top={"tie_word_embeddings": True},
    ),
    "gemma3": Case(
        text={
            "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
            "max_position_embeddings": 32768,
        },
        tower={
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 896, "patch_size": 14,
        },
        processor={"size": {"height": 896, "width": 896}},
        top={"mm_tokens_per_image": 256},
        pictures=2,
        options={"use_gradient_checkpointing": True},
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=4.0, help="time of the timed steps of each side")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--out", default="vision_gpu.json")
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    for name in asked.cases.split(","):
        with tempfile.TemporaryDirectory(prefix="vision-") as home:
            results[name] = compare(Path(home), name, seconds=asked.seconds, smoke=asked.smoke)
        Path(asked.out).write_text(json.dumps(results, indent=1))
    return 0


def compare(home: Path, name: str, *, seconds: float, smoke: bool) -> dict[str, Any]:
    """Measure both sides of a case, and print a line for each."""
    case, device = CASES[name], "cpu" if smoke else "cuda"
    if smoke:
        case = replace(case, rows=2, size=(40, 30), answer_words=5)
    folder, data = write_model(home / "model", name, case, smoke=smoke), write_rows(home, case)
    session, window, batch, facts = open_ours(folder, data, case, device)
    ours = measure(step_of(session, window), batch, device, seconds) | facts
    arrays = session.task.arrays(batch)
    del session, window
    release(device)
    peft = measure(open_peft(folder, case, arrays, batch, device), batch, device, seconds)
    release(device)
    for side, row in (("ours", ours), ("transformers + PEFT", peft)):
        print(
            f"{name} {side}: {row['tok_s']:,.0f} tok/s, step {row['step_ms']:.0f} ms, peak {row['peak_gib']:.2f} GiB, "
            f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
        )
    print(
        f"{name}: {ours['tok_s'] / peft['tok_s']:.2f}x transformers + PEFT in "
        f"{ours['peak_gib'] / peft['peak_gib']:.2f} of its memory; {batch.num_tokens} tokens, {facts['patches']} patches a "
        f"row; plan {facts['plan_gib']:.2f} GiB ({facts['plan_gib'] / ours['peak_gib'] - 1:+.1%}) {facts['parts']}; "
        f"pixels of a step ready in {1e3 * facts['prepare_s']:.0f} ms",
        flush=True,
    )
    return {"ours": ours, "peft": peft}


def measure(step: Callable[[], float], batch: Any, device: str, seconds: float) -> dict[str, Any]:
    import torch

    first = step()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times, last, until = list[float](), first, time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        last = step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    median = sorted(times)[len(times) // 2]
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 1.0
    return {
        "tok_s": batch.num_tokens / median,
        "step_ms": 1e3 * median,
        "peak_gib": peak,
        "first_loss": first,
        "last_loss": last,
        "steps": len(times),
    }


def release(device: str) -> None:
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def write_model(folder: Path, name: str, case: Case, *, smoke: bool) -> Path:
    """Write a folder with the case's sizes, and a weight file that is a header before a hole."""
    from transformers import AutoConfig
    from vision_models import write_folder

    from crosstune.torch_engine.loading.load import empty_model

    folder.mkdir()
    write_folder(folder, name)
    if not smoke:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        ids = {key: value for key, value in config.items() if key.endswith(("token_id", "token_index"))}
        config = AutoConfig.for_model(
            name, text_config=case.text, vision_config=case.tower, **ids, **case.top
        )
        config.save_pretrained(folder)
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | case.processor))
    model = empty_model(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    entries, end = dict[str, Any](), 0
    for tensor, values in sorted(model.state_dict().items()):
        if tensor not in tied:
            start, end = end, end + 2 * values.numel()
            entries[tensor] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return folder


def write_rows(home: Path, case: Case) -> Path:
    from vision_models import COLOURS, draw

    names, lines = list(COLOURS), []
    for row in range(case.rows + 2):
        parts: list[dict[str, Any]] = [
            {"type": "image", "path": draw(home, f"{row}-{one}.png", names[(row + one) % 4], size=case.size)}
            for one in range(case.pictures)
        ]
        parts.append({"type": "text", "text": "What colour is this?"})
        answer = {"role": "assistant", "content": "It is red, green or blue. " * case.answer_words}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, answer]}))
    path = home / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def open_ours(folder: Path, data: Path, case: Case, device: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Open a session over random weights; return it with a step's window, its batch, and the predicted memory."""
    import torch

    from crosstune.config.load import make_config
    from crosstune.config.resolve.resolve import resolve
    from crosstune.loop.step import prepare_window
    from crosstune.planner.gather import gather
    from crosstune.recipes.sft import SftRecipe
    from crosstune.torch_engine.loading.load import attention_name, empty_model, read_config
    from crosstune.torch_engine.open import open_session
    from crosstune.torch_engine.tasks.causal_lm import CausalLM
    from crosstune.torch_engine.tasks.vision_lm import VisionLM

    config = make_config(
        backend=device,
        precision="fp32" if device == "cpu" else "bf16",
        train_type="lora",
        model_name=str(folder),
        dataset=str(data),
        lora_rank=RANK,
        batch_size=case.rows,
        context_length=4096,
        skip_eval=True,
        **case.options,
    )
    facts = gather(config)
    recipe = SftRecipe(resolve(config, facts).config, model_folder=folder)
    patches = recipe.most_patches()
    plan = resolve(
        config,
        replace(
            facts,
            longest_row=recipe.longest_row(),
            longest_target=recipe.longest_target(),
            patches=patches,
        ),
    )
    recipe.configure(plan.config)

    class RandomLM(VisionLM):
        """A model with random weights, drawn on the device. The pixels are read by the folder's processor."""

        def load(self, context: Any) -> Any:
            own, dtype = read_config(folder), context.precision.weights
            model = empty_model(folder, own, dtype=dtype, attn_implementation=attention_name(plan, own))
            draw_weights(model, dtype, device)
            return model.to(device)

        def build(self, context: Any) -> Any:
            import crosstune.torch_engine.tasks.causal_lm as module

            given = module.load_model
            module.load_model = lambda *_, **__: (self.load(context), None)
            try:
                return super().build(context)
            finally:
                module.load_model = given

    session: Any = open_session(plan, model_folder=folder, task=RandomLM())
    assert isinstance(session.task, CausalLM)
    [batch] = recipe.micro_batches(0)
    began = time.perf_counter()
    window = prepare_window(session, [batch])
    prepare_s = time.perf_counter() - began
    assert plan.fitted is not None
    parts = plan.fitted.parts.to_json()
    if device == "cuda":
        torch.cuda.synchronize()
    return (
        session,
        window,
        batch,
        {
            "plan_gib": (plan.fitted.parts.total - plan.fitted.parts.overhead) / GIB,
            "parts": {name: round(size / GIB, 2) for name, size in parts.items() if size > GIB / 100},
            "patches": patches,
            "prepare_s": prepare_s,
        },
    )


def draw_weights(model: Any, dtype: Any, device: str) -> None:
    """Give a model without memory random weights on the device."""
    import torch

    torch.manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        parent, _, child = name.rpartition(".")
        drawn = torch.randn(parameter.shape, dtype=dtype, device=device).mul_(0.02)
        if "norm" in name and child == "weight":
            drawn.fill_(1.0)
        model.get_submodule(parent)._parameters[child] = torch.nn.Parameter(drawn, requires_grad=False)
    model.tie_weights()


def step_of(session: Any, window: Any) -> Callable[[], float]:
    from crosstune.loop.step import LossScale, take_step

    scale = LossScale(enabled=False)
    return lambda: float(take_step(session, window, lr=1e-4, scale=scale).loss)


def open_peft(folder: Path, case: Case, arrays: Any, batch: Any, device: str) -> Callable[[], float]:
    """Open the same random model with transformers and PEFT, with the tensors that our side gets."""
    import torch
    from peft import LoraConfig, get_peft_model

    from crosstune.torch_engine.loading.load import empty_model, read_config

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = empty_model(folder, read_config(folder), dtype=dtype)
    draw_weights(model, dtype, device)
    model = model.to(device)
    if case.options.get("use_gradient_checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")
    names = ("pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids")
    given = {
        name: torch.from_numpy(arrays[name]).to(device) for name in ("input_ids", *names) if name in arrays
    }
    targets = torch.from_numpy(batch.targets).long().to(device)
    labels = torch.full_like(targets, -100)
    labels[:, 1:] = targets[:, :-1]

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**given, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


if __name__ == "__main__":
    sys.exit(main())
