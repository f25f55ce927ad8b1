"""FSDP2 over NCCL on one GPU is the plain training, for a dense and for a quantized model."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crosstune.files.json_files import read_jsonl

TRAIN = """
import json, sys
from crosstune.config.load import make_config
from crosstune.process.ranks import Limits, Ranks
from crosstune.runs.pipeline import train
from crosstune.torch_engine.group import connect
port, sharded, asked = int(sys.argv[1]), sys.argv[2] == "yes", json.loads(sys.argv[3])
ranks = Ranks(engine="torch", master_addr="127.0.0.1", master_port=port, serves_store=True)
train(make_config(**asked), group=connect(ranks, Limits()) if sharded else None)
"""


@pytest.mark.cuda
@pytest.mark.parametrize(
    "more",
    [
        {"train_type": "full", "precision": "bf16"},
        {"train_type": "qlora", "quantization_backend": "bnb", "precision": "bf16"},
        {"train_type": "full", "precision": "fp32", "use_cpu_offload": True},
        {"train_type": "lora", "precision": "fp32", "use_activation_cpu_offload": True},
    ],
)
def test_one_gpu_in_fsdp2_is_the_plain_training(
    more: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n} + {n}?", "completion": f" {2 * n}"} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"backend": "cuda", "model_name": str(tiny_model), "dataset": str(tmp_path / "rows.jsonl")}
    asked |= {"output_dir": str(tmp_path), "max_steps": 5, "batch_size": 2, "gradient_accumulation_steps": 2}
    asked |= {
        "skip_eval": True,
        "save_model": False,
        "kernels": "general",
        **more,
    }  # sharded weights need them
    for sharded in ("no", "yes"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run = json.dumps(asked | {"name": sharded})
        subprocess.run([sys.executable, "-c", TRAIN, str(port), sharded, run], check=True, timeout=300)
    plain, found = (
        [row["loss"] for row in read_jsonl(tmp_path / n / "metrics.jsonl")] for n in ("no", "yes")
    )
    assert found == pytest.approx(plain, rel=1e-5)
