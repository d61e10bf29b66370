"""Reading GGUF files, the broken ones above all."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.executor.native.kernel_lab import write_tiny_gguf
from tokenloom.common.gguf_file import GgufError, GgufFile
from tokenloom.executor.native.library import Format


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", Format.Q8_0).read_bytes()


def read(folder: Path, content: bytes, *wanted: str) -> GgufFile:
    path = folder / "some.gguf"
    path.write_bytes(content)
    return GgufFile(path, wanted)


def test_it_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    import gguf

    path = write_tiny_gguf(tmp_path / "tiny.gguf", Format.Q4_1)
    ours, theirs = GgufFile(path), gguf.GGUFReader(str(path))
    assert ours.fields["llama.embedding_length"] == 64
    assert ours.fields["general.architecture"] == "llama"
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.type_name == tensor.tensor_type.name
        assert bytes(mine.data) == tensor.data.view(np.uint8).tobytes()


def field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def file_of(*fields: bytes, num_fields: int | None = None, num_tensors: int = 0, tail: bytes = b"") -> bytes:
    count = len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(fields) + tail


def strings(*texts: str) -> bytes:
    parts = (struct.pack("<Q", len(text)) + text.encode() for text in texts)
    return struct.pack("<IQ", 8, len(texts)) + b"".join(parts)


def test_arrays_are_read_only_if_wanted(tmp_path: Path) -> None:
    numbers = field("n", 9, struct.pack("<IQ3i", 5, 3, 7, -8, 9))
    content = file_of(field("s", 9, strings("a", "bc")), numbers, field("last", 4, struct.pack("<I", 5)))
    assert read(tmp_path, content).fields == {"last": 5}
    assert read(tmp_path, content, "s", "n").fields == {"s": ["a", "bc"], "n": [7, -8, 9], "last": 5}
    assert GgufFile(tmp_path / "some.gguf", None).fields == {"s": ["a", "bc"], "n": [7, -8, 9], "last": 5}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GGUX" + bytes(20), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (file_of(num_fields=1 << 60), "more than a file can hold"),
        (file_of(num_fields=1), "ends too early"),
        (file_of(struct.pack("<Q", 1 << 50)), "a name of"),
        (file_of(field("a", 99, b"")), "type 99"),
        (file_of(field("a", 8, struct.pack("<Q", 1 << 62))), "ends too early"),
        (file_of(field("a", 9, struct.pack("<IQ", 4, 1 << 62))), "longer than the file"),
        (file_of(field("a", 9, struct.pack("<IQQ", 8, 2, 1 << 63))), "a string ends behind"),
        (file_of(field("general.alignment", 4, bytes(4))), "alignment 0"),
        (file_of(num_tensors=1, tail=struct.pack("<QcI", 1, b"t", 77)), "77 dimensions"),
        (file_of(num_tensors=1, tail=struct.pack("<QcIQIQ", 1, b"t", 1, 33, 8, 0)), "not whole blocks"),
        (file_of(num_tensors=1, tail=struct.pack("<QcIQQIQ", 1, b"t", 2, 32, 1 << 62, 8, 0)), "ends behind the end"),
        (file_of(num_tensors=1, tail=struct.pack("<QcIQIQ", 1, b"t", 1, 32, 0, (1 << 64) - 1)), "ends behind the end"),
    ],
)
def test_broken_files_are_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(GgufError, match=reason):
        read(tmp_path, content)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cut_and_changed_files_raise_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    content = bytearray(whole[: data.draw(st.integers(1, len(whole)))])
    for _ in range(data.draw(st.integers(0, 6))):
        content[data.draw(st.integers(0, min(len(content), 4000) - 1))] = data.draw(st.integers(0, 255))
    try:
        file = read(tmp_path_factory.mktemp("broken"), bytes(content))
    except GgufError:
        return
    assert all(tensor.data.nbytes <= len(content) for tensor in file.tensors.values())
