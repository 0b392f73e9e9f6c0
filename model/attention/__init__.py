"""Attention operations; importing this package registers them, the oracle first."""

from model.attention import dense as dense

# isort: split
from model.attention import blocksparse as blocksparse
from model.attention import flash as flash
from model.attention import paged as paged
from model.attention import ring as ring
from model.attention import splash as splash
from model.attention import ulysses as ulysses
