"""The chat template that crosstune writes for a model without one, rendered by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from crosstune.config.load import make_config
from crosstune.recipes.sft import open_recipe


def test_transformers_renders_the_template_as_it_was_trained(
    tiny_model: Path, write_jsonl: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    row = {"prompt": "Is it warm?", "completion": "It is."}
    asked = make_config(dataset=str(write_jsonl([row])), skip_eval=True)
    recipe = open_recipe(asked, model_folder=folder)
    recipe.complete_result(folder)
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=False)
    assert theirs == recipe.tokenizer.decode(recipe.train[0].tokens, keep_special=True)
