// From GGUF blocks or plain numbers to the tiles that kernels read, and back.
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "pool.h"

namespace tl {

int group_bytes(int format) {
  switch (format) {
    case TL_F32: return kLanes * kGroup * 4;
    case TL_BF16: return kLanes * kGroup * 2;
    case TL_Q4_0: return 256 + 32;
    case TL_Q4_1: return 256 + 64;
    case TL_Q8_0: return 512 + 32;
  }
  return 0;
}

namespace {

// Bytes of one row's group in the source: GGUF's blocks, or plain numbers.
int source_bytes(int format) {
  switch (format) {
    case TL_F32: return kGroup * 4;
    case TL_BF16: return kGroup * 2;
    case TL_Q4_0: return 2 + 16;
    case TL_Q4_1: return 4 + 16;
    case TL_Q8_0: return 2 + 32;
  }
  return 0;
}

uint8_t nibble(const uint8_t* nibbles, int input) {
  return input < 16 ? nibbles[input] & 15 : nibbles[input - 16] >> 4;
}

// Write output `lane` of a tile's group; `source` null: an output that pads the tile, all zero.
void pack_lane(int format, const uint8_t* source, int lane, uint8_t* out) {
  switch (format) {
    case TL_F32:
      for (int k = 0; k < kGroup; ++k) {
        if (source) {
          memcpy(out + (k * kLanes + lane) * 4, source + k * 4, 4);
        } else {
          memset(out + (k * kLanes + lane) * 4, 0, 4);
        }
      }
      return;
    case TL_BF16:
      for (int k = 0; k < kGroup; ++k) {
        uint8_t* at = out + (k / 2) * 64 + lane * 4 + (k % 2) * 2;
        if (source) {
          memcpy(at, source + k * 2, 2);
        } else {
          memset(at, 0, 2);
        }
      }
      return;
    case TL_Q8_0:
      for (int k = 0; k < kGroup; ++k) {
        const int value = source ? static_cast<int8_t>(source[2 + k]) : 0;
        out[(k / 4) * 64 + lane * 4 + k % 4] = static_cast<uint8_t>(value + 128);
      }
      break;
    default: {
      const uint8_t* nibbles = source ? source + (format == TL_Q4_1 ? 4 : 2) : nullptr;
      for (int j = 0; j < 4; ++j) {
        for (int b = 0; b < 4; ++b) {
          const uint8_t low = nibbles ? nibble(nibbles, 4 * j + b) : 0;
          const uint8_t high = nibbles ? nibble(nibbles, 16 + 4 * j + b) : 0;
          out[j * 64 + lane * 4 + b] = static_cast<uint8_t>(low | high << 4);
        }
      }
    }
  }
  uint8_t* scales = out + (format == TL_Q8_0 ? 512 : 256);
  for (int i = 0; i < (format == TL_Q4_1 ? 2 : 1); ++i) {  // scale, minimum
    if (source) {
      memcpy(scales + 32 * i + 2 * lane, source + 2 * i, 2);
    } else {
      memset(scales + 32 * i + 2 * lane, 0, 2);
    }
  }
}

float half_value(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float size = exponent == 0    ? ldexpf(static_cast<float>(mantissa), -24)
                     : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                      : ldexpf(static_cast<float>(mantissa + 1024), exponent - 25);
  return h & 0x8000 ? -size : size;
}

uint16_t to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000u) return sign | 0x7e00;
  if (bits >= 0x477ff000u) return sign | 0x7c00;
  if (bits < 0x38800000u) {  // subnormal
    float size;
    memcpy(&size, &bits, 4);
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(lrintf(size * 16777216.0f)));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112 << 10)));
}

void put_half(uint8_t* out, float x) {
  const uint16_t h = to_half(x);
  memcpy(out, &h, 2);
}

uint8_t clamped(float x, float most) {
  const float rounded = rintf(x);
  return static_cast<uint8_t>(rounded < 0.0f ? 0.0f : rounded > most ? most : rounded);
}

void quantize_group(int format, const float* x, uint8_t* out) {
  float low = x[0], high = x[0], extreme = x[0];
  for (int k = 1; k < kGroup; ++k) {
    low = fminf(low, x[k]);
    high = fmaxf(high, x[k]);
    if (fabsf(x[k]) > fabsf(extreme)) extreme = x[k];
  }
  if (format == TL_Q8_0) {
    const float scale = fabsf(extreme) / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    put_half(out, scale);
    for (int k = 0; k < kGroup; ++k) out[2 + k] = static_cast<uint8_t>(static_cast<int8_t>(rintf(x[k] * inverse)));
    return;
  }
  const bool has_minimum = format == TL_Q4_1;
  const float scale = has_minimum ? (high - low) / 15.0f : extreme / -8.0f;
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f, first = has_minimum ? low : 0.0f;
  put_half(out, scale);
  if (has_minimum) put_half(out + 2, low);
  uint8_t* nibbles = out + (has_minimum ? 4 : 2);
  const float shift = has_minimum ? 0.0f : 8.0f;
  for (int k = 0; k < 16; ++k) {
    const uint8_t a = clamped((x[k] - first) * inverse + shift, 15.0f);
    const uint8_t b = clamped((x[k + 16] - first) * inverse + shift, 15.0f);
    nibbles[k] = static_cast<uint8_t>(a | b << 4);
  }
}

}  // namespace

namespace {

// Values of output `lane` in a tile's group.
void unpack_lane(int format, const uint8_t* group, int lane, float* out) {
  if (format == TL_F32) {
    for (int k = 0; k < kGroup; ++k) memcpy(out + k, group + (k * kLanes + lane) * 4, 4);
    return;
  }
  if (format == TL_BF16) {
    for (int k = 0; k < kGroup; ++k) {
      uint16_t half;
      memcpy(&half, group + (k / 2) * 64 + lane * 4 + (k % 2) * 2, 2);
      const uint32_t bits = static_cast<uint32_t>(half) << 16;
      memcpy(out + k, &bits, 4);
    }
    return;
  }
  const uint8_t* scales = group + (format == TL_Q8_0 ? 512 : 256);
  const float scale = half_value(scales + 2 * lane);
  const float minimum = format == TL_Q4_1 ? half_value(scales + 32 + 2 * lane) : 0.0f;
  const int offset = format == TL_Q8_0 ? 128 : format == TL_Q4_0 ? 8 : 0;
  for (int k = 0; k < kGroup; ++k) {
    const uint8_t byte = group[(format == TL_Q8_0 ? k / 4 : k % 16 / 4) * 64 + lane * 4 + k % 4];
    const int q = format == TL_Q8_0 ? byte : k < 16 ? byte & 15 : byte >> 4;
    out[k] = scale * static_cast<float>(q - offset) + minimum;
  }
}

}  // namespace

void unpack_row(const TlMatrix& matrix, int output, float* out) {
  const int num_groups = matrix.num_inputs / kGroup, bytes = group_bytes(matrix.format);
  const uint8_t* tile = matrix.data + static_cast<int64_t>(output / kLanes) * num_groups * bytes;
  for (int g = 0; g < num_groups; ++g) {
    unpack_lane(matrix.format, tile + static_cast<int64_t>(g) * bytes, output % kLanes, out + g * kGroup);
  }
}

}  // namespace tl

using namespace tl;

int64_t tl_packed_bytes(int32_t format, int32_t num_outputs, int32_t num_inputs) {
  if (group_bytes(format) == 0 || num_outputs <= 0 || num_inputs <= 0 || num_inputs % kGroup) return -1;
  const int64_t num_tiles = (num_outputs + kLanes - 1) / kLanes;
  return num_tiles * (num_inputs / kGroup) * group_bytes(format);
}

void tl_pack(TlPool* pool, int32_t format, const uint8_t* const* rows, int32_t num_outputs, int32_t num_inputs,
             uint8_t* out) {
  const int num_groups = num_inputs / kGroup, num_tiles = (num_outputs + kLanes - 1) / kLanes;
  pool->each(num_tiles, [&](int tile) {
    for (int g = 0; g < num_groups; ++g) {
      uint8_t* group = out + (static_cast<int64_t>(tile) * num_groups + g) * group_bytes(format);
      for (int lane = 0; lane < kLanes; ++lane) {
        const int output = tile * kLanes + lane;
        const uint8_t* row = output < num_outputs ? rows[output] : nullptr;
        pack_lane(format, row ? row + static_cast<int64_t>(g) * source_bytes(format) : nullptr, lane, group);
      }
    }
  });
}

void tl_quantize(TlPool* pool, int32_t format, const float* rows, int32_t num_rows, int32_t num_inputs, uint8_t* out) {
  const int num_groups = num_inputs / kGroup;
  pool->each(num_rows, [&](int row) {
    for (int g = 0; g < num_groups; ++g) {
      const int64_t at = static_cast<int64_t>(row) * num_groups + g;
      quantize_group(format, rows + at * kGroup, out + at * source_bytes(format));
    }
  });
}

void tl_unpack(const TlMatrix* matrix, float* out) {
  for (int i = 0; i < matrix->num_outputs; ++i) unpack_row(*matrix, i, out + static_cast<int64_t>(i) * matrix->num_inputs);
}
