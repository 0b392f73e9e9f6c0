"""Data-sheet figures of accelerators, by the name that jax gives a device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Data-sheet figures of one device as jax counts devices."""

    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    hbm_bandwidth: float = 0.0
    """Bytes/s of device memory."""
    ici_bandwidth: float = 0.0
    """Bytes/s in one direction of one link to a torus neighbour; 0: no torus."""
    clock_hz: float = 0.0
    """Clock in which the compiler counts cycles: peak / (MXUs * 128 * 128 * 2); 0: it does not."""
    wrap: int = 0
    """Sides of a slice that are a multiple of this have wrap-around links; 0: no side has them."""
    dcn_bandwidth: float = 0.0
    """Bytes/s in one direction to other slices, as this device's share of its host; 0: unknown."""


# Keys are jax's device_kind. TPU: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e pages). Links: the
# table of "How to Scale Your Model" (jax-ml.github.io/scaling-book), 45 and 90 GB/s, where Google's
# pages give a nominal 50 and 100. GPU: NVIDIA A100, H100 SXM and H200 data sheets, dense figures.
# All read in November 2026. wrap: v4 and v5p slices are cubes of 4 with optical faces; v5e and v6e
# wrap at the 16 of a pod, and libtpu 0.0.42 refuses any other size for v5e. DCN: Google's pages
# give 6.4 and 25.6 Tbit/s per pod of 256 (v5e, v6e); v4 and v5p: the book's 25 GB/s per host of 4.
CHIPS: dict[str, Chip] = {
    "TPU v4": Chip(275e12, 1.2e12, 45e9, 1.05e9, 4, 6.25e9),
    "TPU v5 lite": Chip(197e12, 0.82e12, 45e9, 1.5e9, 16, 3.125e9),
    "TPU v5": Chip(459e12, 2.765e12, 90e9, 1.75e9, 4, 6.25e9),
    "TPU v6 lite": Chip(918e12, 1.64e12, 90e9, 1.75e9, 16, 12.5e9),
    "NVIDIA A100-SXM4-80GB": Chip(312e12, 2.039e12),
    "NVIDIA H100 80GB HBM3": Chip(989e12, 3.35e12),
    "NVIDIA H200": Chip(989e12, 4.8e12),
}
