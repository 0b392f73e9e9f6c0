"""Tokenizers; importing the package registers them."""

from data.tokenizers import byte_level, hugging_face

__all__ = ["byte_level", "hugging_face"]
