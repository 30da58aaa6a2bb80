"""Reading recorded traffic: each published format by its own header or field names, with the unit that format has.

Start with `formats` (a table), then `trace` (what a caller gets and what is checked). `content` turns bytes to text;
`csv_file`, `jsonl` and `parquet` turn a file to `columns`, with the line of every fault.
"""
