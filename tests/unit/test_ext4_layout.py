"""The generated codecs are what the construct definitions say, and short commands do without construct."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from typing import Any

import pytest

from ext4lite.layout import _codecs, directory, generate


@pytest.mark.parametrize("name", generate.DEFINITIONS)
def test_codec_agrees_with_construct(name: str) -> None:
    definition: Any = generate.DEFINITIONS[name]
    codec: Any = getattr(_codecs, name)
    assert definition.sizeof() == codec.SIZE == codec.STRUCT.size
    r = random.Random(name)
    for _ in range(20):
        data = r.randbytes(codec.SIZE)
        parsed = definition.parse(data)
        ours = codec.unpack(b"before" + data, 6)
        for field in generate.fields_of(definition):
            value = parsed[field.name]
            assert getattr(ours, field.name) == (tuple(value) if field.count else value), field.name
        assert ours.pack() == data == definition.build(parsed)


def test_codecs_are_up_to_date() -> None:
    assert generate.TARGET.read_text() == generate.module_source(), "run python -m ext4lite.layout.generate"


def test_codec_sizes_are_those_of_the_format() -> None:
    sizes = {
        "SuperBlock": 1024,
        "GroupDesc32": 32,
        "GroupDesc": 64,
        "InodeSmall": 128,
        "Inode": 160,
        "ExtentHeader": 12,
        "ExtentIdx": 12,
        "Extent": 12,
        "DirEntryTail": 12,
        "XattrHeader": 32,
        "XattrEntryHeader": 16,
        "JournalSuperBlock": 1024,
    }
    assert {name: getattr(_codecs, name).SIZE for name in sizes} == sizes
    assert _codecs.SuperBlock.OFFSET_s_checksum == 0x3FC
    assert _codecs.JournalSuperBlock.OFFSET_s_checksum == 0xFC
    assert _codecs.Inode.OFFSET_l_i_checksum_lo == 0x7C
    assert _codecs.Inode.OFFSET_i_checksum_hi == 0x82


def test_unpack_of_too_few_bytes_fails() -> None:
    with pytest.raises(struct.error):
        _codecs.Inode.unpack(bytes(159))


def test_variable_structures_are_refused_by_the_generator() -> None:
    with pytest.raises(TypeError, match="variable"):
        generate.codec_source("DirEntry", directory.DIR_ENTRY)


@pytest.mark.parametrize("module", ["volume", "builder", "manifest", "inspect", "clone", "mkfs", "blockdev"])
def test_import_needs_no_construct(module: str) -> None:
    code = f"import ext4lite.{module}, sys;"
    code += "sys.exit(any(m in sys.modules for m in ('construct', 'typer', 'rich', 'cffi')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
