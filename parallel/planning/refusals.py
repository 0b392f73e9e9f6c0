"""Errors for lack of device memory, read from the messages of XLA.

libtpu refuses to compile a program that does not fit. Elsewhere the allocation fails while the
program runs. Both messages may list the largest buffers with the operations that make them.
"""

import re

from parallel.planning.memory import Buffer, MemoryUse, is_backward, named_scopes

_SIZE = r"([\d.]+)([BKMGT]?)"
# The short form comes from a check before scheduling, the long form from the allocation after it.
_HBM = (
    re.compile(rf"memory required[^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_SPACE = re.compile(r"Ran out of memory in memory space (\w+)")
# A buffer in the list of libtpu ("Size: 2.00G") and in that of XLA for GPUs ("Size: 96.00MiB").
_LISTED = re.compile(
    r"Size: (?P<size>[\d.]+)(?P<unit>[KMGT]?)i?B?\s*\n"
    r'\s*Operator: op_name="(?P<op_name>[^"]*)"[^\n]*\n'
    r"(?:\s*XLA Label:[^\n]*\n)?"
    r"\s*Shape: (?P<shape>\S+)"
)
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfMemory(ValueError):
    """A program that needs more device memory (HBM) than a chip has.

    Attributes:
        required: Bytes per device that it needs, arguments included; None if libtpu does not say.
        available: Bytes per device that programs can use; None if libtpu does not say.
        sentence: The sentence of libtpu.
        memory: What one device would hold, by class; None if libtpu does not say.
    """

    def __init__(
        self,
        sentence: str,
        required: float | None,
        available: float | None,
        memory: MemoryUse | None = None,
    ):
        super().__init__(
            f"the program does not fit: {sentence} Split its arrays over more devices, keep fewer "
            "of them, or name a slice whose chips have more memory"
        )
        self.sentence, self.required, self.available = sentence, required, available
        self.memory = memory


class OutOfKernelMemory(ValueError):
    """A kernel whose blocks need more on-chip memory (VMEM, SMEM) than a chip has."""


def read_refusal(message: str) -> OutOfMemory | OutOfKernelMemory | None:
    """Return the exception for a message of libtpu, or None if memory is not what it is about."""
    if not message.startswith("RESOURCE_EXHAUSTED"):
        return None
    sentence = _first_sentence(message)
    for form in _HBM:
        if found := form.search(message):
            required, available = (
                float(found[i]) * _UNITS[found[i + 1]] for i in range(1, len(found.groups()), 2)
            )
            return OutOfMemory(sentence, required, available)
    space = _SPACE.search(message)
    if space is None or space[1] == "hbm":
        return OutOfMemory(sentence, None, None)
    kernel = re.search(r'op_name="([^"]+)"', message)
    where = f" ({kernel[1]})" if kernel else ""
    return OutOfKernelMemory(
        f"a kernel{where} needs too much on-chip memory: {sentence} Choose smaller blocks for it, "
        "or another implementation"
    )


def read_largest_buffer(message: str) -> Buffer | None:
    """Return the largest buffer that a message of XLA lists; None if it lists none with its name.

    Arguments of the program are listed without an operation, and left out.
    """
    found = [
        Buffer(
            shape=entry["shape"].partition("{")[0],
            bytes=int(float(entry["size"]) * _UNITS[entry["unit"]]),
            count=1,
            kind="temporaries",
            scope=named_scopes(entry["op_name"]),
            is_backward=is_backward(entry["op_name"]),
        )
        for entry in _LISTED.finditer(message)
    ]
    return max(found, key=lambda buffer: buffer.bytes, default=None)


def _first_sentence(message: str) -> str:
    """Return the line of a message that says what ran out, without status codes."""
    line = message.partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
    line = re.sub(r"^E\d{4}: \w+: ", "", line)  # the code of an error, in newer versions of XLA
    line = line.removeprefix("XLA:TPU compile permanent error. ").strip()
    return line if line.endswith(".") else f"{line}."
