"""The lease of a run in a bucket, which takes the place of a lock."""

import json
import os
import secrets
import socket
import sys
import time

from data.bucket_path import BucketPath
from parallel.cluster.config import ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from training.logs import log

# A lease that was not renewed for the time of expiry belongs to a process that is gone.
RENEW_SECONDS, EXPIRY_SECONDS, LOOK_SECONDS = 15.0, 75.0, 2.0
IN_USE_REMEDY = "stop that process, or use another run directory"


class Lease:
    """The right to write to a run in a bucket.

    Leases are objects with ascending numbers. The holder of the highest number writes the run, and
    renews its object. A process that finds it released or expired creates the next number; the
    service lets only one of them succeed. A process that was suspended finds a higher number, as a
    holder or after it has created its own. No clocks of two machines are compared.
    """

    def __init__(self, folder: BucketPath, folder_id: str):
        """Describe a lease that is not taken yet. folder_id: of the local folder, locked by us."""
        self.folder = folder
        self._owner = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "place": folder_id,
            "lease": secrets.token_hex(16),
        }
        self._number = self._renewals = 0
        self._renewed_at = _now()

    def acquire(self, group: ProcessGroup) -> None:
        """Take the lease; wait until that of a process that is gone expires.

        With several processes, wait also while it is renewed: a launcher may start them before
        those of an earlier attempt have ended.

        Raises: ValueError if another process renews it; ProcessGroupError if it does so for
        `cluster.start_timeout`.
        """
        deadline = time.monotonic() + group.config.start_timeout
        while True:
            numbers = self._numbers()
            seen = self._read(numbers[-1]) if numbers else None
            if seen is not None and not self._is_over(seen) and self._is_renewed(numbers[-1], seen):
                in_use = (
                    f"run.dir={str(self.folder).removesuffix('/lease')!r} is in use by process "
                    f"{seen.get('process')} of {seen.get('host')}"
                )
                if group.num_processes == 1:
                    raise ValueError(f"{in_use}; {IN_USE_REMEDY}")
                if time.monotonic() > deadline:
                    raise ProcessGroupError(f"{in_use}; stop that process")
                continue
            number, begin = (numbers[-1] if numbers else 0) + 1, _now()
            if self._path(number).create(self._content()):
                if max(self._numbers()) > number:  # taken since our list, which may be old
                    self._path(number).delete()
                    continue
                self._number, self._renewed_at = number, begin
                for old in numbers:
                    self._path(old).delete()
                return

    def renew(self) -> bool:
        """Renew the lease; return whether it is still ours. A bucket that fails changes nothing."""
        self._renewals, begin = self._renewals + 1, _now()
        try:
            found = self._read(self._number)
            is_ours = found is not None and found.get("lease") == self._owner["lease"]
            if not is_ours or any(number > self._number for number in self._numbers()):
                return False
            self._path(self._number).overwrite(self._content())
            self._renewed_at = begin
        except OSError as error:
            log.warning("%s was not renewed: %s", self.folder, error)
        return True

    def check(self) -> None:
        """Raise OSError if the lease was not renewed lately, so that another may have taken it."""
        if (seconds := _now() - self._renewed_at) > EXPIRY_SECONDS - RENEW_SECONDS:
            raise OSError(f"{self.folder} was not renewed for {seconds:.0f} s")

    def release(self) -> None:
        """Give the lease back; its number stays used."""
        try:
            self._path(self._number).overwrite(self._content(released=True))
        except OSError as error:
            log.warning("%s was not given back: %s", self.folder, error)

    def _is_over(self, seen: dict[str, object]) -> bool:
        """Return whether a lease was given back, or is of an earlier process with this folder.

        That is gone, because this process has locked the folder.
        """
        return bool(seen.get("released")) or seen.get("place") == self._owner["place"]

    def _is_renewed(self, number: int, seen: dict[str, object]) -> bool:
        """Return whether a lease is renewed within the time of expiry, and not given back."""
        sys.stderr.write(
            f"{self.folder} is held by process {seen.get('process')} of {seen.get('host')}; "
            f"waiting up to {EXPIRY_SECONDS:.0f} s to see whether it still runs\n"
        )
        end = time.monotonic() + EXPIRY_SECONDS
        while time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            now = self._read(number)
            if now is None or now.get("released"):
                return False
            if now != seen:
                return True
        return False

    def _path(self, number: int) -> BucketPath:
        return self.folder / f"{number:08}.json"

    def _numbers(self) -> list[int]:
        names = (path.name.removesuffix(".json") for path in self.folder.iterdir())
        return sorted(int(name) for name in names if name.isdecimal())

    def _read(self, number: int) -> dict[str, object] | None:
        try:
            found = json.loads(self._path(number).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    def _content(self, *, released: bool = False) -> bytes:
        state = {"renewals": self._renewals, "released": released}
        return json.dumps({**self._owner, **state}).encode()


def _now() -> float:
    """Return seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
