"""Make pictures of squares, rows that ask for their color and their number, and a tiny vision-language model.

python examples/pictures.py pictures
"""

import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

COLORS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (40, 60, 210), "yellow": (225, 205, 40)}
NUMBERS = ("one", "two", "three")
QUESTION = "What is in the picture?"
SPECIAL = [
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def draw(chance: random.Random, color: str, number: int) -> Image.Image:
    """Draw squares of shades of a color, at random places of a grid, on a noisy gray of random brightness."""
    gray = chance.randrange(70, 180)
    noise = Image.frombytes("L", (32, 32), chance.randbytes(32 * 32))
    picture = noise.point(lambda value: gray + value // 8 - 16).convert("RGB")
    for place in chance.sample(range(4), number):
        side = chance.randrange(9, 13)
        left, top = (16 * cell + chance.randrange(16 - side) for cell in (place % 2, place // 2))
        shade = tuple(value + chance.randrange(-25, 26) for value in COLORS[color])
        ImageDraw.Draw(picture).rectangle((left, top, left + side, top + side), fill=shade)
    return picture


def write_rows(folder: Path, name: str, count: int) -> None:
    chance, lines = random.Random(name), []
    for row in range(count):
        color, number = chance.choice(list(COLORS)), chance.randrange(len(NUMBERS))
        path = f"{name}/{row}.png"
        (folder / name).mkdir(exist_ok=True)
        draw(chance, color, number + 1).save(folder / path)
        answer = f"{NUMBERS[number]} {color}"
        lines.append(json.dumps({"prompt": f"<image>{QUESTION}", "completion": answer, "images": [path]}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_model(folder: Path) -> None:
    """Write a Qwen2.5-VL of 300,000 random weights, with a tokenizer of the words above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    words = [f"{QUESTION} user assistant", *(f"{number} {color}" for number in NUMBERS for color in COLORS)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer=trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    text = {
        "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "window_size": 16,
        "fullatt_block_indexes": [1], "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
    }  # fmt: skip
    ids = {"vision_start_token_id": 3, "image_token_id": 5, "video_token_id": 6}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=tower, **ids)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    reads = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    limits = {"shortest_edge": 64, "longest_edge": 32 * 32}
    (folder / "preprocessor_config.json").write_text(json.dumps({**reads, "size": limits}))


if __name__ == "__main__":
    home = Path(sys.argv[1])
    write_model(home / "model")
    write_rows(home, "train", 2000)
    write_rows(home, "held_out", 100)
