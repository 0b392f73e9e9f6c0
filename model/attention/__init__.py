"""Attention operations; importing this package registers them."""

from model.attention import dense as dense
from model.attention import splash as splash
