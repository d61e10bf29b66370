// What a set of kernels for one instruction set offers. Every function here computes a row's result with the same
// operations in the same order whatever stands beside it: bitwise the same alone and in any batch.
#pragma once

#include <stdint.h>

#include "tokenloom.h"

namespace tl {

constexpr int kLanes = 16;       // outputs of a tile, and floats of a vector
constexpr int kGroup = 32;       // inputs that share a scale
constexpr int kSplit = 128;      // attention sums over so many positions at a time, from position 0 on
constexpr int kHighStep = 128;
constexpr int kRowBlock = 32;    // rows of a batch that a task takes at most
constexpr int kMaxTile = 8;      // rows that a micro kernel takes at once

// Rows of inputs: as floats, and for packed weights as integers with a scale per group and the sum of the group.
struct Inputs {
  float* values;    // [num_rows, num_inputs]; null if only the packed form is there
  int8_t* bits;     // [num_rows, num_inputs]; of 8 bits, or of 15 the upper part, worth kHighStep each
  int8_t* low;      // of 15 bits the lower part
  float* scales;    // [num_rows, num_groups]
  int32_t* sums;    // [num_rows, num_groups]
  int num_inputs;

  int num_groups() const { return num_inputs / kGroup; }
};

struct AttentionRow {  // one query of one head group
  const float* query;  // [group, head_dim]
  float* out;          // [group, head_dim]
  int position;
};

struct AttentionJob {
  const int32_t* block_table;
  const void* keys;    // of the layer
  const void* values;
  int kv_head;
  int num_kv_heads;
  int head_dim;
  int block_size;
  int group;           // query heads of a kv head
  bool is_bf16;
  int sliding_window;  // 0: none
  float scale;
};

struct Kernels {
  const char* name;
  // Quantise a row, to 8 bits (`low` null) or 15.
  void (*quantize_row)(const float* in, int num_inputs, int8_t* bits, int8_t* low, float* scales, int32_t* sums);
  // out[i] = in[i] * weight[i] / rms(in); may be in place.
  void (*norm_row)(const float* in, const float* weight, int size, float eps, float* out);
  // Outputs of tiles [first_tile, last_tile) for rows [first_row, last_row), to out[row - first_row][column] with
  // `stride` floats between rows and column 0 being the first tile's first output.
  void (*tiles)(const TlMatrix& matrix, const Inputs& in, int first_tile, int last_tile, int first_row, int last_row,
                float* out, int stride);
  // out[i] = silu(gate[i]) * up[i]; size a multiple of 16.
  void (*gate_row)(const float* gate, const float* up, int size, float* out);
  // Rotate the halves of a head, in place.
  void (*rope_row)(float* head, const float* cosines, const float* sines, int head_dim);
  // Attend for up to kMaxQueries queries of one kv head, whose positions rise; scratch as scratch_floats says.
  void (*attend)(const AttentionJob& job, const AttentionRow* rows, int num_rows, float* scratch);
  // Write a key (as a column) and a value.
  void (*store)(const AttentionJob& job, int position, const float* key, const float* value);
};

constexpr int kMaxQueries = 8;
// Floats of scratch that `attend` needs.
int64_t scratch_floats(int group, int head_dim);

const Kernels& portable_kernels();
const Kernels* avx2_kernels();  // null where the compiler or the machine has none
const Kernels* avx512_kernels();

// The kernels for this machine.
const Kernels& kernels();

// Bytes of a tile's group of inputs, by format (TL_F32 and TL_BF16 included).
int group_bytes(int format);

}  // namespace tl
