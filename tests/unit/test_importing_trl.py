"""`crosstune import` of TRL: commands, scripts and notebooks of each trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from imported import DPO, TRL, write

from crosstune.config.load import load_config
from crosstune.importing.translate import import_file


def test_trl_command(tmp_path: Path) -> None:
    found = import_file(write(tmp_path, "sft.sh", TRL))
    assert found.tool.title == "TRL" and not found.missing
    expected = {
        "model_name": "my/model", "dataset": "chats.jsonl", "context_length": 512, "packing": True, "lora_rank": 32,
        "log_to": "tqdm,wandb,tensorboard", "lr": 2e-4, "train_type": "lora", "optimizer": "adamw", "recipe": "sft",
    }  # fmt: skip
    assert found.options == expected
    assert (
        found.added["lr_scheduler"] == "linear"
        and found.added["num_epochs"] == 3
        and found.added["skip_eval"]
    )


@pytest.mark.parametrize(
    ("command", "recipe", "loss", "lr"),
    [
        ("pip install -U trl peft\npython prepare.py\ntrl dpo", "preference", "dpo", 1e-6),
        ("trl kto", "preference", "kto", 1e-6),
        ("python trl/scripts/orpo.py", "preference", "orpo", 1e-6),
        (
            "accelerate launch --config_file a.yaml --num_processes 8 trl/scripts/cpo.py",
            "preference",
            "cpo",
            1e-6,
        ),
        ("torchrun --nproc_per_node 2 examples/scripts/reward_modeling.py", "judge", "dpo", 1e-4),
        ("trl sft", "sft", "dpo", 2e-5),
    ],
)
def test_trl_trainer_of_a_command(tmp_path: Path, command: str, recipe: str, loss: str, lr: float) -> None:
    text = f"{command} --model_name_or_path my/model --dataset_name pairs.jsonl --num_processes 2"
    found = import_file(write(tmp_path, "run.sh", text))
    config = load_config(file=write(tmp_path, "run.yaml", found.to_yaml()), environment={})
    assert found.tool.title == "TRL" and not found.missing and len(found.notes) == 4
    assert (config.recipe, config.preference_loss, config.lr) == (recipe, loss, lr)
    assert "lr" in config.sources and config.train_type == "full"


def test_distillation_of_trl(tmp_path: Path) -> None:
    shared = "--model_name_or_path my/small --teacher_model_name_or_path my/large --dataset_name chats.jsonl"
    asked = import_file(write(tmp_path, "run.sh", f"trl gkd {shared} --beta 0.2 --lmbda 0.3"))
    assert asked.options["recipe"] == "distill" and asked.options["teacher"] == "my/large"
    found = {
        name: asked.options[name]
        for name in ("distill_loss", "distill_beta", "on_policy_share", "distill_temperature")
    }
    assert found == {
        "distill_loss": "jsd",
        "distill_beta": 0.2,
        "on_policy_share": 0.3,
        "distill_temperature": 0.9,
    }
    plain = import_file(write(tmp_path, "plain.sh", f"trl distillation {shared}"))
    assert (plain.options["distill_beta"], plain.options["on_policy_share"]) == (1.0, 1.0)
    other = import_file(write(tmp_path, "dpo.sh", "trl dpo --dataset_name pairs.jsonl --beta 0.2"))
    assert other.options["beta"] == 0.2


def test_losses_of_trl_cpo(tmp_path: Path) -> None:
    """TRL has SimPO in its CPO trainer, with beta 0.1 and the cross entropy added; crosstune has 2 and 0."""
    text = "python cpo.py --model_name_or_path my/model --dataset_name a.jsonl --loss_type "
    found = {
        loss: import_file(write(tmp_path, "a.sh", text + loss)) for loss in ("sigmoid", "simpo", "hinge")
    }
    assert found["sigmoid"].options["preference_loss"] == "cpo" and "beta" not in found["sigmoid"].added
    assert found["simpo"].options["preference_loss"] == "simpo"
    assert (found["simpo"].added["beta"], found["simpo"].added["sft_weight"]) == (0.1, 1.0)
    assert [note.key for note in found["hinge"].missing] == ["loss_type"]


def test_reinforcement_learning_of_trl(tmp_path: Path) -> None:
    words = (
        "--model_name_or_path my/model --dataset_name a.jsonl --max_completion_length 99 --num_generations 4"
    )
    more = "--loss_type dr_grpo --scale_rewards false --epsilon_high 0.28 --mask_truncated_completions true"
    found = import_file(write(tmp_path, "run.sh", f"trl grpo {words} {more}"))
    expected = {
        "recipe": "rl", "rl_loss": "dr_grpo", "max_new_tokens": 99, "num_generations": 4, "scale_rewards": "none",
        "epsilon_high": 0.28, "mask_truncated": True,
    }  # fmt: skip
    assert not found.missing and expected.items() <= found.options.items()
    rloo = import_file(write(tmp_path, "rloo.sh", f"trl rloo {words}"))
    assert rloo.options["rl_loss"] == "rloo"


@pytest.mark.parametrize("command", ["trl ppo", "python dpo_online.py"])
def test_trl_trainer_without_a_counterpart(tmp_path: Path, command: str) -> None:
    file = write(tmp_path, "run.sh", f"{command} --model_name_or_path my/model --dataset_name a.jsonl")
    assert [note.key for note in import_file(file).missing] == ["trainer"]
    assert not import_file(file, overrides={"recipe": "sft"}).missing


def test_trainer_adapter_and_data_of_python_code(tmp_path: Path) -> None:
    found = import_file(write(tmp_path, "dpo.py", DPO))
    assert found.tool.title == "TRL" and not found.missing
    expected = {
        "recipe": "preference", "preference_loss": "dpo", "model_name": "my/model", "beta": 0.2, "context_length": 512,
        "train_type": "lora", "dataset": "pairs.jsonl", "eval_dataset": "held.jsonl", "skip_eval": False,
    }  # fmt: skip
    assert found.options == expected and found.added["lr"] == 1e-6
    code = DPO.replace(', peft_config=LoraConfig(task_type="CAUSAL_LM")', "").replace(
        "DPOTrainer(model", 'DPOTrainer(model="b/c"'
    )
    plain = import_file(write(tmp_path, "full.py", code))
    assert plain.options["model_name"] == "b/c"
    assert plain.added["train_type"] == "full" and not {
        name for name in plain.added if name.startswith("lora_")
    }
    for computed in ("peft_config=get_peft_config(a)", "model=get_peft_model(m, c)"):
        unclear = write(
            tmp_path, "computed.py", DPO.replace('peft_config=LoraConfig(task_type="CAUSAL_LM")', computed)
        )
        assert [note.key for note in import_file(unclear).missing] == ["peft_config"]
        assert not import_file(unclear, overrides={"train_type": "lora"}).missing
    fast = import_file(write(tmp_path, "fast.py", "from unsloth import FastLanguageModel\n" + DPO))
    assert fast.tool.title == "Unsloth" and fast.options["recipe"] == "preference"


@pytest.mark.parametrize(
    "data",
    [
        'load_dataset("json", data_files=sys.argv[1])', 'load_dataset("org/a", split="train[:10%]")',
        'load_dataset("org/a", "part")', 'load_dataset("org/a", split="test")', "Dataset.from_list(rows)",
        '[load_dataset("org/a"), load_dataset("org/b")]', 'load_dataset(**options)',
    ],
)  # fmt: skip
def test_data_of_python_code_that_cannot_be_read_is_an_error(tmp_path: Path, data: str) -> None:
    code = DPO.replace(DPO.splitlines()[4], f"data = {data}")
    file = write(tmp_path, "dpo.py", code)
    assert [note.key for note in import_file(file).missing] == ["load_dataset"]
    assert not import_file(file, overrides={"dataset": "mine.jsonl"}).missing
