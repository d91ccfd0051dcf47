"""Pictures on disk: one PNG each (animated where it has frames), and all of them on one sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

_FRAME_MILLISECONDS = 1000 // 16
_TILE_PIXELS = 128
_GAP_PIXELS = 8


def save_picture(frames: Sequence[Image.Image], path: Path) -> None:
    """Writes a PNG without loss; several frames become an animated one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = frames
    if others:
        first.save(path, save_all=True, append_images=others, duration=_FRAME_MILLISECONDS, loop=0)
    else:
        first.save(path)


def save_contact_sheet(files: Sequence[Path], path: Path) -> None:
    """Lays the pictures out in a grid, as square as their number allows, each scaled into one tile."""
    columns = math.ceil(math.sqrt(len(files)))
    step = _TILE_PIXELS + _GAP_PIXELS
    rows = math.ceil(len(files) / columns)
    sheet = Image.new("RGB", (columns * step + _GAP_PIXELS, rows * step + _GAP_PIXELS), "white")
    for number, file in enumerate(files):
        with Image.open(file) as picture:
            tile = picture.convert("RGB")
        tile.thumbnail((_TILE_PIXELS, _TILE_PIXELS))
        row, column = divmod(number, columns)
        sheet.paste(tile, (_GAP_PIXELS + column * step, _GAP_PIXELS + row * step))
    sheet.save(path)
