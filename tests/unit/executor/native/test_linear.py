"""Products of packed and plain matrices, against numpy and against themselves."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.executor.native.kernel_lab import FORMATS, PACKED, Floats, isas, kernels_of, linear, raw_matrix
from tokenloom.executor.native.library import GROUP, Format, Pool
from tokenloom.executor.native.weights import PackedMatrix, UnsupportedWeights, unpacked

SHAPES = ((1, 1, 32), (3, 16, 64), (8, 17, 96), (13, 40, 160), (33, 70, 64))


def rounded_to_bits(inputs: Floats, input_bits: int) -> Floats:
    """Inputs as packed products see them: 8 or 15 bits and a scale per group."""
    most = {8: 127, 15: 127 * 128}[input_bits]
    groups = inputs.reshape(inputs.shape[0], -1, GROUP)
    scales = np.abs(groups).max(axis=2, keepdims=True) / np.float32(most)
    bits = np.rint(groups * np.where(scales > 0, 1 / np.where(scales > 0, scales, 1), 0).astype(np.float32))
    rounded: Floats = (bits * scales).reshape(inputs.shape).astype(np.float32)
    return rounded


def case(
    form: Format, shape: tuple[int, int, int], pool: Pool, input_bits: int = 15
) -> tuple[PackedMatrix, Floats, Floats]:
    num_rows, num_outputs, num_inputs = shape
    random = np.random.default_rng(num_rows + num_outputs)
    weights = random.normal(0, 1, (num_outputs, num_inputs)).astype(np.float32)
    bias = random.normal(0, 1, num_outputs).astype(np.float32)
    inputs = random.normal(0, 2, (num_rows, num_inputs)).astype(np.float32)
    return PackedMatrix(pool, [raw_matrix(pool, form, weights)], bias, input_bits=input_bits), inputs, bias


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("input_bits", [8, 15])
def test_a_product_is_that_of_the_unpacked_matrix(isa: str, form: Format, input_bits: int) -> None:
    with kernels_of(isa) as pool:
        for shape in SHAPES:
            matrix, inputs, bias = case(form, shape, pool, input_bits)
            seen = rounded_to_bits(inputs, input_bits) if form in PACKED else inputs
            expected = seen.astype(np.float64) @ unpacked(pool, matrix).astype(np.float64).T + bias
            np.testing.assert_allclose(linear(pool, matrix, inputs), expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("input_bits", [8, 15])
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(isa: str, form: Format, input_bits: int) -> None:
    with kernels_of(isa, num_threads=3) as pool:
        matrix, inputs, _ = case(form, (37, 70, 96), pool, input_bits)
        together = linear(pool, matrix, inputs)
        for first, last in ((0, 1), (36, 37), (5, 7), (3, 6), (11, 20), (1, 36)):
            assert np.array_equal(linear(pool, matrix, inputs[first:last]), together[first:last])
    with kernels_of(isa, num_threads=1) as pool:
        assert np.array_equal(linear(pool, case(form, (37, 70, 96), pool, input_bits)[0], inputs), together)


@pytest.mark.parametrize("isa", [isa for isa in isas() if isa != "portable"])  # that has no fused multiply-add
def test_the_fast_instruction_sets_agree_bitwise(isa: str) -> None:
    results = []
    for name in (isa, isas()[0]):
        with kernels_of(name) as pool:
            matrix, inputs, _ = case(Format.Q4_1, (5, 40, 160), pool)
            results.append(linear(pool, matrix, inputs))
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_stays_none_and_in_its_row(isa: str, form: Format, bad: float) -> None:
    with kernels_of(isa) as pool:
        matrix, inputs, _ = case(form, (4, 17, 96), pool)
        clean = linear(pool, matrix, inputs)
        inputs[2, 40] = bad
        found = linear(pool, matrix, inputs)
        assert not np.isfinite(found[2]).any()
        assert np.array_equal(np.delete(found, 2, axis=0), np.delete(clean, 2, axis=0))


@pytest.mark.parametrize("form", PACKED)
def test_packed_values_are_those_that_the_gguf_package_reads(form: Format) -> None:
    import gguf

    values = np.random.default_rng(3).normal(0, 1, (18, 64)).astype(np.float32)
    with kernels_of(isas()[0]) as pool:
        raw = raw_matrix(pool, form, values)
        kind = gguf.GGMLQuantizationType[form.name]
        expected = gguf.quants.dequantize(raw.rows, kind)
        np.testing.assert_allclose(unpacked(pool, PackedMatrix(pool, [raw])), expected, rtol=1e-6, atol=1e-7)
        assert np.abs(expected - values).max() <= {Format.Q8_0: 0.02}.get(form, 0.35)


def test_extremes_of_8_bits_do_not_overflow() -> None:
    """Pairs of products that saturate 16 bits are what AVX2 is known for."""
    for isa in isas():
        with kernels_of(isa) as pool:
            weights = np.where(np.arange(64) % 3, 1.0, -1.0).astype(np.float32)[None].repeat(16, 0)
            matrix = PackedMatrix(pool, [raw_matrix(pool, Format.Q8_0, weights)])
            found = linear(pool, matrix, np.sign(weights[:1]))
            np.testing.assert_allclose(found, 64.0, rtol=1e-3)


def test_matrices_of_several_parts_and_formats_are_one() -> None:
    random = np.random.default_rng(1)
    parts = [random.normal(0, 1, (num, 64)).astype(np.float32) for num in (10, 7, 20)]
    inputs = random.normal(0, 1, (3, 64)).astype(np.float32)
    with kernels_of(isas()[0]) as pool:
        raw = [
            raw_matrix(pool, form, part)
            for form, part in zip((Format.F32, Format.Q8_0, Format.BF16), parts, strict=True)
        ]
        matrix = PackedMatrix(pool, raw)
        assert matrix.format is Format.Q8_0
        np.testing.assert_allclose(linear(pool, matrix, inputs), inputs @ np.concatenate(parts).T, atol=0.25)


def test_rows_that_are_not_whole_groups_are_refused() -> None:
    with kernels_of(isas()[0]) as pool, pytest.raises(UnsupportedWeights, match="33 inputs are not whole groups of 32"):
        raw_matrix(pool, Format.Q4_0, np.zeros((2, 33), np.float32))
    with kernels_of(isas()[0]) as pool, pytest.raises(UnsupportedWeights, match="whole groups"):
        PackedMatrix(pool, [raw_matrix(pool, Format.F32, np.zeros((2, 33), np.float32))])
