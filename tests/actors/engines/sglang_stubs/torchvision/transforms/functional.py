from __future__ import annotations

from enum import Enum

from torchvision.absent import absent as __getattr__

__all__ = ["InterpolationMode", "__getattr__"]


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
