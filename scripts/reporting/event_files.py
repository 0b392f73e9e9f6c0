"""Images in TensorBoard event files, found without decoding the scalars between them."""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event

_HEADER = struct.Struct("<QI")  # length of a record, and a checksum of it; another follows the data
_FOOTER_BYTES = 4
_PNG = b"\x89PNG"


def read_images(folder: Path, tag: str) -> dict[int, bytes]:
    """Return the PNG images of a tag by step; of a step that was written twice, the later one.

    A file that a crash left incomplete is read up to there.
    """
    found = dict[int, bytes]()
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime):
        for record in _image_records(path):
            try:
                event = Event.FromString(record)
            except DecodeError:
                break
            for value in event.summary.value:
                if value.tag == tag and value.HasField("image"):
                    found[event.step] = value.image.encoded_image_string
    return dict(sorted(found.items()))


def _image_records(path: Path) -> Iterator[bytes]:
    """Yield the records of an event file that hold a PNG image."""
    if not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        position, size, image = 0, len(content), content.find(_PNG)
        while image >= 0 and position + _HEADER.size <= size:
            begin = position + _HEADER.size
            end = begin + _HEADER.unpack_from(content, position)[0]
            position = end + _FOOTER_BYTES
            if end > size:
                return
            if image < end:
                yield content[begin:end]
                image = content.find(_PNG, end)
