"""``python child.py FD COMMAND…`` runs a command and writes its times and its peak memory as JSON to a descriptor.

A process of its own, and a small one: what a child takes is counted from its parent's size on, since it begins as a
copy of it. So nothing below about 10 MB is told apart.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time


def main() -> None:
    """Run it; the exit code is the command's."""
    fd = int(sys.argv[1])
    start = time.perf_counter()
    code = subprocess.call(sys.argv[2:])
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss * 1024}
    os.write(fd, json.dumps(found).encode())
    sys.exit(code)


if __name__ == "__main__":
    main()
