"""GGUF tensors equal the gguf package's, and damaged files are refused in one line."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.errors import CheckpointError
from jaxpage.formats.gguf_io import is_gguf, read_gguf
from tests.helpers.formats import variant, write_gguf


def write_one(path: Path, raw: np.ndarray, kind: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "näme")
    writer.add_array("an.array", ["a", "b"])
    writer.add_tensor("x", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_quantised_kinds_equal_the_gguf_package(kind: str, tmp_path: Path) -> None:
    """Random bytes are as good a tensor as any, and reach every bit pattern."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = np.random.default_rng(0).integers(0, 256, (70, 2 * block_bytes), dtype=np.uint8)
    write_one(tmp_path / "x.gguf", rows, kind)
    file = read_gguf(tmp_path / "x.gguf")
    tensor = file.tensors["x"]
    assert (tensor.shape, tensor.dtype) == ((70, 2 * block), "float32")
    with np.errstate(invalid="ignore", over="ignore"):  # random halves hold NaN and infinity
        wanted = quants.dequantize(rows, GGMLQuantizationType[kind])
        found = tensor.read()
    np.testing.assert_array_equal(found, wanted)
    assert file.metadata["general.name"] == "näme"
    assert file.metadata["an.array"] == ["a", "b"]


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16")])
def test_plain_kinds_keep_their_dtype(kind: str, dtype: str, tmp_path: Path) -> None:
    value = np.random.default_rng(0).standard_normal((3, 5)).astype(dtype)
    write_one(tmp_path / "x.gguf", value, kind)
    tensor = read_gguf(tmp_path / "x.gguf").tensors["x"]
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.read(), value)


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**16, (4, 6), dtype=np.uint16)
    write_one(tmp_path / "x.gguf", bits.view(np.uint8), "BF16")
    tensor = read_gguf(tmp_path / "x.gguf").tensors["x"]
    assert tensor.dtype == "bfloat16"
    np.testing.assert_array_equal(tensor.read().view(np.uint16), bits)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(variant("gqa"), path, kind="Q8_0")
    return path


def test_a_file_cut_short_names_the_tensor(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    (tmp_path / "x.gguf").write_bytes(data[:-40])
    with pytest.raises(CheckpointError, match="cut short"):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"PK\3\4 nonsense", b"GGUF", b"GGUF" + b"\xff" * 99]
)
def test_what_is_no_gguf_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.gguf") as error:
        read_gguf(path)
    assert "\n" not in str(error.value)


def test_big_endian_is_refused(whole: Path, tmp_path: Path) -> None:
    data = bytearray(whole.read_bytes())
    data[4:8] = data[4:8][::-1]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="version"):
        read_gguf(tmp_path / "x.gguf")


def test_an_unknown_type_names_the_tensor(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    (tmp_path / "x.gguf").write_bytes(data[:at] + b"\xfe\0\0\0" + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"output_norm\.weight of unknown GGML type 254"):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.filterwarnings("ignore:.*isn't UTF-8:UserWarning")
@given(data=st.data())
def test_damaged_heads_are_read_or_refused(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 2500))] = data.draw(st.integers(0, 255))
    path = whole.parent / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), 300, 1500]))])
    try:
        read_gguf(path)
    except CheckpointError as error:
        assert "\n" not in str(error)


def test_is_gguf(whole: Path, tmp_path: Path) -> None:
    assert is_gguf(whole)
    (tmp_path / "x").write_bytes(b"GGU")
    assert not is_gguf(tmp_path / "x")


def with_keys(path: Path, *keys: bytes) -> Path:
    """A GGUF file of no tensors and these keys, as they are on disk."""
    counts = (0).to_bytes(8, "little") + len(keys).to_bytes(8, "little")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + counts + b"".join(keys))
    return path


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return len(name).to_bytes(8, "little") + name + kind.to_bytes(4, "little") + value


def array(kind: int, count: int, data: bytes) -> bytes:
    return kind.to_bytes(4, "little") + count.to_bytes(8, "little") + data


def text(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "data"),
    [(0, bytes(40_000_000)), (8, text(b"x" * 12) * 200_000)],
    ids=["numbers", "strings"],
)
def test_an_array_that_nobody_needs_costs_nothing(kind: int, data: bytes, tmp_path: Path) -> None:
    count = len(data) if kind == 0 else 200_000
    large = key(b"x.large", 9, array(kind, count, data))
    path = with_keys(tmp_path / "x.gguf", large, key(b"x.small", 4, bytes([7, 0, 0, 0])))
    tracemalloc.start()
    metadata = read_gguf(path).metadata
    assert metadata["x.small"] == 7
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert list(metadata) == ["x.large", "x.small"]


def test_an_array_too_long_to_be_one_is_refused_when_asked_for(tmp_path: Path) -> None:
    tokens = key(b"tokenizer.ggml.tokens", 9, array(0, 5_000_000, bytes(5_000_000)))
    metadata = read_gguf(with_keys(tmp_path / "x.gguf", tokens)).metadata
    with pytest.raises(CheckpointError, match=r"5000000 entries of tokenizer\.ggml\.tokens in .*x"):
        metadata["tokenizer.ggml.tokens"]


def test_text_that_is_no_utf8_is_warned_of_where_it_is_read(tmp_path: Path) -> None:
    bad = key(b"general.description", 8, text(b"caf\xe9"))
    metadata = read_gguf(with_keys(tmp_path / "x.gguf", bad)).metadata
    with pytest.warns(
        UserWarning, match=r"general\.description in .*x\.gguf holds text that isn't"
    ):
        assert metadata["general.description"] == "caf\ufffd"


@pytest.mark.parametrize(
    "damage",
    [
        key(b"x", 9, array(8, 2**60, b"")),
        key(b"x", 9, array(0, 2**63, b"")),
        key(b"x", 9, array(9, 1, array(9, 1, array(9, 1, array(9, 1, array(9, 1, b"")))))),
        key(b"x", 8, (2**63).to_bytes(8, "little")),
        key(b"x", 13, b""),
        key(b"x", 2**32 - 1, b""),
        key(b"x" * 70_000, 4, bytes(4)),
        key(b"general.alignment", 4, (2**31).to_bytes(4, "little")),
        key(b"general.alignment", 4, bytes(4)),
        key(b"general.alignment", 8, text(b"32")),
    ],
    ids=range(10),
)
def test_lengths_that_the_file_has_not_are_refused(damage: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.gguf") as error:
        read_gguf(with_keys(tmp_path / "x.gguf", damage))
    assert "\n" not in str(error.value)


def test_more_tensors_than_a_model_has_are_refused(tmp_path: Path) -> None:
    path = with_keys(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:8] + (10**6).to_bytes(8, "little") + bytes(40_000_000))
    with pytest.raises(CheckpointError, match="1000000 tensors"):
        read_gguf(path)
