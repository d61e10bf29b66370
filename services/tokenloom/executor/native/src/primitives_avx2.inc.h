// What AVX2 with FMA and F16C has and the compiler's own vectors lack, on both halves; part of kernels.inc.h.

union Halves {
  vf f;
  vi i;
  __m256 ps[2];
  __m256i si[2];
};

template <typename V, typename F>
TL_INLINE auto reduced(V v, F&& both) {  // in a fixed tree
  decltype(v[0] + v[0]) x[kLanes];
  memcpy(x, &v, sizeof v);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] = both(x[i], x[i + n]);
  return x[0];
}
TL_INLINE float sum_of(vf v) {
  return reduced(v, [](float a, float b) { return a + b; });
}
TL_INLINE float max_of(vf v) {
  return reduced(v, [](float a, float b) { return a > b ? a : b; });
}
TL_INLINE int32_t sum_of(vi v) {
  return reduced(v, [](int32_t a, int32_t b) { return a + b; });
}
TL_INLINE vf fma(vf a, vf b, vf c) {
  Halves x{a}, y{b}, z{c};
  for (int h = 0; h < 2; ++h) z.ps[h] = _mm256_fmadd_ps(x.ps[h], y.ps[h], z.ps[h]);
  return z.f;
}
TL_INLINE vf to_float(vi v) {
  Halves x;
  x.i = v;
  for (int h = 0; h < 2; ++h) x.ps[h] = _mm256_cvtepi32_ps(x.si[h]);
  return x.f;
}
TL_INLINE vi to_int(vf v) {  // to the nearest
  Halves x{v};
  for (int h = 0; h < 2; ++h) x.si[h] = _mm256_cvtps_epi32(x.ps[h]);
  return x.i;
}
TL_INLINE vf nearest(vf v) {
  Halves x{v};
  for (int h = 0; h < 2; ++h) x.ps[h] = _mm256_round_ps(x.ps[h], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return x.f;
}
TL_INLINE void save_bytes(int8_t* p, vi v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v[i]);
}
TL_INLINE vf load_half(const uint8_t* p) {
  Halves x;
  for (int h = 0; h < 2; ++h) {
    x.ps[h] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * h)));
  }
  return x.f;
}
TL_INLINE vf load_bf16(const uint16_t* p) {
  Halves x;
  for (int h = 0; h < 2; ++h) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * h));
    x.si[h] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
  }
  return x.f;
}
TL_INLINE vi load_bytes(const uint8_t* p) {
  Halves x;
  for (int h = 0; h < 2; ++h) x.si[h] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * h));
  return x.i;
}
TL_INLINE vi low_nibbles(vi v) { return v & all(0x0f0f0f0f); }
TL_INLINE vi high_nibbles(vi v) { return (vi)((vu)v >> 4) & all(0x0f0f0f0f); }

// Sums of four products of weights (0 to 255 if kIsWide, else 0 to 15) and inputs (-127 to 127) in each lane. Pairs are
// summed in 16 bits, which saturate: wide weights are taken in two parts, of at most 127 and 128.
template <bool kIsWide>
TL_INLINE vi dot4(vi sum, vi weights, int32_t inputs) {
  const __m256i x = _mm256_set1_epi32(inputs), ones = _mm256_set1_epi16(1);
  Halves w, s;
  w.i = weights;
  s.i = sum;
  for (int h = 0; h < 2; ++h) {
    if (kIsWide) {
      const __m256i low = _mm256_and_si256(w.si[h], _mm256_set1_epi8(0x7f));
      const __m256i high = _mm256_andnot_si256(_mm256_set1_epi8(0x7f), w.si[h]);
      s.si[h] = _mm256_add_epi32(s.si[h], _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones));
      s.si[h] = _mm256_add_epi32(s.si[h], _mm256_madd_epi16(_mm256_maddubs_epi16(high, x), ones));
    } else {
      s.si[h] = _mm256_add_epi32(s.si[h], _mm256_madd_epi16(_mm256_maddubs_epi16(w.si[h], x), ones));
    }
  }
  return s.i;
}
