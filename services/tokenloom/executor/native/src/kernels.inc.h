// The kernels, written once in vectors of 16 floats and compiled for each instruction set; the including file defines
// the namespace TL_ISA, its name TL_ISA_NAME, and TL_PRIMITIVES, the header with what the compiler's own vectors lack.
//
// Tiles of packed weights. A tile is 16 outputs; per group of 32 inputs it holds
//   Q4_0, Q4_1: 4 vectors of 64 bytes: byte 4 * lane + b of vector j has input 4 * j + b of output `lane` in its low
//               half and input 16 + 4 * j + b in its high half; then 16 scales (fp16), and for Q4_1 16 minima (fp16)
//   Q8_0:       8 such vectors of whole bytes, each 128 above its value; then 16 scales
//   F32, BF16:  per input 16 numbers; BF16 in pairs of inputs, the even one in the low half of each lane
// Integer sums are exact, so only the order of the groups matters, and that is fixed.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define TL_INLINE static inline __attribute__((always_inline))
// Loops over the rows of a tile, whose sums shall stay in registers, where there are 32 of them.
#if defined(TL_MANY_REGISTERS)
#define TL_UNROLL _Pragma("GCC unroll 8")
#else
#define TL_UNROLL
#endif

namespace tl {
namespace TL_ISA {

typedef float vf __attribute__((vector_size(64), may_alias));
typedef int32_t vi __attribute__((vector_size(64), may_alias));
typedef uint32_t vu __attribute__((vector_size(64), may_alias));
typedef float vf_u __attribute__((vector_size(64), may_alias, aligned(4)));
typedef uint32_t vu_u __attribute__((vector_size(64), may_alias, aligned(2)));

TL_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_u*>(p); }
TL_INLINE void save(float* p, vf v) { *reinterpret_cast<vf_u*>(p) = v; }
TL_INLINE vf all(float x) { return vf{} + x; }
TL_INLINE vi all(int32_t x) { return vi{} + x; }
TL_INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
TL_INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

#include TL_PRIMITIVES

// e^x for x of at most 88; 0 below -87. Relative error below 2e-7.
TL_INLINE vf exp_of(vf x) {
  const vi is_tiny = x < all(-87.0f);
  x = choose(is_tiny, all(-87.0f), x);
  const vf n = nearest(x * all(1.44269504088896341f));
  vf r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  vf p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  const vi power = (__builtin_convertvector(n, vi) + all(127)) << 23;
  return choose(is_tiny, vf{}, p * (vf)power);
}

// --- rows ------------------------------------------------------------------------------------------------------------

void quantize_row(const float* in, int num_inputs, int8_t* bits, int8_t* low, float* scales, int32_t* sums) {
  const float highest = low ? 127.0f * kHighStep : 127.0f;
  for (int g = 0; g < num_inputs / kGroup; ++g) {
    const vf a = load(in + g * kGroup), b = load(in + g * kGroup + kLanes);
    const vi mask = all(0x7fffffff);
    const float most = max_of(larger((vf)((vi)a & mask), (vf)((vi)b & mask)));
    const float scale = most / highest, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const vi x = to_int(a * all(inverse)), y = to_int(b * all(inverse));
    if (low) {
      const vi high_x = (x + all(kHighStep / 2)) >> 7, high_y = (y + all(kHighStep / 2)) >> 7;
      save_bytes(bits + g * kGroup, high_x);
      save_bytes(bits + g * kGroup + kLanes, high_y);
      save_bytes(low + g * kGroup, x - (high_x << 7));
      save_bytes(low + g * kGroup + kLanes, y - (high_y << 7));
    } else {
      save_bytes(bits + g * kGroup, x);
      save_bytes(bits + g * kGroup + kLanes, y);
    }
    const bool is_nan = sum_of((a != a) | (b != b)) != 0;  // must not end as some number
    scales[g] = is_nan ? NAN : scale;
    sums[g] = sum_of(x + y);
  }
}

void norm_row(const float* in, const float* weight, int size, float eps, float* out) {
  vf squares{};
  for (int i = 0; i < size; i += kLanes) {
    const vf x = load(in + i);
    squares = fma(x, x, squares);
  }
  const float factor = 1.0f / sqrtf(sum_of(squares) / static_cast<float>(size) + eps);
  for (int i = 0; i < size; i += kLanes) save(out + i, load(in + i) * all(factor) * load(weight + i));
}

void gate_row(const float* gate, const float* up, int size, float* out) {
  for (int i = 0; i < size; i += kLanes) {
    const vf g = load(gate + i);
    const vf low = choose(g < all(-87.0f), all(-87.0f), g), x = choose(low > all(87.0f), all(87.0f), low);
    save(out + i, g / (all(1.0f) + exp_of(vf{} - x)) * load(up + i));
  }
}

void rope_row(float* head, const float* cosines, const float* sines, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const vf a = load(head + i), b = load(head + half + i), c = load(cosines + i), s = load(sines + i);
    save(head + i, fma(a, c, vf{} - b * s));
    save(head + half + i, fma(b, c, a * s));
  }
}

// --- products --------------------------------------------------------------------------------------------------------

template <int kFormat>
struct Packed {
  static constexpr int kVectors = kFormat == TL_Q8_0 ? 8 : 4;
  static constexpr int kBytes = kVectors * 64 + 32 + (kFormat == TL_Q4_1 ? 32 : 0);
  // What every weight is above its value, in its integers.
  static constexpr int kOffset = kFormat == TL_Q8_0 ? 128 : kFormat == TL_Q4_0 ? 8 : 0;
};

TL_INLINE int32_t four_of(const int8_t* bits) {
  int32_t four;
  memcpy(&four, bits, 4);
  return four;
}

template <int kFormat, bool kHasLow, int kRows>
TL_INLINE void packed_tile(const uint8_t* weights, const Inputs& in, int row, vf* out) {
  using P = Packed<kFormat>;
  const int num_groups = in.num_groups();
  vf sums[kRows];
  TL_UNROLL for (int m = 0; m < kRows; ++m) sums[m] = vf{};
  for (int g = 0; g < num_groups; ++g, weights += P::kBytes) {
    vi w[8];
    TL_UNROLL for (int j = 0; j < P::kVectors; ++j) {
      const vi bytes = load_bytes(weights + 64 * j);
      if (kFormat == TL_Q8_0) {
        w[j] = bytes;
      } else {
        w[j] = low_nibbles(bytes);
        w[j + 4] = high_nibbles(bytes);
      }
    }
    const vf scale = load_half(weights + 64 * P::kVectors);
    vf minimum{};
    if (kFormat == TL_Q4_1) minimum = load_half(weights + 64 * P::kVectors + 32);
    TL_UNROLL for (int m = 0; m < kRows; ++m) {
      const int64_t at = static_cast<int64_t>(row + m);
      const int64_t begin = at * in.num_inputs + g * kGroup;
      const int8_t *bits = in.bits + begin, *low = in.low + begin;
      const float input_scale = in.scales[at * num_groups + g];
      const int32_t input_sum = in.sums[at * num_groups + g];
      const vi first = P::kOffset ? all(-P::kOffset * input_sum) : vi{};
      vi dots{}, more{};  // two chains: integers add up in any order
      TL_UNROLL for (int j = 0; j < 4; ++j) {
        dots = dot4<kFormat == TL_Q8_0>(dots, w[j], four_of(bits + 4 * j));
        more = dot4<kFormat == TL_Q8_0>(more, w[j + 4], four_of(bits + 16 + 4 * j));
      }
      if (kHasLow) {
        vi low_dots{}, low_more{};
        TL_UNROLL for (int j = 0; j < 4; ++j) {
          low_dots = dot4<kFormat == TL_Q8_0>(low_dots, w[j], four_of(low + 4 * j));
          low_more = dot4<kFormat == TL_Q8_0>(low_more, w[j + 4], four_of(low + 16 + 4 * j));
        }
        dots = ((dots + more) << 7) + first;
        more = low_dots + low_more;
      } else {
        dots += first;
      }
      sums[m] = fma(to_float(dots + more), scale * all(input_scale), sums[m]);
      if (kFormat == TL_Q4_1) sums[m] = fma(minimum, all(input_scale * static_cast<float>(input_sum)), sums[m]);
    }
  }
  TL_UNROLL for (int m = 0; m < kRows; ++m) out[m] = sums[m];
}

template <bool kIsBf16, int kRows>
TL_INLINE void float_tile(const uint8_t* weights, const Inputs& in, int row, vf* out) {
  vf sums[kRows];
  TL_UNROLL for (int m = 0; m < kRows; ++m) sums[m] = vf{};
  const float* values = in.values + static_cast<int64_t>(row) * in.num_inputs;
  for (int k = 0; k < in.num_inputs; k += 2, weights += kIsBf16 ? 64 : 128) {
    vf even, odd;
    if (kIsBf16) {
      const vu pair = (vu)load_bytes(weights);
      even = (vf)(pair << 16);
      odd = (vf)(pair & 0xffff0000u);
    } else {
      even = (vf)load_bytes(weights);
      odd = (vf)load_bytes(weights + 64);
    }
    TL_UNROLL for (int m = 0; m < kRows; ++m) {
      const float* x = values + static_cast<int64_t>(m) * in.num_inputs + k;
      sums[m] = fma(odd, all(x[1]), fma(even, all(x[0]), sums[m]));
    }
  }
  TL_UNROLL for (int m = 0; m < kRows; ++m) out[m] = sums[m];
}

template <int kFormat, bool kHasLow, int kRows>
TL_INLINE void one_tile(const uint8_t* weights, const Inputs& in, int row, vf* out) {
  if constexpr (kFormat == TL_F32 || kFormat == TL_BF16) {
    float_tile<kFormat == TL_BF16, kRows>(weights, in, row, out);
  } else {
    packed_tile<kFormat, kHasLow, kRows>(weights, in, row, out);
  }
}

template <int kFormat, bool kHasLow, int kRows>
TL_INLINE int rows_of_tile(const uint8_t* weights, const Inputs& in, int row, int last_row, const float* bias,
                           float* out, int stride) {
  vf found[kRows];
  for (; row + kRows <= last_row; row += kRows, out += static_cast<int64_t>(kRows) * stride) {
    one_tile<kFormat, kHasLow, kRows>(weights, in, row, found);
    TL_UNROLL for (int m = 0; m < kRows; ++m) save(out + static_cast<int64_t>(m) * stride, found[m] + (bias ? load(bias) : vf{}));
  }
  return row;
}

template <int kFormat, bool kHasLow>
void tiles_of(const TlMatrix& matrix, const Inputs& in, int first_tile, int last_tile, int first_row, int last_row,
              float* out, int stride) {
  const int64_t tile_bytes = static_cast<int64_t>(in.num_inputs / kGroup) * group_bytes(kFormat);
  for (int tile = first_tile; tile < last_tile; ++tile, out += kLanes) {
    const uint8_t* weights = matrix.data + tile * tile_bytes;
    float padded[kLanes];
    const float* bias = nullptr;
    if (matrix.bias != nullptr) {
      const int left = matrix.num_outputs - tile * kLanes;
      for (int i = 0; i < kLanes; ++i) padded[i] = i < left ? matrix.bias[tile * kLanes + i] : 0.0f;
      bias = padded;
    }
    int row = first_row;
    auto at = [&] { return out + static_cast<int64_t>(row - first_row) * stride; };
    row = rows_of_tile<kFormat, kHasLow, 8>(weights, in, row, last_row, bias, at(), stride);
    row = rows_of_tile<kFormat, kHasLow, 4>(weights, in, row, last_row, bias, at(), stride);
    row = rows_of_tile<kFormat, kHasLow, 2>(weights, in, row, last_row, bias, at(), stride);
    rows_of_tile<kFormat, kHasLow, 1>(weights, in, row, last_row, bias, at(), stride);
  }
}

template <bool kHasLow>
void packed_tiles(const TlMatrix& matrix, const Inputs& in, int first_tile, int last_tile, int first_row, int last_row,
                  float* out, int stride) {
  switch (matrix.format) {
    case TL_Q4_0:
      return tiles_of<TL_Q4_0, kHasLow>(matrix, in, first_tile, last_tile, first_row, last_row, out, stride);
    case TL_Q4_1:
      return tiles_of<TL_Q4_1, kHasLow>(matrix, in, first_tile, last_tile, first_row, last_row, out, stride);
    default:
      return tiles_of<TL_Q8_0, kHasLow>(matrix, in, first_tile, last_tile, first_row, last_row, out, stride);
  }
}

void tiles(const TlMatrix& matrix, const Inputs& in, int first_tile, int last_tile, int first_row, int last_row,
           float* out, int stride) {
  if (matrix.format == TL_F32) {
    tiles_of<TL_F32, false>(matrix, in, first_tile, last_tile, first_row, last_row, out, stride);
  } else if (matrix.format == TL_BF16) {
    tiles_of<TL_BF16, false>(matrix, in, first_tile, last_tile, first_row, last_row, out, stride);
  } else if (matrix.input_bits == 8) {
    packed_tiles<false>(matrix, in, first_tile, last_tile, first_row, last_row, out, stride);
  } else {
    packed_tiles<true>(matrix, in, first_tile, last_tile, first_row, last_row, out, stride);
  }
}

// --- attention -------------------------------------------------------------------------------------------------------

template <bool kIsBf16>
TL_INLINE vf load_numbers(const void* numbers, int64_t index) {
  if (kIsBf16) return load_bf16(static_cast<const uint16_t*>(numbers) + index);
  return load(static_cast<const float*>(numbers) + index);
}

TL_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

void store(const AttentionJob& job, int position, const float* key, const float* value) {
  const int offset = position % job.block_size;
  const int64_t block = job.block_table[position / job.block_size];
  const int64_t head = (block * job.num_kv_heads + job.kv_head) * job.head_dim * job.block_size;
  const int64_t at = head + static_cast<int64_t>(offset) * job.head_dim;
  if (job.is_bf16) {
    uint16_t* keys = static_cast<uint16_t*>(const_cast<void*>(job.keys)) + head + offset;
    uint16_t* values = static_cast<uint16_t*>(const_cast<void*>(job.values)) + at;
    for (int d = 0; d < job.head_dim; ++d) keys[static_cast<int64_t>(d) * job.block_size] = to_bf16(key[d]);
    for (int d = 0; d < job.head_dim; ++d) values[d] = to_bf16(value[d]);
  } else {
    float* keys = static_cast<float*>(const_cast<void*>(job.keys)) + head + offset;
    for (int d = 0; d < job.head_dim; ++d) keys[static_cast<int64_t>(d) * job.block_size] = key[d];
    memcpy(static_cast<float*>(const_cast<void*>(job.values)) + at, value, job.head_dim * sizeof(float));
  }
}

// Scores of kRows queries against 16 keys that begin at `keys`.
template <bool kIsBf16, int kRows>
TL_INLINE void score(const AttentionJob& job, int64_t keys, const float* const* queries, vf* out) {
  vf sums[kRows];
  TL_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = vf{};
  for (int d = 0; d < job.head_dim; ++d) {
    const vf k = load_numbers<kIsBf16>(job.keys, keys + static_cast<int64_t>(d) * job.block_size);
    TL_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = fma(k, all(queries[r][d]), sums[r]);
  }
  TL_UNROLL for (int r = 0; r < kRows; ++r) out[r] = sums[r];
}

// Add kRows weighted sums of 16 dimensions of the values of positions [first, last) of a split.
template <bool kIsBf16, int kRows>
TL_INLINE void weigh(const AttentionJob& job, const int64_t* value_starts, int first, int last, int dim,
                     const float* weights, float* out, int64_t stride) {
  vf sums[kRows];
  TL_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = vf{};
  for (int t = first; t < last; ++t) {
    const int64_t at = value_starts[t / kLanes] + static_cast<int64_t>(t % kLanes) * job.head_dim + dim;
    const vf v = load_numbers<kIsBf16>(job.values, at);
    TL_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = fma(v, all(weights[r * kSplit + t]), sums[r]);
  }
  TL_UNROLL for (int r = 0; r < kRows; ++r) save(out + r * stride + dim, sums[r]);
}

// A row of the softmax: what one query of one head has summed up so far.
struct Running {
  float most;
  float sum;
};

template <bool kIsBf16>
void attend_split(const AttentionJob& job, const AttentionRow* rows, int num_rows, int split, Running* running,
                  float* weights, float* partial) {
  const int begin = split * kSplit, end = rows[num_rows - 1].position + 1;  // positions rise: the last sees most
  const int last = end - begin < kSplit ? end - begin : kSplit;
  int first = 0;
  if (job.sliding_window > 0) {
    const int lowest = rows[0].position + 1 - job.sliding_window - begin;
    first = lowest > 0 ? lowest / kLanes * kLanes : 0;
  }
  if (first >= last) return;
  const int num = num_rows * job.group;
  const int64_t head_numbers = static_cast<int64_t>(job.head_dim) * job.block_size;
  // Where each run of 16 positions has its keys and its values; a block is a multiple of 16.
  int64_t key_starts[kSplit / kLanes], value_starts[kSplit / kLanes];
  for (int t = first; t < last; t += kLanes) {
    const int position = begin + t, offset = position % job.block_size;
    const int64_t block = job.block_table[position / job.block_size];
    const int64_t head = (block * job.num_kv_heads + job.kv_head) * head_numbers;
    key_starts[t / kLanes] = head + offset;
    value_starts[t / kLanes] = head + static_cast<int64_t>(offset) * job.head_dim;
  }
  // Scores, 16 positions at a time, for up to 8 queries at once.
  for (int t = first; t < last; t += kLanes) {
    const int64_t keys = key_starts[t / kLanes];
    for (int r = 0; r < num;) {
      const float* queries[8];
      vf scores[8];
      int count = num - r < 8 ? num - r : 8;
      count = count >= 8 ? 8 : count >= 4 ? 4 : count >= 3 ? 3 : count;
      for (int i = 0; i < count; ++i) {
        queries[i] = rows[(r + i) / job.group].query + static_cast<int64_t>((r + i) % job.group) * job.head_dim;
      }
      switch (count) {
        case 8: score<kIsBf16, 8>(job, keys, queries, scores); break;
        case 4: score<kIsBf16, 4>(job, keys, queries, scores); break;
        case 3: score<kIsBf16, 3>(job, keys, queries, scores); break;
        case 2: score<kIsBf16, 2>(job, keys, queries, scores); break;
        default: score<kIsBf16, 1>(job, keys, queries, scores); break;
      }
      for (int i = 0; i < count; ++i) save(weights + (r + i) * kSplit + t, scores[i]);
      r += count;
    }
  }
  // Softmax of the split by itself; what a query must not see weighs nothing.
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int r = 0; r < num; ++r) {
    const int position = rows[r / job.group].position;
    const int upper = position - begin;  // the last that it sees
    const int lower = job.sliding_window > 0 ? position + 1 - job.sliding_window - begin : -1;
    float* row = weights + r * kSplit;
    const vf nothing = all(-INFINITY);
    vf most = nothing;
    for (int t = first; t < last; t += kLanes) {
      const vi seen = (all(t) + lanes <= all(upper)) & (all(t) + lanes >= all(lower));
      const vf x = choose(seen, load(row + t) * all(job.scale), nothing);
      save(row + t, x);
      most = choose(x > most, x, choose(x == x, most, x));  // NaN stays
    }
    const float split_most = max_of(most);
    bool is_nan = false;
    for (int i = 0; i < kLanes; ++i) is_nan |= most[i] != most[i];
    if (split_most == -INFINITY && !is_nan) {
      running[r] = {-INFINITY, 0.0f};
      for (int t = first; t < last; ++t) row[t] = 0.0f;
      continue;
    }
    vf sum{};
    for (int t = first; t < last; t += kLanes) {
      const vf e = is_nan ? all(NAN) : exp_of(load(row + t) - all(split_most));
      save(row + t, e);
      sum += e;
    }
    running[r] = {split_most, sum_of(sum)};
  }
  for (int d = 0; d < job.head_dim; d += kLanes) {
    int r = 0;
    for (; r + 8 <= num; r += 8)
      weigh<kIsBf16, 8>(job, value_starts, first, last, d, weights + r * kSplit, partial + r * job.head_dim, job.head_dim);
    for (; r + 3 <= num; r += 3)
      weigh<kIsBf16, 3>(job, value_starts, first, last, d, weights + r * kSplit, partial + r * job.head_dim, job.head_dim);
    for (; r < num; ++r)
      weigh<kIsBf16, 1>(job, value_starts, first, last, d, weights + r * kSplit, partial + r * job.head_dim, job.head_dim);
  }
}

template <bool kIsBf16>
void attend_all(const AttentionJob& job, const AttentionRow* rows, int num_rows, float* scratch) {
  const int num = num_rows * job.group;
  float* weights = scratch;                                   // [num, kSplit]
  float* partial = weights + static_cast<int64_t>(num) * kSplit;  // [num, head_dim]
  Running* split_state = reinterpret_cast<Running*>(partial + static_cast<int64_t>(num) * job.head_dim);
  Running* state = split_state + num;
  auto out_of = [&](int r) { return rows[r / job.group].out + static_cast<int64_t>(r % job.group) * job.head_dim; };
  for (int r = 0; r < num; ++r) {
    state[r] = {-INFINITY, 0.0f};
    memset(out_of(r), 0, job.head_dim * sizeof(float));
  }
  const int num_splits = rows[num_rows - 1].position / kSplit + 1;
  int split = 0;
  if (job.sliding_window > 0) {
    const int lowest = rows[0].position + 1 - job.sliding_window;
    split = lowest > 0 ? lowest / kSplit : 0;
  }
  for (; split < num_splits; ++split) {
    for (int r = 0; r < num; ++r) split_state[r] = {-INFINITY, 0.0f};
    attend_split<kIsBf16>(job, rows, num_rows, split, split_state, weights, partial);
    for (int r = 0; r < num; ++r) {
      const Running one = split_state[r];
      if (one.sum == 0.0f) continue;  // it sees nothing there
      const float most = state[r].most > one.most ? state[r].most : one.most;
      const float before = state[r].sum == 0.0f ? 0.0f : expf(state[r].most - most), now = expf(one.most - most);
      float* out = out_of(r);
      const float* part = partial + static_cast<int64_t>(r) * job.head_dim;
      for (int d = 0; d < job.head_dim; d += kLanes) {
        save(out + d, fma(load(part + d), all(now), load(out + d) * all(before)));
      }
      state[r] = {most, state[r].sum * before + one.sum * now};
    }
  }
  for (int r = 0; r < num; ++r) {
    float* out = out_of(r);
    const float inverse = 1.0f / state[r].sum;
    for (int d = 0; d < job.head_dim; d += kLanes) save(out + d, load(out + d) * all(inverse));
  }
}

void attend(const AttentionJob& job, const AttentionRow* rows, int num_rows, float* scratch) {
  if (job.is_bf16) {
    attend_all<true>(job, rows, num_rows, scratch);
  } else {
    attend_all<false>(job, rows, num_rows, scratch);
  }
}

const Kernels kKernels = {TL_ISA_NAME, quantize_row, norm_row, tiles, gate_row, rope_row, attend, store};

}  // namespace TL_ISA
}  // namespace tl
