"""Text formats; importing the package registers them."""

from data.formats import json_files, records, text

__all__ = ["json_files", "records", "text"]
