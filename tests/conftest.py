"""Shared set-up of all tests.

That this file is here also puts ``tests/`` on the import path: helpers among the tests are ``support.samples`` or
``conformance.host_docker``, for pytest and for mypy.
"""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A shell without job control starts what is in the background with SIGINT ignored, and children inherit that: tests
# that interrupt a program would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same code gives the same answer: whoever wants other examples sets GVX_RANDOM=1.
settings.register_profile("gvx", derandomize=not os.environ.get("GVX_RANDOM"), deadline=None)
settings.load_profile("gvx")
