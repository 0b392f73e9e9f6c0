"""Text formats; importing the package registers them."""

from data.formats import records, text

__all__ = ["records", "text"]
