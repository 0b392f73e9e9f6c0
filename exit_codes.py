"""Exit codes of train.py and of the scripts."""

EXIT_DONE = 0
EXIT_FAILED = 1
"""Any error without a code of its own. A script that checks something: the check failed."""
EXIT_BAD_INPUT = 2
"""The user has to correct something; starting again does not help."""
EXIT_STOPPED = 75
"""Stopped by a signal; the same command goes on."""
EXIT_PROCESS_LOST = 76
"""A process died, hung or never connected; start all of them again."""
EXIT_DEVICE_FAULT = 77
"""A device computes wrongly; replace it first."""
