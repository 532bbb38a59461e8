"""Which runtime the operators are, by the environment: RUNTIME=penstock (default) or deepspeed.

A rank that waits for ever fails after two minutes, and says before where it is.
"""

import faulthandler
import multiprocessing
import os

os.environ.setdefault("DEEPSPEED_TIMEOUT", "2")  # minutes; DeepSpeed reads it when it is imported
if multiprocessing.parent_process() is not None:
    faulthandler.dump_traceback_later(110)

if os.environ.get("RUNTIME", "penstock") == "penstock":
    import penstock.deepspeed

    penstock.deepspeed.install()
