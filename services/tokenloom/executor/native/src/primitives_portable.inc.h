// The same in plain C++; part of kernels.inc.h.

template <typename V, typename F>
TL_INLINE auto reduced(V v, F&& both) {  // in a fixed tree
  decltype(v[0] + v[0]) x[kLanes];
  memcpy(x, &v, sizeof v);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] = both(x[i], x[i + n]);
  return x[0];
}
TL_INLINE float sum_of(vf v) { return reduced(v, [](float a, float b) { return a + b; }); }
TL_INLINE float max_of(vf v) { return reduced(v, [](float a, float b) { return a > b ? a : b; }); }
TL_INLINE int32_t sum_of(vi v) { return reduced(v, [](int32_t a, int32_t b) { return a + b; }); }
TL_INLINE void save_bytes(int8_t* p, vi v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v[i]);
}
TL_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
TL_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

TL_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 0) {
    const float small = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -small : small;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

TL_INLINE vf load_half(const uint8_t* p) {
  vf out;
  for (int i = 0; i < kLanes; ++i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    out[i] = half_to_float(h);
  }
  return out;
}

TL_INLINE vi load_bytes(const uint8_t* p) {
  vi out;
  memcpy(&out, p, 64);
  return out;
}
TL_INLINE vi low_nibbles(vi v) { return v & all(0x0f0f0f0f); }
TL_INLINE vi high_nibbles(vi v) { return (vi)((vu)v >> 4) & all(0x0f0f0f0f); }
template <bool kIsWide>
TL_INLINE vi dot4(vi sum, vi weights, int32_t inputs) {
  for (int b = 0; b < 4; ++b) {
    const int32_t input = static_cast<int8_t>(static_cast<uint32_t>(inputs) >> (8 * b));
    sum += (vi)((vu)weights >> (8 * b) & 0xffu) * input;
  }
  return sum;
}
TL_INLINE vf nearest(vf v) {
  const vf magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to even; for |v| < 2^22
  return (v + magic) - magic;
}
TL_INLINE vi to_int(vf v) { return __builtin_convertvector(nearest(v), vi); }
TL_INLINE vf load_bf16(const uint16_t* p) {
  vu bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<uint32_t>(p[i]) << 16;
  return (vf)bits;
}
