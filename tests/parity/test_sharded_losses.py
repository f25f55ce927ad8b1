"""Several torch processes equal one: the same losses at every world size, strategy and method. Real processes over gloo."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from safetensors.numpy import load_file
from support import assert_close_after_adam, chat

from crosstune.checkpoint.read import open_checkpoint
from crosstune.config.load import make_config
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.models.tiny import tiny_model
from crosstune.models.weights import read_arrays
from crosstune.runs.pipeline import train

CLOSE = 1e-5
ROWS = 12
QLORA = {"train_type": "qlora", "quantization_backend": "bnb", "group_size": 32}
PACKED = {"packing": True, "context_length": 64}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"train_type": "lora"},
    "qlora": QLORA,
    "hqq": {"train_type": "hqq_lora", "group_size": 36},
    "quanto": {"train_type": "qlora", "quantization_backend": "quanto", "n_bits": 8},
    "dora": {"train_type": "dora"},
    "full": {"train_type": "full"},
    "llama_pro": {"train_type": "llama_pro", "num_new_blocks": 1},
}


def options(folder: Path, *, world: int, name: str, **more: Any) -> dict[str, Any]:
    """Return the options of a run with 12 rows of very different lengths per step, at any world size."""
    return (
        {"backend": "cpu", "model_name": str(folder / "model"), "dataset": str(folder / "rows.jsonl")}
        | {"output_dir": str(folder), "precision": "fp32", "batch_size": 1}
        | {"gradient_accumulation_steps": ROWS // world, "world_size": world, "lr": 1e-3}
        | {"max_steps": 3, "skip_eval": True, "save_model": False, "save_minutes": 0, "name": name}
        | more
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model none of whose dimensions is divisible by 2, 3 and 4, and its data."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny_model(
        folder / "model", hidden=36, intermediate=70, num_heads=3, num_kv_heads=1, num_layers=3, vocab=507
    )
    rows = [chat(f"{a} + {b}?", "is " * (a % 5) + str(a + b)) for a in range(12) for b in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def losses(folder: Path) -> list[float]:
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def check_runs(
    folder: Path,
    runs: Mapping[str, Mapping[str, Any]],
    *,
    worlds: Mapping[int, int],
    steps: int = 3,
    hook: str = "",
) -> None:
    """Train each run in one process without FSDP2 and in each world (size -> processes per host), and compare."""
    for name, more in runs.items():
        train(make_config(**options(folder, world=1, name=f"{name}-plain", max_steps=steps, **more)))
    run_ranks(
        [
            {
                "world": world,
                "host": host,
                "runs": [
                    options(folder, world=world, name=f"{name}-{world}", max_steps=steps, **more)
                    for name, more in runs.items()
                ],
            }
            for world, host in worlds.items()
        ],
        hook=hook,
    )
    for name in runs:
        expected = losses(folder / f"{name}-plain")
        assert len(expected) == steps
        for world in worlds:
            found = losses(folder / f"{name}-{world}")
            if world == 1:
                assert found == expected, name
            np.testing.assert_allclose(found, expected, rtol=CLOSE, err_msg=f"{name} at world {world}")


@pytest.mark.slow
def test_three_processes_are_one(folder: Path) -> None:
    """The quick part: uneven shards, a quantized base, replicas, offloading and a rank with fewer micro-batches."""
    runs = {
        "qlora": QLORA | PACKED | {"neftune_alpha": 5},
        "full": {"train_type": "full", "use_cpu_offload": True, "no_sync": True, "rows_per_step": 7},
        "ddp": {"train_type": "full", "sharding_strategy": "ddp", "rows_per_step": 7},
        "lion": {"train_type": "full", "optimizer": "lion", "lr": 1e-4},
    }
    check_runs(folder, runs, worlds={3: 3}, steps=2)


@pytest.mark.slow
def test_packed_bits_survive_an_fsdp_without_integers(folder: Path) -> None:
    """FSDP2 of torch 2.11 refuses integer parameters: their bits are sharded as floats."""
    hook = (
        "import crosstune.torch_engine.sharding.shard as module\nmodule.shards_integers = lambda mesh: False"
    )
    runs = {f"{name}-floats": METHODS[name] for name in ("qlora", "quanto")}
    check_runs(folder, runs, worlds={2: 2}, steps=2, hook=hook)


def test_a_scalar_head_with_adapters(folder: Path) -> None:
    """The head is trained in full, the other layers by adapters; the result is a merged model."""
    data = folder / "judged"
    data.mkdir()
    for split, count in (("train", 48), ("val", 4), ("test", 4)):
        rows = [
            {"id": f"{split}{n}", "task": f"{split}: {n}", "answer": "one " * (n % 7 + 1), "score": n % 11}
            for n in range(count)
        ]
        (data / f"judge_{split}.json").write_text(json.dumps(rows))
    asked = {"recipe": "judge", "head": "scalar", "train_type": "lora", "dataset": str(data)}
    check_runs(folder, {"scalar": asked | {"save_model": True, "lora_dropout": 0.0}}, worlds={2: 2}, steps=2)
    wanted, found = (load_file(folder / f"scalar-{w}" / "model" / "model.safetensors") for w in ("plain", 2))
    assert wanted.keys() == found.keys() and "score.weight" in found
    assert_close_after_adam(found, wanted, lr=1e-3, num_steps=2)
    configs = [read_json(folder / f"scalar-{w}" / "model" / "config.json") for w in ("plain", 2)]
    assert configs[0] == configs[1]


@pytest.mark.slow
def test_every_method(folder: Path) -> None:
    """Packed rows: `test_three_processes_are_one`; four processes: `test_every_strategy`."""
    runs = {f"each-{name}": method for name, method in METHODS.items()}
    check_runs(folder, runs, worlds={1: 1, 3: 3}, steps=2)


@pytest.mark.slow
def test_every_strategy(folder: Path) -> None:
    """Two hosts of two processes each; the hybrid strategies shard within one."""
    names = ["full_shard", "shard_grad_op", "hybrid_full_shard", "hybrid_shard_grad_op", "ddp", "no_shard"]
    runs = {f"by-{name}": {"train_type": "full", "sharding_strategy": name} for name in names}
    runs |= {f"q-{name}": QLORA | {"sharding_strategy": name} for name in names[1:5]}
    checkpointing = {"train_type": "full", "use_gradient_checkpointing": True}
    runs |= {"recomputed": checkpointing, "once": checkpointing | {"no_sync": True}}
    check_runs(folder, runs, worlds={4: 2}, steps=2)


SAVED = {"max_steps": 4, "save_steps": 2, "keep_last_n": 5, "save_model": True, "rows_per_step": 8}
IN_PARTS = "import crosstune.torch_engine.session.session as session; session.LARGE_STATE_BYTES = 0"
EVALUATED = {"skip_eval": False, "eval_samples": 5, "num_samples": 2, "max_new_tokens": 4}


@pytest.mark.slow
def test_another_number_of_processes_continues(folder: Path) -> None:
    """Save at 2 with evaluation and generation, resume at 1 and 3: 3 does not divide the 8 rows per step. The state is
    written in parts, like a large one."""
    check_resumed(folder, "lora", SAVED | EVALUATED | {"train_type": "lora"}, worlds=(3,), hook=IN_PARTS)
    files = {path.name for path in (folder / "lora-2" / "checkpoints" / "step-00000002").iterdir()}
    assert {"weights-00001-of-00002.safetensors", "moments-00002-of-00002.safetensors"} <= files
    assert "weights.safetensors" not in files


@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_full_model_continues_everywhere(in_parts: bool, folder: Path) -> None:
    name = "parts" if in_parts else "all"
    hook = IN_PARTS if in_parts else ""
    more = SAVED | EVALUATED | {"train_type": "full"}
    check_resumed(folder, name, more, worlds=(3,) if in_parts else (1, 4), hook=hook)
    pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    on = resumed(folder, name, more, world=1)
    train(make_config(**on | {"backend": "mlx", "name": f"{name}-mlx"}))
    np.testing.assert_allclose(losses(folder / f"{name}-mlx"), losses(folder / f"{name}-plain"), rtol=1e-4)


def resumed(folder: Path, name: str, more: Mapping[str, Any], *, world: int) -> dict[str, Any]:
    middle = folder / f"{name}-2" / "checkpoints" / "step-00000002"
    asked = options(folder, world=world, name=f"{name}-on-{world}", **more) | {"resume": str(middle)}
    del asked["gradient_accumulation_steps"], asked["rows_per_step"]
    return asked


def check_resumed(
    folder: Path, name: str, more: Mapping[str, Any], *, worlds: tuple[int, ...], hook: str = ""
) -> None:
    train(make_config(**options(folder, world=1, name=f"{name}-plain", **more)))
    jobs = [{"world": 2, "runs": [options(folder, world=2, name=f"{name}-2", **more)]}]
    jobs += [{"world": world, "runs": [resumed(folder, name, more, world=world)]} for world in worlds]
    run_ranks(jobs, hook=hook)
    train(make_config(**resumed(folder, name, more, world=1) | {"name": f"{name}-on-plain"}))
    expected, summary = losses(folder / f"{name}-plain"), read_json(folder / f"{name}-plain" / "summary.json")
    state = newest(folder / f"{name}-plain")
    for run in (f"{name}-2", f"{name}-on-plain", *(f"{name}-on-{world}" for world in worlds)):
        np.testing.assert_allclose(losses(folder / run), expected, rtol=CLOSE, err_msg=run)
        found = read_json(folder / run / "summary.json")
        assert found["eval_after"] == pytest.approx(summary["eval_after"], rel=CLOSE), run
        assert Path(found["result"]).is_dir()
        for key, array in newest(folder / run).weights.items():
            assert np.linalg.norm(array - state.weights[key]) <= 1e-4 * np.linalg.norm(state.weights[key])


def newest(folder: Path) -> Any:
    return open_checkpoint((folder / "checkpoints" / "latest").resolve()).load()


def test_adapters_on_some_layers_next_to_whole_modules(folder: Path) -> None:
    """FSDP2 shards trained and frozen weights of one module; the result has the names of a run in one process."""
    asked = {"train_type": "lora", "layers_to_transform": "0,2", "save_model": True}
    asked |= {"modules_to_save": "embed_tokens,lm_head,norm,input_layernorm"}
    check_runs(folder, {"saved": asked}, worlds={2: 2}, steps=2)
    plain, sharded = (
        read_arrays(folder / f"saved-{kind}" / "adapter" / "adapter_model.safetensors")
        for kind in ("plain", "2")
    )
    assert plain.keys() == sharded.keys() and any("embed_tokens" in name for name in plain)
    for name, (_, array) in plain.items():
        np.testing.assert_allclose(sharded[name][1], array, atol=2e-3)
