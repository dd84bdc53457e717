from torchvision.absent import absent as __getattr__
from torchvision.transforms import functional
from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode", "__getattr__", "functional"]
