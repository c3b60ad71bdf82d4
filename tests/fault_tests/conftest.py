"""The report of the fault tests, shown and written at the end of the session."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fault_tests.report import FaultReport

# A test's rows travel with its result, from whichever process ran it.
PROPERTY = "fault_report"
_rows: dict[int, dict[str, Any]] = {}  # by the test's place among all tests


@pytest.fixture
def fault_report(request: pytest.FixtureRequest) -> Iterator[FaultReport]:
    """Where a test says which faults it has tried and what was lost (``report.py``)."""
    report = FaultReport()
    yield report
    request.node.user_properties.append((PROPERTY, (request.session.items.index(request.node), vars(report))))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _rows.update(rows for name, rows in report.user_properties if name == PROPERTY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    report = FaultReport()
    for place in sorted(_rows):
        report.extend(FaultReport(**_rows[place]))
    report.write()
    if text := report.markdown():
        terminalreporter.section("what was tried, and what was lost")
        terminalreporter.write_line(text)
