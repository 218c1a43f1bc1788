"""Run directories -> tables, plots and one HTML page.

What belongs here: reading what finished runs left behind, comparing them, and showing the
comparison. What does not: running or measuring anything, and knowledge of any method or engine. A
report reads run directories alone.
"""

from archipel.report.comparison import as_json, record, rows, target_loss, time_to_target_s
from archipel.report.page import write, write_page
from archipel.report.results import ReportError, Result, distinguish, find, load
from archipel.report.words import changes, headline, incidents, shared_changes, table

__all__ = [
    "ReportError",
    "Result",
    "as_json",
    "changes",
    "distinguish",
    "find",
    "headline",
    "incidents",
    "load",
    "record",
    "rows",
    "shared_changes",
    "table",
    "target_loss",
    "time_to_target_s",
    "write",
    "write_page",
]
