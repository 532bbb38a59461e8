"""DeepSpeed's tests start processes of their own: run them as its conftest does."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Let a distributed test launch its ranks."""
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: None


def pytest_runtest_logreport(report):
    """Show a failure at once, with what ranks have printed: a limit of time may end the run."""
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)
        print(report.capstderr[-20000:], flush=True)
