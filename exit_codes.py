"""Exit codes of train.py and of the scripts; a process that signal n ends has 128 + n."""

EXIT_DONE = 0
EXIT_FAILED = 1
"""An error without a code of its own; for a script that checks something, also a failed check."""
EXIT_BAD_INPUT = 2
"""The user has to correct something; a restart does not help."""
EXIT_STOPPED = 75
"""Stopped by a signal; the same command continues."""
EXIT_PROCESS_LOST = 76
"""A process died, hung or never connected; start all of them again."""
EXIT_DEVICE_FAULT = 77
"""A device computes wrongly; replace it before a restart."""
