"""Size of a chunk of the loss: the number of tokens whose logits exist at a time.

The gradient of the head's kernel is added up over chunks in float32, so every chunk reads and
writes it once. Few large chunks are faster; they need more memory for logits.
"""

from model.config import ModelConfig
from parallel.sharding.axes import TP
from parallel.sharding.devices import CHIPS, Chip
from parallel.sharding.partition import PartitionManager

_SHARE_OF_MEMORY = 1 / 16
_WHERE_MEMORY_IS_UNKNOWN = 2048


def tokens_per_chunk(model: ModelConfig, manager: PartitionManager) -> int:
    """Return the tokens per chunk for all devices of tp together, on the devices of a mesh."""
    chip = CHIPS.get(manager.mesh.devices.flat[0].device_kind)
    return tokens_per_chunk_on(model, chip, manager.axis_size(TP))


def tokens_per_chunk_on(model: ModelConfig, chip: Chip | None, tp: int) -> int:
    """Return `model.loss_chunk`, or its default for a vocabulary that is split over tp.

    By default the float32 logits of a chunk take at most one sixteenth of the device memory, but
    a chunk has at least 256 tokens. The result is a power of two, because most batches are
    divisible by one.
    """
    if model.loss_chunk is not None:
        return model.loss_chunk
    if chip is None or not chip.hbm_bytes:
        return _WHERE_MEMORY_IS_UNKNOWN
    fitting = _SHARE_OF_MEMORY * chip.hbm_bytes / (4 * model.padded_vocab_size / tp)
    return 1 << max(int(fitting).bit_length() - 1, 8)
