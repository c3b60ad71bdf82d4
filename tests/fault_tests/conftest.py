"""The report of the fault tests, shown and written at the end of the session."""

import pytest

from tests.fault_tests.report import FaultReport

_report = FaultReport()


@pytest.fixture(scope="session")
def fault_report() -> FaultReport:
    """Where a test says which faults it has tried and what was lost (``report.py``)."""
    return _report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _report.write()
    if text := _report.markdown():
        terminalreporter.section("what was tried, and what was lost")
        terminalreporter.write_line(text)
