"""Timeouts of a run with several processes, and its error."""

from pydantic import BaseModel, PositiveInt

from exit_codes import EXIT_PROCESS_LOST


class ClusterConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Timeouts of a run and among its processes, in seconds."""

    start_timeout: PositiveInt = 300
    """Time for all processes to connect; then the missing ones are named and the run exits with
    code 76."""
    peer_timeout: PositiveInt = 60
    """Time without a heartbeat after which a process counts as lost. A process that is killed is
    noticed at once."""
    stall_timeout: PositiveInt = 1800
    """Time without progress after which the run exits with code 76, also if it has one process. It
    must exceed the longest training step, compilation, evaluation, sample, recheck and save, and
    the reading of the first state, of any process. Every process then writes the stacks of its
    threads to stacks.txt (process N: stacks.N.txt) in the run directory."""


class ProcessGroupError(Exception):
    """The processes of a run cannot continue together.

    Attributes:
        exit_code: The code with which every process exits; never 0.
    """

    def __init__(self, reason: str, exit_code: int = EXIT_PROCESS_LOST):
        assert exit_code != 0
        super().__init__(reason)
        self.exit_code = exit_code
