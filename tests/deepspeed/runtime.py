"""Which runtime the operators are, by the environment: RUNTIME=penstock (default) or deepspeed.

A rank that waits for ever fails after two minutes, and says before where it is. Ranks compile by
themselves: of the processes that torch's compiler starts for it, 32 a rank, one that does not end
holds its rank up (for 300 s where the rank ends; pytorch/pytorch#189290).
"""

import faulthandler
import multiprocessing
import os

os.environ.setdefault("DEEPSPEED_TIMEOUT", "2")  # minutes; DeepSpeed reads it when it is imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if multiprocessing.parent_process() is not None:
    faulthandler.dump_traceback_later(110)

if os.environ.get("RUNTIME", "penstock") == "penstock":
    import penstock.deepspeed

    penstock.deepspeed.install()
