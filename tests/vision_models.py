"""Write tiny random vision-language models of each family, with their processors, and draw pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "idefics3")
PATCH, TILE = 4, 16
COLOURS = {"red": (200, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 200), "yellow": (220, 200, 30)}

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for p in m.content %}{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text | trim }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
_IDEFICS = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}"
    "{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<image>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_WORDS = "What colour is this? It is red, green, blue or yellow. How many squares are there? user: assistant: one two three"


def tiny_vision(folder: Path, family: str, *, hidden: int = 32, layers: int = 2, seed: int = 0) -> Path:
    """Write a tiny random model of a family into `folder`, with tokenizer, chat template and image processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(write_folder(folder, family, hidden=hidden, layers=layers))
    model = AutoModelForImageTextToText.from_config(config)
    if family == "gemma3":  # it starts at 0, which hides every picture
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    return folder


def write_folder(folder: Path, family: str, *, hidden: int = 32, layers: int = 2) -> Path:
    """Write everything but the weights."""
    from transformers import AutoConfig

    ids = _write_tokenizer(folder, family)
    config = AutoConfig.for_model(family, **_config(family, ids, hidden=hidden, layers=layers))
    for part in (config, config.get_text_config()):
        part.pad_token_id, part.bos_token_id, part.eos_token_id = 0, 1, 2
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor(family)))
    return folder


def draw(folder: Path, name: str, colour: str, *, size: tuple[int, int] = (20, 28)) -> str:
    """Draw a square of a colour on grey, and return the file's name."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", size, (128, 128, 128))
    ImageDraw.Draw(picture).rectangle((3, 3, size[0] - 5, size[1] - 6), fill=COLOURS[colour])
    picture.save(folder / name)
    return name


def write_rows(folder: Path, *, count: int = 12) -> Path:
    """Write rows about coloured pictures of different sizes, one of them without a picture and one with two."""
    rows: list[dict[str, Any]] = []
    names = list(COLOURS)
    for number in range(count):
        colour = names[number % len(names)]
        name = draw(folder, f"{number}.png", colour, size=(17 + 3 * number, 40 - 2 * number))
        content: list[dict[str, Any]] = [
            {"type": "image", "path": name},
            {"type": "text", "text": "What colour is this?"},
        ]
        if number == 1:
            content = [{"type": "text", "text": "How many squares are there?"}]
        if number == 2:
            content = [*content[1:], {"type": "image", "path": "0.png"}, content[0]]
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": f"It is {colour}."},
                ]
            }
        )
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _write_tokenizer(folder: Path, family: str) -> dict[str, int]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    more: dict[str, str] = {}
    template = _CHATML
    if family.startswith("qwen"):
        special += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    elif family == "gemma3":
        more = {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
        template = _GEMMA
    else:
        tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
        more = {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<|im_end|>",
        }
        special += tiles
        template = _IDEFICS
    special += [text for text in more.values() if text not in special]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS], trainer=trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=template,
        extra_special_tokens=more,
    )
    fast.save_pretrained(folder)
    return {token: fast.convert_tokens_to_ids(token) for token in special} | {"vocabulary": len(fast)}


def _config(family: str, ids: dict[str, int], *, hidden: int, layers: int) -> dict[str, Any]:
    text: dict[str, Any] = {
        "vocab_size": -(-ids["vocabulary"] // 8) * 8,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 2048,
    }
    if family.startswith("qwen"):
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        tower: dict[str, Any] = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": PATCH,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden,
        }  # fmt: skip
        if family == "qwen3_vl":
            tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        else:
            tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
        return {
            "text_config": text,
            "vision_config": tower,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
    tower = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": TILE, "patch_size": PATCH,
    }  # fmt: skip
    if family == "gemma3":
        text |= {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
        return {
            "text_config": text,
            "vision_config": tower,
            "mm_tokens_per_image": 4,
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
            "image_token_index": ids["<image_soft_token>"],
        }
    return {
        "text_config": text | {"model_type": "llama"},
        "vision_config": tower,
        "scale_factor": 2,
        "image_token_id": ids["<image>"],
    }


def _processor(family: str) -> dict[str, Any]:
    common = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
    if family.startswith("qwen"):
        return common | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": PATCH,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 1024},
        }
    if family == "gemma3":
        return common | {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": TILE, "width": TILE},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
    kind = "SmolVLMImageProcessor" if family == "smolvlm" else "Idefics3ImageProcessor"
    return common | {
        "image_processor_type": kind,
        "size": {"longest_edge": 2 * TILE},
        "max_image_size": {"longest_edge": TILE},
        "do_image_splitting": True,
        "do_pad": True,
    }
