"""Start every child process with default signal handlers, also where the test run itself ignores signals.

A shell starts a background job with SIGINT and SIGQUIT ignored, and ``nohup`` ignores SIGHUP. Child processes inherit
ignored signals but not handlers, so a handler here gives them the default.
"""

from __future__ import annotations

import signal

_INHERITED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)


def pytest_sessionstart() -> None:
    """Replace ignored signals by handlers; SIGINT raises KeyboardInterrupt, the others still do nothing here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in _INHERITED:
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
