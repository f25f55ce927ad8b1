"""The task of vision-language models: pixels by transformers' image processor, next to the tokens of a causal language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from crosstune.core.errors import LIBRARY_FAULTS, UserError
from crosstune.core.protocols import Array
from crosstune.data.batches.token_batch import TokenBatch
from crosstune.data.read.pictures import Picture
from crosstune.estimate.vision import Vision, read_vision
from crosstune.torch_engine.generate.sampler import pad_columns
from crosstune.torch_engine.import_transformers import import_transformers
from crosstune.torch_engine.task import BuildContext
from crosstune.torch_engine.tasks.causal_lm import CausalLM


class VisionLM(CausalLM):
    """The task of `sft` on rows with pictures."""

    vision: Vision
    processor: Any
    """transformers' image processor."""

    def build(self, context: BuildContext) -> nn.Module:
        assert context.folder is not None, "a vision-language model is built from a folder"
        found = read_vision(context.folder)
        assert isinstance(found, Vision), found  # the recipe has read the rows by it
        self.vision = found.limited(context.plan.config.image_pixels)
        self.processor = open_processor(context.folder)
        return super().build(context)

    def arrays(self, batch: TokenBatch) -> Mapping[str, Array]:
        found = {**super().arrays(batch), **self._marks(batch.input_ids), **self.pixels(batch.pictures)}
        if self.vision.family.layout == "grid":
            found["grid_positions"] = grid_positions(batch, self.vision)
        return found

    def prompt_inputs(
        self, prompts: Sequence[Sequence[int]], pictures: Sequence[Sequence[Picture]]
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs for prompts padded on the left, next to their tokens."""
        marks = self._marks(pad_columns(prompts, on_left=True).numpy())
        arrays = marks | self.pixels([one for own in pictures for one in own])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def pixels(self, pictures: Sequence[Picture]) -> dict[str, Array]:
        """Return the tensors of pictures, in the order of their tokens."""
        if not pictures:
            return {}
        images = [picture.load() for picture in pictures]
        nested = [images] if self.vision.family.layout == "tiles" else images  # else its rows would be padded
        try:
            found = self.processor(images=nested, return_tensors="np", **self.vision.settings)
        except LIBRARY_FAULTS as error:
            raise UserError(
                "The image processor of this model rejects a picture.",
                why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                do="check preprocessor_config.json, and the sizes of the pictures",
            ) from error
        names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
        return {name: np.asarray(found[name]) for name in names if name in found}

    def _marks(self, tokens: Array) -> dict[str, Array]:
        """Return the model's marks of the tokens of pictures."""
        name = self.vision.family.marks
        return {name: (tokens == self.vision.soft_id).astype("int64")} if name else {}


def grid_positions(batch: TokenBatch, vision: Vision) -> Array:
    """Return the positions in the rows, then those of time, height and width, which restart at each document.

    The tokens of a picture have the time of its first token, and its rows and columns from there. The text after it
    continues from the largest of these.
    """
    rows = batch.positions.astype("int64")
    found = np.stack([rows] * 4)
    pictures = iter(batch.pictures)
    for row, tokens in enumerate(batch.input_ids):
        [starts] = ((tokens == vision.soft_id) & (np.roll(tokens, 1) != vision.soft_id)).nonzero()
        for start in starts.tolist():
            picture = next(pictures)
            height, width = vision.grid(picture.width, picture.height)
            end = start + height * width
            first, own = found[1, row, start], batch.segments[row] == batch.segments[row, start]
            found[2, row, start:end] = first + np.repeat(np.arange(height), width)
            found[3, row, start:end] = first + np.tile(np.arange(width), height)
            found[1, row, start:end] = first
            own[:end] = False
            found[1:, row, own] += max(height, width) - height * width
    return found


def open_processor(folder: Path) -> Any:
    """Open the image processor of a folder, on Pillow: the same pixels on every machine."""
    import_transformers()
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except LIBRARY_FAULTS as error:
        raise UserError(
            f"transformers cannot open the image processor of {folder}.",
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            do="check preprocessor_config.json; pictures need transformers 5 or newer",
        ) from error
