"""Ranks as torchrun starts them, but forked when all is imported, which takes seconds.

python forked_ranks.py MODULE RANKS:FUNCTION ... ARGUMENT

Each function is called with the argument on so many ranks, one after the other.
"""

import atexit
import importlib
import os
import signal
import socket
import sys
import traceback


def run(ranks, function, argument):
    """Call a function on so many ranks; end with status 1 as soon as one fails."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    left = {start(rank, ranks, port, function, argument) for rank in range(ranks)}
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status != 0:
            for other in left:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank of {function.__name__} ended with status {status}")


def start(rank, ranks, port, function, argument):
    """Fork a rank; return the process."""
    child = os.fork()
    if child:
        return child
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="forked",
    )
    status = 1
    try:
        function(argument)
        atexit._run_exitfuncs()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main():
    """Run what the command line says."""
    name, *phases, argument = sys.argv[1:]
    module = importlib.import_module(name)
    for phase in phases:
        ranks, function = phase.split(":")
        run(int(ranks), getattr(module, function), argument)


if __name__ == "__main__":
    main()
