"""Parquet to columns: our own formats alone."""

from __future__ import annotations

import numpy as np

from sim.errors import Fault, TraceError
from sim.workload.base import Floats
from sim.workload.trace.arrow import encoded
from sim.workload.trace.columns import Columns, RowFault, Texts
from sim.workload.trace.formats import FormatName, find_format


def read_parquet(content: bytes, name: FormatName, file: str) -> Columns:
    """Read a Parquet file of our own formats."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        source = pa.parquet.ParquetFile(pa.py_buffer(content))
        format_ = find_format(name, "table", source.schema_arrow.names, file, None)
        if not format_.parquet:
            raise TraceError(Fault(f"format '{format_.name}' is read from CSV only, this is Parquet", file))
        wanted = (format_.time, format_.prompt, format_.output, format_.domain, format_.tenant)
        names = [part for part in wanted if part and part in source.schema_arrow.names]
        table = source.read(columns=names)
        faults: list[RowFault] = []
        numbers: dict[str, Floats] = {}
        whole = np.ones(table.num_rows, bool)  # rows without a gap so far: one fault a row
        for part in names[:3]:
            column = table[part]
            if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
                raise TraceError(Fault(f"expected a column of numbers (got {column.type})", file, key=part))
            numbers[part] = column.cast(pa.float64()).to_numpy()
            absent = column.is_null().to_numpy() & whole
            whole &= ~absent
            faults += [RowFault(int(row) + 1, part, "missing_value", "missing") for row in np.flatnonzero(absent)]
        texts: dict[str | None, Texts] = {}
        for part in names[3:]:
            column = table[part]
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                raise TraceError(Fault(f"expected a column of text (got {column.type})", file, key=part))
            texts[part] = encoded(column.fill_null(""))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError):
        raise TraceError(Fault("damaged Parquet file", file)) from None
    kept = np.flatnonzero(whole)
    time, prompt, output = (numbers[part][kept] for part in names[:3])
    domain, tenant = (
        Texts(texts[part].index[kept], texts[part].names) if part in texts else None
        for part in (format_.domain, format_.tenant)
    )
    line = kept.astype(np.int64) + 1
    return Columns(format_, line, time, prompt, output, domain, tenant, table.num_rows, faults, numbered_by_row=True)
