"""Parts of a training step, by the named scopes of its operations."""

from parallel.planning.parts import PartPattern

STEP_PARTS = (
    PartPattern(r"\bexperts\b|\bsparse_layers\b.*\bmlp\b", "experts"),
    PartPattern(r"\b(qkv|attention|o)[/)']", "attention"),
    PartPattern(r"\bmlp\b", "MLP"),
    PartPattern(r"\bembed\b", "embedding"),
    PartPattern(r"\b(head|loss)\b", "head and loss"),
    PartPattern(r"\b(optimizer|accumulate)\b", "optimizer"),
    PartPattern(r"\bnorm\b|\b(layers|mtp)\b.*/(closed_call|checkpoint)/", "norms and residual"),
    PartPattern(r"\b(layers|mtp)\b", "norms and residual", is_fallback=True),
    PartPattern(r"^jit\(step\)/jvp\(\)/|/transpose\(jvp\(\)\)/", "head and loss", is_fallback=True),
)
"""The experts come first: within them there are MLPs, and norms are within attention.

Outside of all scopes the derivative (`jvp`) has only the division of the loss by the tokens."""
