"""Attention operations; importing this package registers them."""

from model.attention import dense as dense
from model.attention import flash as flash
from model.attention import paged as paged
from model.attention import ring as ring
from model.attention import tokamax_attention as tokamax_attention
from model.attention import ulysses as ulysses
