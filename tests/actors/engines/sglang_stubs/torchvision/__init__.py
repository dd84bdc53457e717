"""A fake: stands in for torchvision, whose ordinary wheels are for CUDA. SGLang imports names of it, for images."""

from torchvision import io, transforms

__version__ = "0.0.0"
__all__ = ["io", "transforms"]
