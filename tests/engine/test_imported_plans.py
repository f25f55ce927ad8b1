"""An imported configuration of each trainer plans without a question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from imported import AXOLOTL, FACTORY, MLX, TORCHTUNE, TRL, TUNE_CHATS, UNSLOTH, notebook, write

from crosstune.cli.main import main

CHATS = [{"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": str(n)}]} for n in range(40)]  # fmt: skip
PAIRS = [{"prompt": f"say {n}", "chosen": str(n), "rejected": "no"} for n in range(40)]
TRL_PAIRS = "python trl/scripts/dpo.py --model_name_or_path my/model --dataset_name org/pairs --max_length 512 --max_prompt_length 256"
UNSLOTH_PAIRS = [
    *UNSLOTH[:5],
    "DPOTrainer(args=DPOConfig(max_steps=60), beta=0.1, max_length=512, max_prompt_length=256, train_dataset=data)\n",
]
EXAMPLES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "axolotl": ("a.yml", AXOLOTL.replace("    field_messages: turns\n", ""), CHATS),
    "llamafactory": (
        "f.yaml",
        FACTORY.replace("deepspeed: examples/deepspeed/ds_z3_config.json\n", ""),
        PAIRS,
    ),
    "mlx-lm": ("m.yaml", MLX, CHATS),
    "torchtune": ("t.yaml", TORCHTUNE, CHATS),
    "torchtune chats": ("t.yaml", TUNE_CHATS.replace("conversation_column: turns", "packed: false"), CHATS),
    "trl": ("s.sh", TRL.replace("wandb tensorboard", "none"), CHATS),
    "trl dpo": ("s.sh", TRL_PAIRS, PAIRS),
    "unsloth": ("n.ipynb", notebook(UNSLOTH), CHATS),
    "unsloth dpo": ("n.ipynb", notebook(UNSLOTH_PAIRS), PAIRS),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_imported_file_plans(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file, text, rows = EXAMPLES[name]
    write(tmp_path, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    # Neither the hub is asked nor another device needed.
    here = ["--model_name", "tiny-random", "--dataset", "rows.jsonl", "--backend", "cpu"]
    assert main(["import", str(write(tmp_path, file, text)), *here, "--out", "run.yaml"]) == 0
    capsys.readouterr()
    assert main(["plan", "--config", "run.yaml", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out).get("cannot_train")
