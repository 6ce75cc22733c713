#!/usr/bin/env python3
"""Reads the Parquet files that hbmark writes with pyarrow, and holds every cell against the CSV of the same result.

    scripts/check_parquet.py HBMARK RESULT...

RESULT is a file or a folder, as for `hbmark report`. Needs pyarrow.
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet


def same(value, text: str) -> bool:
    """Whether a typed value is what the CSV says; a number of which only a bound is known is null."""
    if value is None:
        return text == "" or text.startswith(">")
    return float(text) == value if isinstance(value, float) else str(value) == text


def check(hbmark: str, result: str, folder: Path) -> str:
    file = folder / "rows.parquet"
    subprocess.run([hbmark, "report", result, "--parquet", file], check=True)
    text = subprocess.run([hbmark, "report", result, "--format", "csv"], check=True, capture_output=True, text=True).stdout
    head, *rows = csv.reader(text.splitlines())
    table = pyarrow.parquet.read_table(file)
    assert table.column_names == head, f"{result}: columns {table.column_names}, in the CSV {head}"
    assert table.num_rows == len(rows) > 0, f"{result}: {table.num_rows} rows, in the CSV {len(rows)}"
    for name, texts in zip(head, zip(*rows)):
        for row, (value, text) in enumerate(zip(table.column(name).to_pylist(), texts)):
            assert same(value, text), f"{result}, {name}, row {row}: {value!r}, in the CSV {text!r}"
    return f"{result}: {table.num_rows} rows of {len(head)} columns are those of the CSV"


def main() -> None:
    hbmark, *results = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for result in results:
            print(check(hbmark, result, Path(folder)))


main()
