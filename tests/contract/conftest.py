"""Models that several contract tests quantize, and pages that they follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import Followed, Workshop, open_workshop, put_tiny_model


@pytest.fixture(scope="module")
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A folder with the files of the test's PAGE in it."""
    with open_workshop(tmp_path_factory.mktemp("page"), request.module.PAGE) as workshop:
        yield workshop


@pytest.fixture(scope="module")
def followed(request: pytest.FixtureRequest, shop: Workshop) -> Followed:
    return Followed(shop, request.module.PAGE)


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which a tiny model takes the place of the bundled one, which is the default."""
    return put_tiny_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def block() -> Any:
    """A plain torch model."""
    import torch
    from quantization_cases import Block

    torch.manual_seed(0)
    return Block()


@pytest.fixture
def llama(tiny_model: Path) -> Any:
    """The tiny model, loaded by transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model)
