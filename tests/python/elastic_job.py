"""A rank of test_elastic.py's job: examples/elastic.py, but one machine of the two is lost."""

import os
import signal
import sys
import time
from pathlib import Path

import elastic


def lose_machine(step, folder, draw=elastic.draw):
    """Draw a step's rows; in the fourth, the doomed machine ends: its torchrun and its rank."""
    if step == 3 and "DOOMED" in os.environ:
        (folder / "lost").write_text(os.environ["RANK"])
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(step)


def main():
    folder = Path(sys.argv[sys.argv.index("--output") + 1])
    while os.environ["WORLD_SIZE"] == "1" and not (folder / "lost").exists():
        time.sleep(0.1)  # the other machine is about to join, and torchrun starts all ranks anew
    elastic.draw = lambda step: lose_machine(step, folder)
    elastic.main()


if __name__ == "__main__":
    main()
