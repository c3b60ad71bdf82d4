"""A report of finished runs: the paper's tables and figures, beside the paper's values.

    run folders -> read and judged -> one experiment -> tables, figures -> report.md and report.html

reading.py      one run's folder: what it is, its events, whether it is whole
experiment.py   which run is which, by its manifest; refuses runs that cannot be compared
table.py        a table, as CSV, JSON, Markdown and HTML; mean and standard deviation over seeds
losses.py       Tables 1, 2, 3, A2, A3, and of variants
internals.py    Tables 4 and A4
style.py        colours, markers and files of all figures
curves.py       Figures 3a, 3b, 5b
states.py       Figures 4, 5a, A1, A2
page.py         report.md and report.html
write.py        a folder that appears whole and replaces nothing but a report
paper.py        the paper's numbers
"""
