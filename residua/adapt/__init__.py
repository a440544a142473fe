"""Foreign models in: those of timm, torchvision, transformers, diffusers, or anyone's own."""

from .foreign import Foreign, encoder_of, untrained
from .model import blocks_of, fade, is_own, shortcuts, stream, tapped, unfade, unwrapped
from .names import is_name, open_model

__all__ = [
    "Foreign", "blocks_of", "encoder_of", "fade", "is_name", "is_own", "open_model", "shortcuts", "stream", "tapped",
    "unfade", "untrained", "unwrapped",
]  # fmt: skip
