"""`crosstune import`: other trainers' configurations become options with the same meaning; no key is ignored."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from imported import AXOLOTL, DPO, FACTORY, MLX, SCALED, TORCHTUNE, TRL, UNSLOTH, notebook, write

from crosstune.cli.main import main
from crosstune.config.load import load_config, make_config
from crosstune.config.schema import options_by_name
from crosstune.core.errors import UserError
from crosstune.core.schedule import SCHEDULES
from crosstune.importing.tools import TOOLS
from crosstune.importing.translate import Imported, import_file
from crosstune.recipes.preference.open_pairs import open_preferences


def of_factory(folder: Path) -> Imported:
    (folder / "data").mkdir()
    write(
        folder / "data",
        "dataset_info.json",
        json.dumps({"pairs": {"file_name": "pairs.json", "ranking": True}}),
    )
    return import_file(write(folder, "dpo.yaml", FACTORY))


def test_axolotl(tmp_path: Path) -> None:
    found = import_file(write(tmp_path, "a.yml", AXOLOTL))
    assert found.tool.title == "axolotl" and not found.missing
    expected = {
        "model_name": "my/model", "dataset": "chats.jsonl", "columns": "turns=messages", "eval_fraction": 0.05,
        "train_type": "qlora", "context_length": 1024, "packing": True, "lora_rank": 32, "lora_alpha": 16,
        "batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 2, "optimizer": "paged_adamw_8bit", "lr": 0.0003,
        "use_gradient_checkpointing": True, "use_flash_attention": True, "warmup_ratio": 0.1, "wd": 0.0, "grad_norm": 0.3,
        "skip_eval": False, "n_bits": 4, "lora_target_modules": "all", "lr_scheduler": "cosine", "apply_gradient_clipping": True,
    }  # fmt: skip
    assert found.options == expected
    assert found.added == {"cosine_min_lr_ratio": 0.0, "truncation": "drop"}


def test_llamafactory(tmp_path: Path) -> None:
    found = of_factory(tmp_path)
    assert found.tool.title == "LLaMA-Factory" and not found.missing
    expected = {
        "model_name": "my/model", "recipe": "preference", "preference_loss": "orpo", "beta": 0.2, "lora_rank": 8,
        "dataset": str(tmp_path / "data" / "pairs.json"), "context_length": 512, "batch_size": 1, "lr": 5e-6, "num_epochs": 3,
        "warmup_ratio": 0.1, "precision": "bf16_autocast", "eval_fraction": 0.1, "eval_steps": 50, "skip_eval": False,
        "train_type": "lora", "lora_target_modules": "all", "lr_scheduler": "cosine", "sharding_strategy": "full_shard",
    }  # fmt: skip
    assert found.options == expected
    assert (
        found.added["lora_alpha"] == options_by_name()["lora_alpha"].default
        or found.added["lora_alpha"] == 16
    )


def test_mlx_lm(tmp_path: Path) -> None:
    found = import_file(write(tmp_path, "m.yaml", MLX))
    assert found.tool.title == "mlx-lm" and not found.missing
    expected = {
        "model_name": "my/model", "train_type": "dora", "dataset": "chats.jsonl", "max_steps": 100, "batch_size": 2,
        "lr": 1e-4, "lora_rank": 4, "lora_alpha": 40, "lora_dropout": 0.1, "lora_target_modules": "self_attn.q_proj",
        "warmup_steps": 10, "lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1, "train_on_prompt": False,
    }  # fmt: skip
    assert found.options == expected
    assert found.added["backend"] == "mlx" and "train_on_prompt" not in found.added


HUB_DATA = "hf_dataset: {path: org/data, prompt_feature: question, completion_feature: completion"


@pytest.mark.parametrize(("more", "options"), [
    ("}", {"dataset": "org/data", "columns": "question=prompt"}),
    (", train_split: train, valid_split: validation}", {"dataset": "org/data", "columns": "question=prompt"}),
    (", train_split: 'train[:10%]'}", None), (", config: {name: small}}", None), (", valid_split: dev}", None),
])  # fmt: skip
def test_hub_data_of_mlx_lm(tmp_path: Path, more: str, options: dict[str, Any] | None) -> None:
    found = import_file(write(tmp_path, "m.yaml", MLX.replace("data: chats.jsonl", HUB_DATA + more)))
    assert [note.key for note in found.missing] == ([] if options else ["hf_dataset"])
    assert options is None or options.items() <= found.options.items()


def test_every_option_of_the_parser_of_mlx_lm_is_known() -> None:
    if (spec := importlib.util.find_spec("mlx_lm")) is None or not spec.submodule_search_locations:
        pytest.skip("an extra: pip install 'crosstune[mlx]'")
    text = Path(spec.submodule_search_locations[0], "lora.py").read_text(encoding="utf-8")
    names = {name.replace("-", "_") for name in re.findall(r'"--([\w-]+)"', text)}
    assert len(names) > 20
    assert names <= TOOLS["mlx-lm"].rules.keys()


def test_last_layers_of_mlx_lm_follow_from_the_size_of_the_model(tmp_path: Path) -> None:
    text = MLX.replace("num_layers: -1", "num_layers: 8").replace(
        "my/model", "mlx-community/Llama-3.2-1B-Instruct"
    )
    found = import_file(write(tmp_path, "m.yaml", text))
    assert not found.missing and found.options["layers_to_transform"] == "8-15"
    by_default = import_file(write(tmp_path, "d.yaml", text.replace("num_layers: 8", "# all defaults")))
    assert "layers_to_transform" not in by_default.added, "all of its 16 layers"
    larger = text.replace("num_layers: 8", "").replace("3.2-1B", "3.1-8B")
    assert import_file(write(tmp_path, "l.yaml", larger)).added["layers_to_transform"] == "16-31"
    unknown = import_file(write(tmp_path, "u.yaml", MLX.replace("num_layers: -1", "num_layers: 8")))
    assert ["--layers_to_transform" in note.text for note in unknown.missing] == [True]


def test_labels_of_llamafactory_keep_their_column(tmp_path: Path) -> None:
    entry = {"file_name": "a.json", "columns": {"messages": "turns", "kto_tag": "liked"}}
    write(tmp_path, "dataset_info.json", json.dumps({"pairs": entry}))
    text = FACTORY.replace("stage: dpo", "stage: kto").replace("pref_loss: orpo\n", "")
    found = import_file(write(tmp_path, "kto.yaml", text))
    assert found.options["columns"] == "turns=messages,liked=label"
    make_config(**found.options)


def test_torchtune(tmp_path: Path) -> None:
    found = import_file(write(tmp_path, "t.yaml", TORCHTUNE))
    assert found.tool.title == "torchtune" and not found.missing
    expected = {
        "output_dir": "out", "lora_target_modules": "q_proj,v_proj,o_proj", "lora_rank": 8, "lora_alpha": 16,
        "context_length": 256, "model_name": "my/model", "dataset": "tatsu-lab/alpaca", "packing": True,
        "optimizer": "fused_adamw", "lr": 3e-4, "wd": 0.1, "warmup_steps": 100, "batch_size": 4, "num_epochs": 2,
        "apply_gradient_clipping": False, "precision": "bf16", "backend": "cpu",
    }  # fmt: skip
    assert {name: found.options[name] for name in expected} == {**expected, "lr": found.options["lr"]}
    assert float(found.options["lr"]) == 3e-4


def test_unsloth_notebook_is_read_and_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = [*UNSLOTH, f"open({str(ran)!r}, 'w')\n"]
    found = import_file(write(tmp_path, "n.ipynb", notebook(code)))
    assert found.tool.title == "Unsloth" and not found.missing and not ran.exists()
    expected = {
        "model_name": "my/model", "train_type": "qlora", "context_length": 256, "lora_alpha": 16, "seed": 3407,
        "dataset": "org/chats", "max_steps": 60, "optimizer": "adamw_8bit", "n_bits": 4, "lora_rank": 16,
        "recipe": "sft",
    }  # fmt: skip
    assert found.options == expected


def test_values_of_the_file_are_written_even_if_they_are_defaults(tmp_path: Path) -> None:
    """A recipe may have its own default: without `lr` in the file, DPO would use 1e-5."""
    text = AXOLOTL.replace("0.0003", "0.0002").replace("field_messages: turns", "field_chosen: better")
    found = import_file(write(tmp_path, "a.yml", text + "rl: dpo\n"))
    assert next(note.kind for note in found.notes if note.key == "learning_rate") == "default"
    out = write(tmp_path, "run.yaml", found.to_yaml())
    config = load_config(file=out, environment={})
    assert config.recipe == "preference" and config.lr == 2e-4 and "lr" in config.sources


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "lora_target_linear: true",
            "lora_target_modules: [self_attn.q_proj, v_proj]",
            "self_attn.q_proj,v_proj",
        ),
        (
            "lora_target_linear: true",
            "lora_target_modules: 'layers.[\\d]+.(mlp|attn).(q|k)_proj'",
            "layers.[\\d]+.(mlp|attn).(q|k)_proj",
        ),
        (
            "val_set_size: 0.05",
            "auto_resume_from_checkpoints: true\noutput_dir: out/first",
            ("auto", "first"),
        ),
        (
            "    type: chat_template",
            "  - path: chats.jsonl\n    type: chat_template",
            "a path is listed twice",
        ),
        ("    type: chat_template", "    name: en", "--dataset has no name"),
        ("micro_batch_size: 2", "micro_batch_size: 2\nrevision_of_model: v2", "known values: main"),
        ("micro_batch_size: 2", f"{SCALED}, beta_fast: 64}}", "write it into config.json"),
    ],
)
def test_values_of_axolotl(tmp_path: Path, before: str, after: str, expected: Any) -> None:
    assert before in AXOLOTL
    found = import_file(write(tmp_path, "a.yml", AXOLOTL.replace(before, after, 1)))
    if found.missing:
        assert expected in found.missing[0].text
    elif isinstance(expected, tuple):
        assert (found.options["resume"], found.options["name"]) == expected
    else:
        assert found.options["lora_target_modules"] == expected


def test_a_path_listed_twice_counts_once_with_deduplication(tmp_path: Path) -> None:
    twice = AXOLOTL.replace(
        "datasets:", "dataset_exact_deduplication: true\ndatasets:\n  - path: chats.jsonl", 1
    )
    assert import_file(write(tmp_path, "a.yml", twice)).options["dataset"] == "chats.jsonl"


def test_columns_of_axolotl_preferences_can_be_read(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "Hi"}
    row = {
        "conversation": [turn],
        "better": {"role": "assistant", "content": "a"},
        "worse": {"role": "assistant", "content": "b"},
    }
    write(tmp_path, "chats.jsonl", json.dumps(row) + "\n")
    fields = "field_messages: conversation\n    field_chosen: better\n    field_rejected: worse"
    text = AXOLOTL.replace("field_messages: turns", fields).replace(
        "chats.jsonl", str(tmp_path / "chats.jsonl")
    )
    found = import_file(write(tmp_path, "a.yml", text.replace("val_set_size: 0.05", "rl: dpo")))
    assert (
        not found.missing and found.options["columns"] == "conversation=prompt,better=chosen,worse=rejected"
    )
    config = load_config(file=write(tmp_path, "run.yaml", found.to_yaml()), environment={})
    (pair,) = open_preferences(config, paired=True).train
    assert pair.prompt[0]["content"] == "Hi" and [answer[0]["content"] for answer in pair.answers] == [
        "a",
        "b",
    ]


def test_defaults_of_the_other_trainer_are_added(tmp_path: Path) -> None:
    """Adapters and warm-up: without these lines, crosstune would train other layers at other rates."""
    adapters = {"lora_dropout": 0.05, "lora_target_modules": "default"}
    trl = import_file(write(tmp_path, "a.sh", TRL))
    assert {name: trl.added.get(name) for name in adapters} == adapters and trl.added["warmup_steps"] == 0
    full = import_file(write(tmp_path, "b.sh", TRL.replace("--use_peft --lora_r 32", "--warmup_ratio 0.2")))
    assert not set(full.added) & {*adapters, "warmup_steps"}
    code = import_file(write(tmp_path, "c.py", DPO))
    assert code.added["lora_rank"] == code.added["lora_alpha"] == 8 and "lora_dropout" not in code.added
    axolotl = AXOLOTL.replace("warmup_ratio: 0.1\n", "")
    assert import_file(write(tmp_path, "d.yml", axolotl)).added["warmup_ratio"] == 0.03
    none = import_file(write(tmp_path, "e.yml", axolotl + "warmup_steps: 0\n"))
    assert none.options["warmup_steps"] == 0 and "warmup_ratio" not in none.added
    both = import_file(write(tmp_path, "f.yml", AXOLOTL + "warmup_steps: 0\n"))
    assert both.options["warmup_ratio"] == 0.1 and "warmup_steps" not in both.options
    fast = import_file(
        write(tmp_path, "g.ipynb", notebook([line.replace(", load_in_4bit=True", "") for line in UNSLOTH]))
    )
    wanted = {"train_type": "qlora", "warmup_ratio": 0.1, "batch_size": 4, "gradient_accumulation_steps": 2}
    assert {name: fast.added.get(name) for name in wanted} == wanted


def test_reward_model_keeps_the_defaults_of_its_trainer(tmp_path: Path) -> None:
    """The judge recipe presets these options; a value that is also crosstune's default is written too."""
    text = FACTORY.replace("stage: dpo", "stage: rm").replace("pref_beta: 0.2\npref_loss: orpo\n", "")
    found = import_file(write(tmp_path, "rm.yaml", text), overrides={"dataset": "pairs.jsonl"})
    wanted = {"gradient_accumulation_steps": 1, "grad_norm": 1.0, "lora_dropout": 0.0, "wd": 0.0}
    assert {name: found.added.get(name) for name in wanted} == wanted


def test_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(write(tmp_path, "a.yml", AXOLOTL)), "--overwrite"]) == 0
    assert "skip_eval: false (evaluates before and after training; set eval_steps" in capsys.readouterr().out
    for method, is_told in (("sft", True), ("dpo", False)):
        file = write(tmp_path, "a.sh", TRL.replace("trl sft", f"trl {method}"))
        assert main(["import", str(file), "--overwrite"]) == 0
        assert ("loss on all tokens" in capsys.readouterr().out) is is_told
    assert main(["import", str(write(tmp_path, "b.yml", AXOLOTL + "qat: true\n")), "--overwrite"]) == 2
    assert "1 of 26 keys has no counterpart" in capsys.readouterr().err


def test_every_rule_sets_real_options() -> None:
    known = options_by_name()
    for tool in TOOLS.values():
        for key, rule in tool.rules.items():
            if isinstance(rule, dict):
                assert all(name in known for options in rule.values() for name in options), key
            elif type(rule) is str:
                assert rule in known, key
        assert set(tool.defaults) <= set(known)
    assert all(len(tool.rules) >= 120 for name, tool in TOOLS.items() if name != "mlx-lm")


def test_keys_without_a_counterpart_are_errors_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "a.yml", AXOLOTL + "qat: {weight_dtype: int4}\nsequnce_len: 5\n")
    assert main(["import", str(file)]) == 2
    error = capsys.readouterr().err
    lines = len(AXOLOTL.splitlines())
    assert f"a.yml:{lines + 1} qat: " in error and f"a.yml:{lines + 2} sequnce_len: unknown key" in error
    assert not (tmp_path / "crosstune.yaml").exists()
    assert main(["import", str(file), "--lenient"]) == 0
    assert "left out" in capsys.readouterr().out
    assert load_config(file=tmp_path / "crosstune.yaml", environment={}).lora_rank == 32
    assert main(["import", str(file), "--lenient"]) == 2  # the file exists


def test_scaled_positions(tmp_path: Path) -> None:
    before = "micro_batch_size: 2"
    found = import_file(write(tmp_path, "a.yml", AXOLOTL.replace(before, f"{SCALED}}}", 1)))
    assert (found.options["rope_scaling"], found.options["rope_factor"]) == (
        "yarn",
        4.0,
    ) and not found.missing
    found = import_file(write(tmp_path, "f.yml", f"{FACTORY}rope_scaling: llama3\n"))
    assert found.options["rope_scaling"] == "llama3"
    assert any("--rope_factor" in note.text for note in found.notes if note.key == "rope_scaling")


def test_options_of_the_command_replace_keys(tmp_path: Path) -> None:
    file = write(tmp_path, "dpo.yaml", FACTORY)
    assert main(["import", str(file), "--json"]) == 2  # dataset_info.json is not there
    out = tmp_path / "run.yaml"
    assert main(["import", str(file), "--dataset", "mine.jsonl", "--out", str(out)]) == 0
    assert yaml.safe_load(out.read_text(encoding="utf-8"))["dataset"] == "mine.jsonl"
    trl = write(tmp_path, "a.sh", TRL.replace("--packing", "--warmup_steps 5 --max_steps 9"))
    found = import_file(
        trl, overrides={"warmup_ratio": 0.2, "num_epochs": 2, "recipe": "preference", "train_type": "full"}
    )
    assert not {"warmup_steps", "max_steps", "lora_dropout"} & {*found.options, *found.added}
    assert found.added["lr_scheduler"] == "linear" and found.options["num_epochs"] == 2


def test_every_schedule_is_another_trainers_or_said_to_differ(tmp_path: Path) -> None:
    taken = set()
    for name in SCHEDULES:
        file = write(tmp_path, "a.yml", AXOLOTL.replace("lr_scheduler: cosine", f"lr_scheduler: {name}"))
        if "lr_scheduler" not in (found := import_file(file)).options:
            assert any("differs" in note.text for note in found.missing), name
        else:
            taken.add(name)
            assert found.options["lr_scheduler"] == name
    # Add a schedule here only if it equals the one of this name in the other trainers.
    assert taken == {"constant", "linear", "cosine", "exponential"}


def test_bad_files(tmp_path: Path) -> None:
    wrong = {
        "x.yaml": "just text", "y.yaml": "a: [", "z.json": "{", "u.py": "def (", "v.py": "print(1)", "w.sh": "echo 'a",
        "e.txt": "no options", "n.ipynb": "[1]", "o.yaml": "unknown_key: 1",
    }  # fmt: skip
    for name, text in wrong.items():
        with pytest.raises(UserError):
            import_file(write(tmp_path, name, text))


def test_tokens_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEF"
    file = write(tmp_path, "a.sh", TRL.replace("--packing", f"--hub_token {secret}"))
    assert main(["import", str(file), "--lenient"]) == 0
    written = (tmp_path / "crosstune.yaml").read_text(encoding="utf-8") + capsys.readouterr().out
    assert secret not in written


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yml", "base_model: m\nadapter: lora\nlearning_rate: fast\n", "a.yml:3 learning_rate: lr cannot be 'fast'; expected a number"),
        ("a.yml", "", "a.yml contains no options"),
        ("a.yml", "- 1\n", "it is not a mapping of keys to values"),
        ("a.yml", "{broken", "at line 1, column 1"),
        ("a.py", "def broken(:", "invalid syntax (line 1)"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_with_its_line(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(write(tmp_path, name, text))]) == 2
    error = capsys.readouterr().err
    assert said in error and "do:" in error and "<un" not in error and "argument" not in error, error
    assert not (tmp_path / "crosstune.yaml").exists()
