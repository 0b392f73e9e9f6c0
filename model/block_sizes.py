"""Block sizes of an attention operation."""

from pydantic import BaseModel, PositiveInt


class BlockSizes(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Tokens per block of an attention operation that works in blocks."""

    block_q: PositiveInt | None = None
    """Queries in a block; null: the operation's default."""
    block_k: PositiveInt | None = None
    """Keys in a block; null: the operation's default."""
