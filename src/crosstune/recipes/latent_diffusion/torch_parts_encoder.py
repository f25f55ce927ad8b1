"""Embed texts with a sentence-transformers folder through transformers: pooled token vectors of norm 1."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.quiet import hide_output
from crosstune.core.safetensors_header import read_header
from crosstune.data.tokenizer import Tokenizer
from crosstune.recipes.latent_diffusion.encoder_input import EncoderInput
from crosstune.recipes.latent_diffusion.encoders import longest_input
from crosstune.recipes.latent_diffusion.token_rows import TokenRows
from crosstune.recipes.latent_diffusion.torch_parts_device import choose_device

_BATCH, _GPU_BATCH = 256, 2048
_REPORT_S = 0.5


class SentenceEncoder:
    """A loaded encoder. Texts are sorted by length before they are batched, so that little is padding."""

    def __init__(
        self,
        folder: Path,
        *,
        record: dict[str, Any],
        device: str | None = None,
        on_text: Callable[[int, int], None] | None = None,
    ) -> None:
        self.device = choose_device(device)
        self._record, self._on_text = record, on_text
        self._model = _load(folder).to(self.device)
        self._tokenizer = Tokenizer.from_folder(folder)
        self._longest = longest_input(folder)

    @property
    def dim(self) -> int:
        return int(self._record["dim"])

    def record(self) -> dict[str, Any]:
        return self._record

    def encode(self, texts: Sequence[str], *, tokens: TokenRows | None = None) -> NDArray[np.float32]:
        """Return a vector for each text: of norm 1, or zero for one of which the encoder reads no token."""
        batch_size = _BATCH if self.device.type == "cpu" else _GPU_BATCH
        source = EncoderInput(self._tokenizer, texts, longest=self._longest, tokens=tokens)
        order = np.argsort(np.fromiter(map(len, texts), np.int64, len(texts)), kind="stable")
        order = order[~source.is_empty()[order]]
        vectors = np.zeros((len(texts), self.dim), np.float32)
        reported = time.monotonic()
        waiting: tuple[NDArray[Any], torch.Tensor] | None = None
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            found = self.embed(*source.batch(rows))
            if waiting is not None:  # read one batch late, so that a GPU works while the next one is prepared
                vectors[waiting[0]] = waiting[1].cpu().numpy()
            waiting = rows, found
            if self._on_text is not None and time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                self._on_text(start + len(rows), len(order))
        if waiting is not None:
            vectors[waiting[0]] = waiting[1].cpu().numpy()
        return vectors

    @torch.inference_mode()
    def embed(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> torch.Tensor:
        """Return the vectors of one batch on the device."""
        real = self._moved(mask)
        states = self._model(input_ids=self._moved(ids), attention_mask=real).last_hidden_state.float()
        if self._record["pooling"] == "cls":
            pooled = states[:, 0]
        else:
            weights = real[..., None].float()
            pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
        return nn.functional.normalize(pooled, dim=-1)

    def _moved(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return the rows on the device. The host does not wait for a GPU, which may have work left."""
        tensor = torch.from_numpy(rows)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def _load(folder: Path) -> nn.Module:
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise UserError("Embedding texts needs transformers.", do="pip install 'crosstune[torch]'") from error
    for file in sorted(folder.glob("*.safetensors")):
        read_header(file)  # raises for a damaged file, which transformers does without its name
    with hide_output():
        model: nn.Module = AutoModel.from_pretrained(
            str(folder),
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    return model.eval().requires_grad_(False)
