// The C interface of the CPU kernels: what Python calls through ctypes, and the types that the sources share.
//
// All pointers are to memory that the caller owns and keeps alive; nothing is freed or kept unless a comment says so.
// Sizes are in elements unless they say bytes. Functions that can fail return 0, or a negative code with `tl_error()`
// saying why. No function may be called by two threads at once on the same pool.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define TL_API __attribute__((visibility("default")))
#define TL_ABI_VERSION 1

// How a weight matrix is kept. Packed formats are cut into tiles of 16 outputs by groups of 32 inputs.
enum TlFormat {
  TL_F32 = 0,   // float
  TL_BF16 = 1,  // bfloat16
  TL_Q4_0 = 2,  // w = d * (q - 8), q of 4 bits, d fp16 per output and group
  TL_Q4_1 = 3,  // w = d * q + m
  TL_Q8_0 = 4,  // w = d * q, q of 8 bits, signed
};

// A linear layer's weights, `[num_outputs, num_inputs]`, packed by `tl_pack`.
typedef struct TlMatrix {
  const uint8_t* data;
  int32_t format;
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t input_bits;  // of packed formats: 8, or 15 for twice the products and a rounding that nobody sees
  const float* bias;   // [num_outputs] or null
} TlMatrix;

typedef struct TlLayer {
  TlMatrix qkv;      // outputs: heads of queries, then of keys, then of values
  TlMatrix out;      // attention output
  TlMatrix gate_up;  // outputs: 16 of gate, 16 of up, and so on in turn (`tl_pack` is given that order)
  TlMatrix down;
  const float* attention_norm;  // [hidden_size]
  const float* mlp_norm;        // [hidden_size]
  const float* query_norm;      // [head_dim] or null
  const float* key_norm;        // [head_dim] or null
  int32_t sliding_window;       // a query sees so many keys, itself included; 0: all
  float attention_scale;
} TlLayer;

typedef struct TlModel {
  int32_t num_layers;
  int32_t hidden_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t intermediate_size;
  float norm_eps;
  const TlLayer* layers;
  TlMatrix embedding;        // rows are looked up
  TlMatrix head;             // may be the same as embedding
  const float* final_norm;   // [hidden_size]
  const float* inv_freq;     // [head_dim / 2], rope's angle per position
  float rope_scale;          // factor on cosine and sine
} TlModel;

// KV memory of a layer: per block and head, keys as `[head_dim, block_size]`, values as `[block_size, head_dim]`.
typedef struct TlCache {
  void* const* keys;    // [num_layers]
  void* const* values;  // [num_layers]
  int32_t is_bf16;      // else float
  int32_t block_size;   // a multiple of 16
} TlCache;

// The tokens of a step. Rows are requests; each computes the tokens from its `first_positions` on.
typedef struct TlStep {
  int32_t num_tokens;
  int32_t num_rows;
  const int32_t* token_ids;        // [num_tokens]
  const int32_t* cu_seqlens_q;     // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows], the new tokens included
  const int32_t* block_table;      // [num_rows, max_blocks]
  int32_t max_blocks;
} TlStep;

typedef struct TlPool TlPool;

TL_API int32_t tl_abi_version(void);
// The instruction set that the kernels use: "avx512-vnni", "avx2" or "portable".
TL_API const char* tl_isa(void);
// Use another one, "" for the best; -1 if this machine does not have it. Not while anything runs.
TL_API int32_t tl_choose_isa(const char* name);

TL_API TlPool* tl_pool_create(int32_t num_threads);
TL_API void tl_pool_destroy(TlPool* pool);

// Bytes that `tl_pack` writes. -1: the shape does not fit the format (groups of 32 inputs; any number of outputs).
TL_API int64_t tl_packed_bytes(int32_t format, int32_t num_outputs, int32_t num_inputs);
// Pack a matrix. `rows[i]` points to the source of output i: GGUF blocks for packed formats, else numbers of the format.
TL_API void tl_pack(TlPool* pool, int32_t format, const uint8_t* const* rows, int32_t num_outputs, int32_t num_inputs,
                    uint8_t* out);
// Quantise rows of floats to GGUF blocks of Q4_0, Q4_1 or Q8_0.
TL_API void tl_quantize(TlPool* pool, int32_t format, const float* rows, int32_t num_rows, int32_t num_inputs,
                        uint8_t* out);
// The values of a packed matrix, [num_outputs, num_inputs].
TL_API void tl_unpack(const TlMatrix* matrix, float* out);

// out[num_rows, num_outputs] = in[num_rows, num_inputs] * matrix^T (+ bias).
TL_API void tl_linear(TlPool* pool, const TlMatrix* matrix, const float* in, int32_t num_rows, float* out);

// Attention alone: store the step's keys and values, then attend; q [T, heads, dim], k and v [T, kv_heads, dim].
TL_API void tl_attention(TlPool* pool, const TlModel* model, int32_t layer, const TlCache* cache, const TlStep* step,
                         const float* q, const float* k, const float* v, float* out);

// The body: hidden states after the final norm, [num_tokens, hidden_size]. `progress` rises by one with each layer.
// Returns 0, or -1 if memory is short.
TL_API int32_t tl_hidden_states(TlPool* pool, const TlModel* model, const TlCache* cache, const TlStep* step,
                                float* hidden, int64_t* progress);
// The head: [num_rows, hidden_size] to [num_rows, vocabulary].
TL_API void tl_logits(TlPool* pool, const TlModel* model, const float* hidden, int32_t num_rows, float* logits);

#if defined(__cplusplus)
}
#endif
