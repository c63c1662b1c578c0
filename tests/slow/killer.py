"""Trains in a child process that is killed at random moments, again and again, until a run is finished.

    killer.py FOLDER KILLS SEED     prints how many kills hit a run that was under way

The child is forked after the imports, so that a kill and a resume cost little more than the training itself.
"""

import os
import random
import signal
import sys
import time

from tests.engine import driver

STEPS = 240
SETTINGS = {"steps": STEPS, "checkpoint_every_steps": 2, "validate_every_steps": 10, "log_every_steps": 5}


def child(folder: str) -> int:
    """Train in a fork; returns its process id."""
    pid = os.fork()
    if pid == 0:
        # A fork must not run the parent's clean-up, whatever happens.
        try:
            driver.train(folder, **SETTINGS)
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def main() -> None:
    """Kill while kills are left, then let the run end."""
    folder, kills, moments = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
    hits = 0
    for _ in range(kills):
        pid = child(folder)
        time.sleep(moments.uniform(0.02, 0.6))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        hits += os.WIFSIGNALED(status)
    _, status = os.waitpid(child(folder), 0)
    sys.stdout.write(f"{hits}\n")
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
