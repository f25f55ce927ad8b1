"""Read the number of new blocks from the name of a block-expanded model folder."""

from __future__ import annotations

import re


def read_expanded_name(folder_name: str) -> tuple[int, int] | None:
    """Return the old and the new number of blocks of a folder named ..._blk_exp-OLD-NEW, as other tools name them."""
    match = re.search(r"_blk_exp-(\d+)-(\d+)$", folder_name)
    return (int(match.group(1)), int(match.group(2))) if match else None
