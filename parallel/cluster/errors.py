"""Failures of a process group: the error, and the exit codes that restart scripts read."""

EXIT_MISMATCH = 2
"""Processes were started with different inputs; a restart does not help."""
EXIT_PROCESS_LOST = 76
"""A process died, hung or never connected; restart all of them."""


class ProcessGroupError(Exception):
    """The processes of a run cannot continue together.

    Attributes:
        exit_code: The code with which every process exits.
    """

    def __init__(self, reason: str, exit_code: int = EXIT_PROCESS_LOST):
        super().__init__(reason)
        self.exit_code = exit_code
