// What AVX512 with VNNI has and the compiler's own vectors lack; part of kernels.inc.h.

TL_INLINE float sum_of(vf v) { return _mm512_reduce_add_ps((__m512)v); }
TL_INLINE float max_of(vf v) { return _mm512_reduce_max_ps((__m512)v); }
TL_INLINE int32_t sum_of(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
TL_INLINE vi to_int(vf v) { return (vi)_mm512_cvtps_epi32((__m512)v); }  // to the nearest
TL_INLINE void save_bytes(int8_t* p, vi v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
}
TL_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
TL_INLINE vf to_float(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
TL_INLINE vf load_half(const uint8_t* p) {
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
TL_INLINE vi load_bytes(const uint8_t* p) { return (vi)_mm512_loadu_si512(p); }
TL_INLINE vi low_nibbles(vi v) { return v & all(0x0f0f0f0f); }
TL_INLINE vi high_nibbles(vi v) { return (vi)_mm512_srli_epi16((__m512i)v, 4) & all(0x0f0f0f0f); }
// Sums of four products of weights (0 to 255 if kIsWide, else 0 to 15) and inputs (-127 to 127) in each lane.
template <bool kIsWide>
TL_INLINE vi dot4(vi sum, vi weights, int32_t inputs) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(inputs));
}
TL_INLINE vf nearest(vf v) {
  return (vf)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
TL_INLINE vf load_bf16(const uint16_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}
