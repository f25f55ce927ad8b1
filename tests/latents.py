"""Small latent-diffusion sessions, opened as `train` opens them, and small sentence encoders for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

from crosstune.config.load import make_config
from crosstune.planner.gather import make_plan
from crosstune.recipes.latent_diffusion import open_recipe
from crosstune.recipes.latent_diffusion.build import BuildRequest, build
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, open_pairs
from crosstune.recipes.latent_diffusion.recipe import LatentDiffusionRecipe
from crosstune.recipes.latent_diffusion.texts import WriteOptions
from crosstune.runs.open_parts import open_session


def grammar_pairs(folder: Path, *, count: int = 300) -> PairFolder:
    options = WriteOptions(max_tokens=12)
    build(BuildRequest(source="grammar", out=folder, max_texts=count, options=options))
    return open_pairs(folder)


def opened(pairs: PairFolder, **options: Any) -> tuple[LatentDiffusionRecipe, Any]:
    """Return a recipe and its session."""
    plan = make_plan(
        make_config(
            **{
                "recipe": "latent_diffusion",
                "dataset": str(pairs.folder),
                "backend": "cpu",
                "precision": "fp32",
                "hidden_size": 32,
                "n_blocks": 2,
                "batch_size": 16,
                "max_steps": 20,
            }
            | options
        )
    )
    recipe = open_recipe(plan.config, model_folder=None, observer=None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return recipe, open_session(plan, None, task=recipe.task("torch"))


def unsettle(model: nn.Module) -> None:
    """Move all weights away from the start, where zero gates hide half of the model."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sees", "dogs", "the", ","]
SPECIAL = [("[CLS]", 2), ("[SEP]", 3)]


def make_tokenizer(template: str, *, as_bert: bool = False) -> Tokenizer:
    """Return a tokenizer that splits at spaces, or one that cleans and splits texts as BERT's does: it drops accents and
    spaces around punctuation."""
    rust = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if as_bert:
        rust.normalizer = normalizers.BertNormalizer()
        rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.add_special_tokens(WORDS[:4])
    rust.post_processor = processors.TemplateProcessing(single=template, special_tokens=SPECIAL)
    return rust


def write_encoder(folder: Path, *, template: str = "[CLS] $A [SEP]", as_bert: bool = False) -> Path:
    """Write an encoder as sentence-transformers saves it; return its folder."""
    folder.mkdir(exist_ok=True)
    make_tokenizer(template, as_bert=as_bert).save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
    )
    transformers.BertModel(config).eval().save_pretrained(folder)
    return folder
