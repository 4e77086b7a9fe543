"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell's background job is deaf to Ctrl-C, and so is all that it starts; what is tested here must hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
