from torchvision.absent import absent as __getattr__

__all__ = ["__getattr__"]
