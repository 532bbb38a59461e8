"""Penstock inside asyncio: coroutines await tasks, and no thread is Penstock's own.

The event loop watches the descriptor of ``pst_fd`` and turns the runtime when it is readable;
``pst_timeout`` says when to look again at what is launched and has not ended. ctypes is all it
needs: give the shared library's path as the argument (default: the one that the system knows).

    python3 examples/embed_asyncio.py build/libpenstock.so
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import sys
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p

OK, ESYSTEM = 0, -13
PUMPED = 2
GROWING = 1

Start = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)
Test = ctypes.CFUNCTYPE(c_int, c_void_p)
Done = ctypes.CFUNCTYPE(None, c_void_p, c_int)


class Task(ctypes.Structure):
    """``pst_task``."""

    _fields_ = (("graph", c_void_p), ("id", c_uint64))


class Launch(ctypes.Structure):
    """``pst_launch``."""

    _fields_ = (("graph", c_void_p), ("number", c_uint64))


class LaneOptions(ctypes.Structure):
    """``pst_lane_options``."""

    _fields_ = (
        ("size", c_size_t),
        ("name", c_char_p),
        ("device", c_void_p),
        ("stream", c_void_p),
        ("mode", c_int),
        ("share_with", c_void_p),
        ("order", c_int),
        ("priority", c_int),
        ("order_with", c_void_p),
    )


class Work(ctypes.Structure):
    """``pst_work``."""

    _fields_ = (("start", Start), ("test", Test), ("argument", c_void_p))


class TaskOptions(ctypes.Structure):
    """``pst_task_options``."""

    _fields_ = (
        ("size", c_size_t),
        ("name", c_char_p),
        ("lane", c_void_p),
        ("work", Work),
        ("after", POINTER(Task)),
        ("after_count", c_size_t),
        ("after_events", c_void_p),
        ("after_event_count", c_size_t),
        ("done", Done),
        ("done_argument", c_void_p),
        ("ticket", c_uint64),
        ("bytes", c_uint64),
        ("priority", c_int),
        ("path", c_char_p),
    )


def load(path: str | None) -> ctypes.CDLL:
    """Load the library and declare the functions that are used here."""
    library = ctypes.CDLL(path or ctypes.util.find_library("penstock") or "libpenstock.so.0")
    library.pst_timeout.restype = c_int64
    for name, *arguments in (
        ("pst_runtime_create", c_void_p, POINTER(c_void_p)),
        ("pst_runtime_destroy", c_void_p),
        ("pst_runtime_error", c_void_p, c_char_p, c_size_t),
        ("pst_fd", c_void_p, POINTER(c_int)),
        ("pst_timeout", c_void_p),
        ("pst_run_once", c_void_p, POINTER(c_int)),
        ("pst_lane_create", c_void_p, POINTER(LaneOptions), POINTER(c_void_p)),
        ("pst_graph_create", c_void_p, c_int, c_char_p, POINTER(c_void_p)),
        ("pst_graph_add", c_void_p, POINTER(TaskOptions), POINTER(Task)),
        ("pst_graph_add_gate", c_void_p, c_char_p, POINTER(Task)),
        ("pst_gate_open", Launch, Task, c_void_p),
        ("pst_task_release", Task),
    ):
        getattr(library, name).argtypes = arguments
    return library


class Runtime:
    """A runtime with one pumped lane and one growing graph, driven by the running event loop."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.loop = asyncio.get_running_loop()
        self.again: asyncio.TimerHandle | None = None
        self.callbacks: dict[asyncio.Future[None], tuple[Start, Done]] = {}
        self.handle, self.lane, self.graph = c_void_p(), c_void_p(), c_void_p()
        self.check(library.pst_runtime_create(None, self.handle))
        options = LaneOptions(size=ctypes.sizeof(LaneOptions), name=b"python", mode=PUMPED)
        self.check(library.pst_lane_create(self.handle, options, self.lane))
        self.check(library.pst_graph_create(self.handle, GROWING, b"coroutines", self.graph))
        descriptor = c_int()
        self.check(library.pst_fd(self.handle, descriptor))
        self.descriptor = descriptor.value
        self.loop.add_reader(self.descriptor, self.turn)

    def check(self, status: int) -> None:
        """Raise what the runtime says about an error."""
        if status == OK:
            return
        text = ctypes.create_string_buffer(512)
        if self.handle:
            self.library.pst_runtime_error(self.handle, text, len(text))
        raise RuntimeError(f"status {status}: {text.value.decode()}")

    def turn(self) -> None:
        """Do what can be done now, and come back when pst_timeout says so."""
        if self.again is not None:
            self.again.cancel()
            self.again = None
        self.library.pst_run_once(self.handle, None)
        bound = self.library.pst_timeout(self.handle)
        if bound >= 0:
            self.again = self.loop.call_later(bound / 1e9, self.turn)

    def gate(self, name: bytes) -> Task:
        """Add a gate, which any thread may open."""
        gate = Task()
        self.check(self.library.pst_graph_add_gate(self.graph, name, gate))
        return gate

    def open(self, gate: Task) -> None:
        """Open a gate and give its handle back."""
        self.check(self.library.pst_gate_open(Launch(self.graph, 0), gate, None))
        self.library.pst_task_release(gate)

    def submit(
        self, name: bytes, work: Callable[[], None], after: Task | None = None
    ) -> asyncio.Future[None]:
        """Add a task; the future is done when the task is."""
        future = self.loop.create_future()

        def start(_argument: int, _stream: int) -> int:
            try:
                work()
            except Exception as error:
                future.set_exception(error)
                return ESYSTEM
            return OK

        def done(_argument: int, status: int) -> None:
            # This very function runs just now, so that it is kept until the loop's next turn.
            self.loop.call_soon(self.callbacks.pop, future)
            if status == OK:
                future.set_result(None)
            elif not future.done():
                future.set_exception(RuntimeError(f"{name.decode()} ended with status {status}"))

        self.callbacks[future] = (Start(start), Done(done))
        before = (Task * 1)(after) if after is not None else None
        options = TaskOptions(
            size=ctypes.sizeof(TaskOptions),
            name=name,
            lane=self.lane,
            work=Work(start=self.callbacks[future][0]),
            after=before,
            after_count=0 if before is None else 1,
            done=self.callbacks[future][1],
        )
        self.check(self.library.pst_graph_add(self.graph, options, None))
        return future

    def close(self) -> None:
        """Take the runtime out of the loop and destroy it."""
        self.loop.remove_reader(self.descriptor)
        if self.again is not None:
            self.again.cancel()
        self.library.pst_runtime_destroy(self.handle)


async def main(path: str | None) -> None:
    """Await tasks behind gates that another thread opens while the loop sleeps."""
    runtime = Runtime(load(path))
    values: list[int] = []
    gates = [runtime.gate(b"opened by a thread") for _ in range(3)]
    futures = [
        runtime.submit(b"append", lambda i=i: values.append(i * i), gate)
        for i, gate in enumerate(gates)
    ]

    def open_all() -> None:
        for gate in gates:
            runtime.open(gate)

    thread = threading.Thread(target=open_all)
    thread.start()
    await asyncio.gather(*futures)
    await runtime.submit(b"append", lambda: values.append(sum(values)))
    thread.join()
    print("values:", *values)
    try:
        await runtime.submit(b"fail", lambda: values.remove(77))
    except ValueError as error:
        print("an exception comes through:", error)
    runtime.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
