"""Run every case on DeepSpeed's native module or on Penstock's, each in processes of its own.

With ``--module penstock`` a wrong case is a failure; with ``deepspeed`` the table says what is.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from cases import CASES
from surface import Surface

DEADLINE = 90  # seconds


def run_case(module: str, name: str) -> None:
    """Be a rank of one case; leave with its outcome."""
    try:
        CASES[name](Surface(module))
    except (AssertionError, RuntimeError) as error:
        print(f"wrong: {type(error).__name__}: {error}", flush=True)
        os._exit(1)
    print("right", flush=True)
    os._exit(0)  # a broken communicator may not end


def free_port() -> int:
    """Return a port for a rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def outcome(module: str, ranks: int, name: str) -> str:
    """Run a case in processes of its own; return a line about it."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, "--module", module, "--case", name],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    lines = [last_line(process) for process in processes]
    return next((line for line in lines if line != "right"), "right")


def last_line(process: subprocess.Popen) -> str:
    """Return how a rank ended."""
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"wrong: no end within {DEADLINE} s"
    lines = [line for line in output.splitlines() if line.startswith(("right", "wrong"))]
    if lines:
        return lines[-1]
    tail = " / ".join(output.strip().splitlines()[-3:])
    return f"wrong: ended with {process.returncode}: {tail}"


def main() -> int:
    """Be a rank, or run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", choices=("deepspeed", "penstock"), default="penstock")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--together", type=int, default=1, help="cases that run at once")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--case", choices=CASES, help="be a rank of this case")
    options = parser.parse_args()
    if options.case:
        run_case(options.module, options.case)
    with ThreadPoolExecutor(options.together) as pool:
        lines = pool.map(lambda name: outcome(options.module, options.ranks, name), options.only)
        wrong = 0
        for name, line in zip(options.only, lines, strict=True):
            print(f"{CASES[name].__doc__.split(':')[0].split()[0]:4} {name}: {line}", flush=True)
            wrong += line != "right"
    print(f"{module_name(options)}: {len(options.only) - wrong} right, {wrong} wrong")
    return int(options.module == "penstock" and wrong > 0)


def module_name(options: argparse.Namespace) -> str:
    """Return whose module ran."""
    return "DeepSpeed's module" if options.module == "deepspeed" else "Penstock"


if __name__ == "__main__":
    sys.exit(main())
