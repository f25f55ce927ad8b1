"""Record losses and gradients of TRL's GRPO and RLOO trainers on seeded log probabilities, in rl_trl.json.

`pip install trl==1.16.0`, then `python tests/parity/record_rl_trl.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("rl_trl.json")
LENGTHS = (5, 3, 7, 1, 4, 6)
"""Tokens of each answer."""
LONGEST = 9
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl": 0.1, "correction": "token"},
    "grpo first step": {"first": True, "kl": 0.04},
    "dr_grpo": {"correction": "sequence"},
    "dapo": {"high": 0.28, "correction": "token"},
    "dapo masked": {"masked": (1, 4), "kl": 0.1},
    "bnpo": {"kl": 0.05},
    "gspo": {"low": 3e-2, "high": 4e-2, "kl": 0.1, "correction": "token"},
    "gspo first step": {"first": True, "masked": (2,)},
    "rloo": {},
    "rloo masked": {"masked": (0, 3)},
}
"""Loss -> settings; after a space, what is special."""
CAP = 1.05


def make_inputs(name: str) -> dict[str, Any]:
    """Return the values of a case, the same on every machine."""
    given, draw = CASES[name], np.random.default_rng(len(name))
    count = sum(LENGTHS)
    log_probs = -draw.uniform(0.1, 4, count)
    old = log_probs + draw.normal(0, 0.2, count)
    return {
        "log_probs": log_probs,
        "old": None if given.get("first") else old,
        "sampler": (log_probs if given.get("first") else old) + draw.normal(0, 0.05, count),
        "reference": log_probs + draw.normal(0, 0.4, count),
        "advantages": draw.normal(0, 1, len(LENGTHS)),
        "kept": np.array(
            [number not in given.get("masked", ()) for number in range(len(LENGTHS))], np.float64
        ),
        "answers": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
    }


def record(name: str) -> dict[str, Any]:
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    given, values = CASES[name], make_inputs(name)
    loss, low = name.split()[0], given.get("low", 0.2)

    def rows(flat: Any) -> Any:
        """Return the values of tokens in TRL's layout, padded on the right."""
        table = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.float64)
        parts = torch.as_tensor(flat).split(LENGTHS)
        for row, part in enumerate(parts):
            table[row, : len(part)] = part
        return table

    own = torch.tensor(values["log_probs"], requires_grad=True)
    table = torch.stack(
        [torch.nn.functional.pad(part, (0, max(LENGTHS) - len(part))) for part in own.split(LENGTHS)]
    )
    mask = rows(np.ones(sum(LENGTHS))) * torch.tensor(values["kept"])[:, None]
    correction = given.get("correction")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **parts: (table, torch.zeros_like(table), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=given.get("kl", 0.0),
        importance_sampling_level="sequence" if loss == "gspo" else "token", loss_type="grpo" if loss == "gspo" else loss,
        epsilon_low=low, epsilon_high=given.get("high", low), use_vllm=correction is not None, model=SimpleNamespace(training=True),
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1, max_completion_length=LONGEST,
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    old = rows(values["old"]) if values["old"] is not None else None
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1), "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros_like(table), "completion_mask": mask, "advantages": torch.tensor(values["advantages"]),
        "ref_per_token_logps": rows(values["reference"]), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if loss == "rloo":
        inputs["old_logps"] = (old * mask).sum(1)
        total = RLOOTrainer._compute_loss(trainer, None, inputs)
    else:
        if old is not None:
            inputs["old_per_token_logps"] = old
        if correction is not None:
            difference = ((old if old is not None else table.detach()) - rows(values["sampler"])) * mask
            if correction == "sequence":
                difference = difference.sum(-1, keepdim=True)
            inputs["importance_sampling_ratio"] = difference.exp().clamp(max=CAP)
        total = GRPOTrainer._compute_loss(trainer, None, inputs)
    total.backward()
    metrics = {key: found[-1] for key, found in trainer._metrics["train"].items()}
    kept = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    return {
        "loss": float(total),
        "gradient": own.grad.tolist(),
        "metrics": {key: value for key, value in metrics.items() if key in kept},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: record(name) for name in CASES}, indent=1) + "\n")
    print(FILE)
