"""Follow docs/guide/latent-diffusion.md as written, and run the entry script of the original trainer."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from pages import Followed, Page, Workshop

PAGE = Page("latent-diffusion.md")
PATH = "scripts/training/train_qwen_english_l2t_stable.sh"


@pytest.mark.slow
def test_the_commands_of_the_page(shop: Workshop) -> None:
    followed = Followed(shop, PAGE)
    assert "exact_match" in followed[0]
    assert "step   8/8" in followed[1]
    assert "380" in followed[2] or "train" in followed[2]
    assert "t2l_cosine" in followed[3]
    assert "written" in followed[4] and np.load(shop.home / "vector.npy").shape == (1, 96)
    assert followed[5].strip()
    assert "400 pairs" in followed[6]
    assert "step  24/24" in followed[7]
    summary = shop.json("runs/sentences/summary.json")
    assert summary["steps"] == 40 and summary["eval_after"]["loss"] < summary["eval_before"]["loss"]


@pytest.mark.slow
def test_the_guides_commands_find_loss_and_speed(shop: Workshop) -> None:
    shop.shell("crosstune adopt .")
    script = shop.home / PATH
    flags = (
        "--backend cpu --precision fp32 --hidden_size 32 --n_blocks 2 --skip_eval true --log_every_n_steps 1"
    )
    names = {"L2T_BASE_STEPS": "4", "L2T_TRAIN_BS": "6", "L2T_RUN_NAME": "l2t", "DATA_WORKERS": "8"}
    environment = os.environ | shop.environment | {"PYTHON": sys.executable, "LATENT_DIM": "96"} | names
    command = ["bash", str(script), *flags.split()]
    done = subprocess.run(
        command, cwd=shop.home, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [log] = (shop.home / "train_logs").glob("train_*_node0.log")
    text = log.read_text(encoding="utf-8")
    assert len(re.findall(r"Loss:\s*(\d+\.\d+)", text)) == 4
    assert len(re.findall(r'samples_per_sec["\']:\s*(\d+\.\d+)', text)) == 4
    assert re.search("optimizer adamw .*fused", text), "the adopted YAML asks for it"
    assert "export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" in script.read_text() and "1800" in script.read_text()
    rows = shop.metrics("l2t")
    assert len(rows) == 4 and all(row["examples"] == 6 for row in rows)
