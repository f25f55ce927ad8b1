"""Compare steps of current model families on one GPU with transformers + PEFT, and peaks of memory with `plan`.

    python benchmarks/families_gpu.py                                # all cases, about four minutes on one H200
    python benchmarks/families_gpu.py --cases qwen3-moe --seconds 6
    python benchmarks/families_gpu.py --smoke                        # the same code with tiny models on the CPU

Cases: a Qwen3-30B-A3B shape over NF4, a gpt-oss-20b shape over MXFP4, a Qwen3.5-4B shape in bf16, and shapes of Granite 4,
Nemotron-H, Falcon-H1 and LFM2, each with adapters of rank 16 on attention and MLPs or experts. Each contender is a process of its own. Weights are random and made on the device:
the folder's weight file is a sparse file that only its header is read of. All experts of a layer are copies of one. The
peer's experts stay in bf16, since bitsandbytes quantizes no stacks, and Unsloth's line shows why it did not run.
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
from pathlib import Path
from typing import Any

import numpy as np
from family_cases import CASES, COMMON, SMOKE, Case
from lora_runs import Results, print_result, start_worker

GIB = 2**30
RANK = 16


def main() -> int:
    asked = read_arguments()
    if asked.worker:
        return work(json.loads(asked.worker))
    results, started = Results(Path(asked.out)), time.monotonic()
    good = True
    with tempfile.TemporaryDirectory(prefix="families-") as home:
        for name in asked.cases.split(","):
            case = CASES[name]
            folder = write_folder(Path(home) / name, name, smoke=asked.smoke, num_layers=asked.layers)
            found: dict[str, dict[str, Any]] = {}
            for contender in case.contenders:
                if time.monotonic() - started > asked.budget:
                    print(f"{name} {contender}: not started, time is up", flush=True)
                    continue
                job = {"case": name, "contender": contender, "folder": str(folder), "smoke": asked.smoke}
                job |= {"seconds": asked.seconds, "profile": asked.profile and contender == "ours"}
                found[contender] = start_worker(Path(__file__).resolve(), job, timeout=asked.timeout)
                results.add(name, found[contender] | {"contender": contender})
                print(f"{name} {contender}: {describe(found[contender])}", flush=True)
                if launches := found[contender].get("launches"):
                    print("    {kernels} kernels, {busy_ms:.1f} of {wall_ms:.1f} ms busy".format(**launches))
                    for busy_ms, count, kernel in launches["busiest"][:20]:
                        print(f"    {busy_ms:8.2f} ms {count:6d}  {kernel}", flush=True)
            good &= "tok_s" in found.get("ours", {})
            if all("tok_s" in found.get(one, {}) for one in ("ours", "peft")):
                ratio = found["ours"]["tok_s"] / found["peft"]["tok_s"]
                share = found["ours"]["peak_gib"] / found["peft"]["peak_gib"]
                print(f"{name}: {ratio:.2f}x transformers + PEFT in {share:.2f} of its memory", flush=True)
    return 0 if good else 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=6.0, help="time of the timed steps of a contender")
    parser.add_argument("--timeout", type=float, default=90.0, help="limit of one contender's process")
    parser.add_argument(
        "--budget", type=float, default=240.0, help="start no contender after this many seconds"
    )
    parser.add_argument("--out", default="families_gpu.json")
    parser.add_argument(
        "--profile", action="store_true", help="print the longest kernels of crosstune's step"
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the model, the same for each contender")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def describe(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"did not run: {row['error'].splitlines()[-1] if row['error'] else 'no output'}"
    text = (
        f"{row['tok_s']:,.0f} tok/s, step {row['step_ms']:.0f} ms, peak {row['peak_gib']:.2f} GiB, weights "
        f"{row['weights_gib']:.2f} GiB, loss {row['first_loss']:.3f} -> {row['last_loss']:.3f}, ready in {row['load_s']:.0f} s"
    )
    if "plan_gib" in row:
        text += (
            f"; plan {row['plan_gib']:.2f} GiB ({row['plan_gib'] / row['peak_gib'] - 1:+.1%}) {row['parts']}"
        )
    return text


def work(job: dict[str, Any]) -> int:
    import torch
    from lora_contenders import count_launches

    case, device = CASES[job["case"]], "cpu" if job["smoke"] else "cuda"
    rows, context = (2, 32) if job["smoke"] else (case.rows, case.context)
    vocab = json.loads((Path(job["folder"]) / "config.json").read_text())["vocab_size"]
    ids = np.random.default_rng(1).integers(3, vocab, (rows, context)).astype(np.int32)
    started = time.perf_counter()
    opened = {"ours": open_ours, "peft": open_peft, "unsloth": open_unsloth}[job["contender"]]
    step, facts = opened(job, case, ids, device)
    load_s = time.perf_counter() - started
    gc.collect()
    weights = torch.cuda.memory_allocated() / GIB if device == "cuda" else 0.0
    first = step()
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, loss, until = [], first, time.perf_counter() + job["seconds"]
    while len(times) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        loss = step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    median = sorted(times)[len(times) // 2]
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 1.0
    print_result(
        {"tok_s": ids.size / median, "step_ms": 1e3 * median, "peak_gib": peak, "weights_gib": weights,
         "first_loss": first, "last_loss": loss, "load_s": load_s, "steps": len(times),
         "launches": count_launches(step, device) if job["profile"] else None, **facts}
    )  # fmt: skip
    return 0


def write_folder(folder: Path, name: str, *, smoke: bool, num_layers: int | None) -> Path:
    """Write the configuration, a tokenizer, and a weight file that is a header before a hole."""
    import transformers

    from crosstune.models.tiny import tiny_model
    from crosstune.torch_engine.loading.load import empty_model

    case = CASES[name]
    tiny_model(folder)
    sizes = SMOKE[name] if smoke else case.sizes | ({"num_hidden_layers": num_layers} if num_layers else {})
    config = getattr(transformers, case.kind)(**COMMON | sizes, dtype="bfloat16")
    config.architectures = [f"{case.kind.removesuffix('Config').removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(folder)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    state = {n: t for n, t in empty_model(folder).state_dict().items() if n not in tied}
    entries, end = dict[str, Any](), 0

    def add(tensor: str, shape: list[int], dtype: str, width: int) -> None:
        nonlocal end
        start, end = end, end + width * int(np.prod(shape))
        entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}

    for tensor, values in sorted(state.items()):
        shape = list(values.shape)
        if name == "gpt-oss" and tensor.endswith(("gate_up_proj", "down_proj")):  # experts x inputs x outputs
            groups = [shape[0], shape[2], shape[1] // 32]
            add(f"{tensor}_blocks", [*groups, 16], "U8", 1)
            add(f"{tensor}_scales", groups, "U8", 1)
        else:
            add(tensor, shape, "BF16", 2)
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    if name == "gpt-oss":
        written = json.loads((folder / "config.json").read_text())
        written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        (folder / "config.json").write_text(json.dumps(written))
    return folder


def open_ours(
    job: dict[str, Any], case: Case, ids: Any, device: str
) -> tuple[Callable[[], float], dict[str, Any]]:
    """Open crosstune's session over random weights, and step it as a run does."""
    import torch

    from crosstune.config.load import make_config
    from crosstune.data.batches.token_batch import TokenBatch
    from crosstune.loop.step import LossScale, prepare_window, take_step
    from crosstune.planner.gather import make_plan
    from crosstune.torch_engine.kernels.chunked_scans import use_chunked_scans
    from crosstune.torch_engine.loading.load import (
        attention_name,
        empty_model,
        forms_to_quantize,
        read_config,
    )
    from crosstune.torch_engine.loading.prequantized import read_prequantized
    from crosstune.torch_engine.open import open_session
    from crosstune.torch_engine.quantized import StoredWeight, quantize_weight
    from crosstune.torch_engine.tasks.causal_lm import CausalLM

    folder = Path(job["folder"])
    plan = make_plan(
        make_config(
            backend=device,
            precision="fp32" if job["smoke"] else "bf16",
            model_name=str(folder),
            lora_rank=RANK,
            batch_size=len(ids),
            context_length=ids.shape[1],
            **case.options,
        )
    )

    class RandomLM(CausalLM):
        """A model with random weights, drawn on the device."""

        def build(self, context: Any) -> Any:
            self.context, spec = context, plan.quant_spec
            config, dtype = read_config(folder), context.precision.weights
            model = empty_model(folder, config, dtype=dtype, attn_implementation=attention_name(plan, config))
            torch.manual_seed(0)
            stored = read_prequantized(folder)
            if stored is not None:
                forms = stored.forms(model)
            else:
                forms = {} if spec is None else forms_to_quantize(model, spec)
            for name, parameter in list(model.named_parameters()):
                parent, _, child = name.rpartition(".")
                if name not in forms:
                    module = model.get_submodule(parent)
                    drawn = torch.randn(parameter.shape, dtype=dtype, device=device).mul_(0.02)
                    if name.endswith(("norm.weight", "layernorm.weight")):
                        drawn = torch.ones_like(drawn)
                    module._parameters[child] = torch.nn.Parameter(drawn, requires_grad=False)
                    continue
                form = forms[name]
                if stored is not None:
                    rows, columns = form.shape
                    parts = {
                        "packed": torch.randint(
                            256, (rows, columns // 32, 16), dtype=torch.uint8, device=device
                        ),
                        "scales": torch.full((rows, columns // 32), 120, dtype=torch.uint8, device=device),
                    }
                    weight = StoredWeight("mxfp4", parts, {"shape": [rows, columns]})
                else:
                    drawn = torch.randn(form.shape, device=device).mul_(0.02).to(dtype)
                    weight = quantize_weight(drawn, spec, dtype)
                form.put(model, [weight] * len(form.matrices))
            model.tie_weights()
            use_chunked_scans(model)
            return model.to(device)

    session: Any = open_session(plan, model_folder=folder, task=RandomLM())
    batch = TokenBatch(
        input_ids=ids,
        targets=np.roll(ids, -1, axis=1),
        segments=np.ones_like(ids),
        positions=np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape).copy(),
    )
    window, scale = prepare_window(session, [batch]), LossScale(enabled=False)
    assert plan.fitted is not None
    parts = {
        name: round(size / GIB, 2) for name, size in plan.fitted.parts.to_json().items() if size > GIB / 100
    }
    total = plan.fitted.parts.total - plan.fitted.parts.overhead
    return lambda: float(take_step(session, window, lr=1e-4, scale=scale).loss), {
        "plan_gib": total / GIB,
        "parts": parts,
        "notes": session.notes,
    }


def open_peft(
    job: dict[str, Any], case: Case, ids: Any, device: str
) -> tuple[Callable[[], float], dict[str, Any]]:
    """Open a random model with transformers and PEFT; its linear layers in NF4 if the case is quantized."""
    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.float32 if job["smoke"] else torch.bfloat16
    config = AutoConfig.from_pretrained(job["folder"])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if case.options["train_type"] == "qlora":
        for name, module in list(model.named_modules()):
            if type(module) is torch.nn.Linear and name != "lm_head":
                size = (module.in_features, module.out_features)
                packed = bnb.nn.Linear4bit(
                    *size, bias=module.bias is not None, compute_dtype=dtype, quant_type="nf4", device="meta"
                )
                packed.weight = bnb.nn.Params4bit(
                    module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                ).to(device)
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, packed)
        model.is_loaded_in_4bit = True
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(
        model,
        LoraConfig(
            r=RANK,
            lora_alpha=32,
            target_modules=case.targets,
            target_parameters=case.parameters,
            task_type="CAUSAL_LM",
        ),
    ).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")
    given = torch.from_numpy(ids).long().to(device)

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(input_ids=given, labels=given, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step, {"trained": sum(parameter.numel() for parameter in trained)}


def open_unsloth(
    job: dict[str, Any], case: Case, ids: Any, device: str
) -> tuple[Callable[[], float], dict[str, Any]]:
    from unsloth import FastLanguageModel  # without the package this is the line that is shown

    raise RuntimeError(f"{FastLanguageModel} is installed, but its run over random weights is not written")


if __name__ == "__main__":
    sys.exit(main())
