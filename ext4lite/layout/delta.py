"""The trailer of a delta file: a volume that keeps only what differs from another one (source: docs/delta.md)."""

from __future__ import annotations

from construct import Bytes, Int16ul, Int32ul, Int64sl, Int64ul, Struct

DELTA_HEADER = Struct(
    "d_magic" / Bytes(8),
    "d_checksum" / Int32ul,
    "d_version" / Int32ul,
    "d_sequence" / Int64ul,
    "d_id" / Bytes(16),
    "d_size" / Int64ul,
    "d_block_size" / Int32ul,
    "d_flags" / Int32ul,
    "d_base_uuid" / Bytes(16),
    "d_base_size" / Int64ul,
    "d_base_mtime_ns" / Int64sl,
    "d_base_super" / Int32ul,
    "d_path_len" / Int16ul,
    "d_relative_len" / Int16ul,
    "d_path" / Bytes(2000),
    "d_relative" / Bytes(2000),
)
"""One of the two copies of the header; the one with a right checksum and the higher sequence counts."""

DELTA_PAGE = Struct(
    "p_checksum" / Int32ul,
    "p_number" / Int32ul,
    "p_sequence" / Int64ul,
    "p_id" / Bytes(16),
    "p_bits" / Bytes(4064),
)
"""One of the two slots of a page of the bitmap."""
