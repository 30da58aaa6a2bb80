"""The bytes of a trace file: found, unpacked, decoded, or refused in one line."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from sim.errors import Fault, TraceError

_GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"


def read_content(path: Path) -> bytes:
    """Read a file whole; gzip is known by its first bytes, not by the name."""
    file = str(path)
    try:
        content = path.read_bytes()
    except OSError as fault:
        raise TraceError(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", file)) from None
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except EOFError:
            raise TraceError(Fault("truncated gzip file", file)) from None
        except (gzip.BadGzipFile, zlib.error):
            raise TraceError(Fault("damaged gzip file", file)) from None
    if not content.strip():
        raise TraceError(Fault("empty file; expected a trace", file))
    return content


def decode(content: bytes, file: str) -> str:
    """Decode UTF-8, with or without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = content.count(b"\n", 0, fault.start) + 1
        raise TraceError(Fault(f"not UTF-8 text (byte {content[fault.start]:#04x})", file, line)) from None
