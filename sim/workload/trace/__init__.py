"""Reading recorded traffic: each published format by its own header or field names, with the unit that format has.

Start with `formats` (a table), then `trace` (what a caller gets and what is checked), `columns` (CSV, JSONL, Parquet to
columns, with the line of every fault) and `content` (bytes to text).
"""
