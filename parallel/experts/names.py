"""Names of the options of expert layers; imports nothing, so that config classes can use them."""

from typing import Literal

ExchangeMethod = Literal["dense", "alltoall", "ragged"]
"""Method that brings tokens to experts on other devices.

dense: every expert computes every token. alltoall: every pair of devices exchanges buffers of equal
size. ragged: every pair of devices exchanges exactly the assigned rows (`ragged_all_to_all`)."""

RowDtype = Literal["float8_e4m3fn", "int8"]
"""Dtype in which rows travel to their experts, instead of their own."""

ExpertRule = Literal["split", "alt", "unified"]
"""Sharding rule of expert kernels.

split: experts over ep, embed over fsdp. alt: experts over ep, embed over fsdp and sp. unified:
experts over fsdp, sp and ep together, so that no kernel is gathered."""
