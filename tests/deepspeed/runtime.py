"""Which runtime the operators are, by the environment: RUNTIME=penstock (default) or deepspeed."""

import os

if os.environ.get("RUNTIME", "penstock") == "penstock":
    import penstock.deepspeed

    penstock.deepspeed.install()
