// The forward pass of the Llama shape: RMS norms, rope, grouped attention over the paged cache, gated SiLU.
//
// A layer is seven jobs for the pool, each cut into tasks over outputs, heads or rows:
//   norm and quantise | qkv, rope, store | attend, quantise | output, residual | norm and quantise |
//   gate and up, SiLU, quantise | down, residual
// Every task computes whole results of the rows it names, so neither the cut nor the number of threads changes a bit.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace tl {

void unpack_row(const TlMatrix& matrix, int output, float* out);

int64_t scratch_floats(int group, int head_dim) {
  const int64_t num = static_cast<int64_t>(kMaxQueries) * group;
  return num * (kSplit + head_dim + 4);
}

namespace {

std::atomic<const Kernels*> chosen{nullptr};

int blocks_of(int count, int size) { return (count + size - 1) / size; }

bool is_packed(const TlMatrix& matrix) { return matrix.format >= TL_Q4_0; }

// Memory for rows of inputs, in the form that a matrix takes.
class Rows {
 public:
  Rows(int num_rows, int num_inputs)
      : values_(static_cast<int64_t>(num_rows) * num_inputs),
        bits_(values_.size()),
        low_(values_.size()),
        scales_(values_.size() / kGroup),
        sums_(values_.size() / kGroup),
        inputs_{values_.data(), bits_.data(), low_.data(), scales_.data(), sums_.data(), num_inputs} {}

  const Inputs& inputs() const { return inputs_; }
  float* row(int i) { return values_.data() + static_cast<int64_t>(i) * inputs_.num_inputs; }

  // Quantise inputs [first, first + count) of a row, which were written to `row`, for a matrix that takes them so; count
  // in whole groups.
  void pack(const TlMatrix& matrix, int i, int first, int count) {
    if (!is_packed(matrix)) return;
    const int64_t at = static_cast<int64_t>(i) * inputs_.num_inputs + first;
    kernels().quantize_row(values_.data() + at, count, bits_.data() + at,
                           matrix.input_bits == 8 ? nullptr : low_.data() + at, scales_.data() + at / kGroup,
                           sums_.data() + at / kGroup);
  }

 private:
  std::vector<float> values_;
  std::vector<int8_t> bits_;
  std::vector<int8_t> low_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
  Inputs inputs_;
};

// Where each token of a step belongs.
struct Token {
  int row;
  int position;
};

std::vector<Token> tokens_of(const TlStep& step) {
  std::vector<Token> tokens(step.num_tokens);
  for (int row = 0; row < step.num_rows; ++row) {
    const int first = step.cu_seqlens_q[row], last = step.cu_seqlens_q[row + 1];
    for (int t = first; t < last; ++t) tokens[t] = {row, step.seq_lens[row] - (last - t)};
  }
  return tokens;
}

// Runs of queries that attend together: tokens of one row, at most kMaxQueries.
struct Run {
  int first_token;
  int num_tokens;
};

std::vector<Run> runs_of(const TlStep& step) {
  std::vector<Run> runs;
  for (int row = 0; row < step.num_rows; ++row) {
    for (int t = step.cu_seqlens_q[row]; t < step.cu_seqlens_q[row + 1]; t += kMaxQueries) {
      runs.push_back({t, std::min(kMaxQueries, step.cu_seqlens_q[row + 1] - t)});
    }
  }
  // The longest contexts first, so that no thread is left alone with one at the end.
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.num_tokens > b.num_tokens; });
  return runs;
}

AttentionJob job_of(const TlModel& model, int layer, const TlCache& cache, const int32_t* block_table, int kv_head) {
  const TlLayer& one = model.layers[layer];
  return {block_table,
          cache.keys[layer],
          cache.values[layer],
          kv_head,
          model.num_kv_heads,
          model.head_dim,
          cache.block_size,
          model.num_heads / model.num_kv_heads,
          cache.is_bf16 != 0,
          one.sliding_window,
          one.attention_scale};
}

class Forward {
 public:
  Forward(TlPool& pool, const TlModel& model, const TlCache& cache, const TlStep& step)
      : pool_(pool),
        model_(model),
        cache_(cache),
        step_(step),
        num_tokens_(step.num_tokens),
        num_row_blocks_(blocks_of(step.num_tokens, kRowBlock)),
        tokens_(tokens_of(step)),
        runs_(runs_of(step)),
        x_(static_cast<int64_t>(step.num_tokens) * model.hidden_size),
        normed_(step.num_tokens, model.hidden_size),
        attended_(step.num_tokens, model.num_heads * model.head_dim),
        gated_(step.num_tokens, model.intermediate_size),
        queries_(static_cast<int64_t>(step.num_tokens) * model.num_heads * model.head_dim),
        cosines_(static_cast<int64_t>(step.num_tokens) * model.head_dim / 2),
        sines_(cosines_.size()) {}

  void run(float* hidden, int64_t* progress) {
    begin();
    for (int i = 0; i < model_.num_layers; ++i) {
      const TlLayer& layer = model_.layers[i];
      norm(layer.attention_norm, layer.qkv);
      project(i);
      attend(i);
      add(layer.out, attended_.inputs());
      norm(layer.mlp_norm, layer.gate_up);
      gate(layer);
      add(layer.down, gated_.inputs());
      if (progress != nullptr) __atomic_add_fetch(progress, 1, __ATOMIC_RELAXED);
    }
    pool_.each(num_tokens_, [&](int t) {
      const int64_t at = static_cast<int64_t>(t) * model_.hidden_size;
      kernels().norm_row(x_.data() + at, model_.final_norm, model_.hidden_size, model_.norm_eps, hidden + at);
    });
  }

 private:
  void begin() {
    pool_.each(num_tokens_, [&](int t) {
      unpack_row(model_.embedding, step_.token_ids[t], x_.data() + static_cast<int64_t>(t) * model_.hidden_size);
      const int half = model_.head_dim / 2;
      for (int i = 0; i < half; ++i) {
        const float angle = static_cast<float>(tokens_[t].position) * model_.inv_freq[i];
        cosines_[static_cast<int64_t>(t) * half + i] = cosf(angle) * model_.rope_scale;
        sines_[static_cast<int64_t>(t) * half + i] = sinf(angle) * model_.rope_scale;
      }
    });
  }

  void norm(const float* weight, const TlMatrix& next) {
    pool_.each(num_tokens_, [&](int t) {
      const float* x = x_.data() + static_cast<int64_t>(t) * model_.hidden_size;
      kernels().norm_row(x, weight, model_.hidden_size, model_.norm_eps, normed_.row(t));
      normed_.pack(next, t, 0, model_.hidden_size);
    });
  }

  // A task is one head for a block of tokens: its part of the product, rope, and the write to the cache.
  void project(int index) {
    const TlLayer& layer = model_.layers[index];
    const int dim = model_.head_dim, num_all = model_.num_heads + 2 * model_.num_kv_heads, half = dim / 2;
    pool_.each(num_all * num_row_blocks_, [&](int task) {
      const int head = task % num_all, first = task / num_all * kRowBlock;
      const int last = std::min(first + kRowBlock, num_tokens_), tiles = dim / kLanes;
      std::vector<float> out(static_cast<int64_t>(last - first) * dim);
      kernels().tiles(layer.qkv, normed_.inputs(), head * tiles, (head + 1) * tiles, first, last, out.data(), dim);
      for (int t = first; t < last; ++t) {
        float* one = out.data() + static_cast<int64_t>(t - first) * dim;
        const bool is_query = head < model_.num_heads, is_value = head >= model_.num_heads + model_.num_kv_heads;
        if (is_value) {
          values_of(t, head - model_.num_heads - model_.num_kv_heads, one);
          continue;
        }
        const float* weight = is_query ? layer.query_norm : layer.key_norm;
        if (weight != nullptr) kernels().norm_row(one, weight, dim, model_.norm_eps, one);
        kernels().rope_row(one, cosines_.data() + static_cast<int64_t>(t) * half,
                           sines_.data() + static_cast<int64_t>(t) * half, dim);
        if (is_query) {
          memcpy(queries_.data() + (static_cast<int64_t>(t) * model_.num_heads + head) * dim, one, dim * sizeof(float));
        } else {
          keys_of(t, head - model_.num_heads, one);
        }
      }
    });
    store(index);
  }

  void keys_of(int token, int kv_head, const float* key) { keep(keys_, token, kv_head, key); }
  void values_of(int token, int kv_head, const float* value) { keep(values_, token, kv_head, value); }

  void keep(std::vector<float>& all, int token, int kv_head, const float* one) {
    memcpy(all.data() + (static_cast<int64_t>(token) * model_.num_kv_heads + kv_head) * model_.head_dim, one,
           model_.head_dim * sizeof(float));
  }

  void store(int index) {
    pool_.each(num_tokens_, [&](int t) {
      const int32_t* table = step_.block_table + static_cast<int64_t>(tokens_[t].row) * step_.max_blocks;
      for (int head = 0; head < model_.num_kv_heads; ++head) {
        const int64_t at = (static_cast<int64_t>(t) * model_.num_kv_heads + head) * model_.head_dim;
        kernels().store(job_of(model_, index, cache_, table, head), tokens_[t].position, keys_.data() + at,
                        values_.data() + at);
      }
    });
  }

  void attend(int index) {
    const int dim = model_.head_dim, group = model_.num_heads / model_.num_kv_heads;
    const TlMatrix& next = model_.layers[index].out;
    pool_.each(static_cast<int>(runs_.size()) * model_.num_kv_heads, [&](int task) {
      const Run& run = runs_[task / model_.num_kv_heads];
      const int kv_head = task % model_.num_kv_heads;
      thread_local std::vector<float> scratch;
      scratch.resize(scratch_floats(group, dim));
      AttentionRow rows[kMaxQueries];
      for (int i = 0; i < run.num_tokens; ++i) {
        const int t = run.first_token + i;
        rows[i] = {queries_.data() + (static_cast<int64_t>(t) * model_.num_heads + kv_head * group) * dim,
                   attended_.row(t) + static_cast<int64_t>(kv_head) * group * dim, tokens_[t].position};
      }
      const int32_t* table = step_.block_table + static_cast<int64_t>(tokens_[run.first_token].row) * step_.max_blocks;
      kernels().attend(job_of(model_, index, cache_, table, kv_head), rows, run.num_tokens, scratch.data());
      for (int i = 0; i < run.num_tokens; ++i) {
        attended_.pack(next, run.first_token + i, kv_head * group * dim, group * dim);
      }
    });
  }

  // x += matrix * in
  void add(const TlMatrix& matrix, const Inputs& in) {
    constexpr int kTiles = 2;
    const int num_tiles = blocks_of(matrix.num_outputs, kLanes), num_parts = blocks_of(num_tiles, kTiles);
    pool_.each(num_parts * num_row_blocks_, [&](int task) {
      const int first_tile = task % num_parts * kTiles, last_tile = std::min(first_tile + kTiles, num_tiles);
      const int first = task / num_parts * kRowBlock, last = std::min(first + kRowBlock, num_tokens_);
      float out[kRowBlock * kTiles * kLanes];
      kernels().tiles(matrix, in, first_tile, last_tile, first, last, out, kTiles * kLanes);
      const int begin = first_tile * kLanes, end = std::min(last_tile * kLanes, matrix.num_outputs);
      for (int t = first; t < last; ++t) {
        float* x = x_.data() + static_cast<int64_t>(t) * model_.hidden_size;
        const float* y = out + (t - first) * kTiles * kLanes;
        for (int i = begin; i < end; ++i) x[i] += y[i - begin];
      }
    });
  }

  // A task is two tiles of gate and two of up, side by side in turn: 32 values of the product, one group.
  void gate(const TlLayer& layer) {
    const int num_parts = model_.intermediate_size / kGroup;
    pool_.each(num_parts * num_row_blocks_, [&](int task) {
      const int part = task % num_parts, first = task / num_parts * kRowBlock;
      const int last = std::min(first + kRowBlock, num_tokens_);
      float out[kRowBlock * 2 * kGroup];
      kernels().tiles(layer.gate_up, normed_.inputs(), part * 4, part * 4 + 4, first, last, out, 2 * kGroup);
      for (int t = first; t < last; ++t) {
        const float* y = out + (t - first) * 2 * kGroup;
        float* row = gated_.row(t) + part * kGroup;
        kernels().gate_row(y, y + kLanes, kLanes, row);
        kernels().gate_row(y + 2 * kLanes, y + 3 * kLanes, kLanes, row + kLanes);
        gated_.pack(layer.down, t, part * kGroup, kGroup);
      }
    });
  }

  TlPool& pool_;
  const TlModel& model_;
  const TlCache& cache_;
  const TlStep& step_;
  const int num_tokens_;
  const int num_row_blocks_;
  const std::vector<Token> tokens_;
  const std::vector<Run> runs_;
  std::vector<float> x_;
  Rows normed_;
  Rows attended_;
  Rows gated_;
  std::vector<float> queries_;
  std::vector<float> cosines_;
  std::vector<float> sines_;
  std::vector<float> keys_ = std::vector<float>(static_cast<int64_t>(num_tokens_) * model_.num_kv_heads * model_.head_dim);
  std::vector<float> values_ = std::vector<float>(keys_.size());
};

void linear(TlPool& pool, const TlMatrix& matrix, const float* in, int num_rows, float* out) {
  constexpr int kTiles = 8;
  Rows rows(num_rows, matrix.num_inputs);
  pool.each(num_rows, [&](int i) {
    memcpy(rows.row(i), in + static_cast<int64_t>(i) * matrix.num_inputs, matrix.num_inputs * sizeof(float));
    rows.pack(matrix, i, 0, matrix.num_inputs);
  });
  const int num_tiles = blocks_of(matrix.num_outputs, kLanes), num_parts = blocks_of(num_tiles, kTiles);
  const int num_blocks = blocks_of(num_rows, kRowBlock);
  pool.each(num_parts * num_blocks, [&](int task) {
    const int first_tile = task % num_parts * kTiles, last_tile = std::min(first_tile + kTiles, num_tiles);
    const int first = task / num_parts * kRowBlock, last = std::min(first + kRowBlock, num_rows);
    float part[kRowBlock * kTiles * kLanes];
    kernels().tiles(matrix, rows.inputs(), first_tile, last_tile, first, last, part, kTiles * kLanes);
    const int begin = first_tile * kLanes, end = std::min(last_tile * kLanes, matrix.num_outputs);
    for (int i = first; i < last; ++i) {
      memcpy(out + static_cast<int64_t>(i) * matrix.num_outputs + begin, part + (i - first) * kTiles * kLanes,
             (end - begin) * sizeof(float));
    }
  });
}

}  // namespace

const Kernels& kernels() {
  const Kernels* found = chosen.load(std::memory_order_relaxed);
  if (found == nullptr) {
    found = avx512_kernels() ? avx512_kernels() : avx2_kernels() ? avx2_kernels() : &portable_kernels();
    chosen.store(found, std::memory_order_relaxed);
  }
  return *found;
}

}  // namespace tl

using namespace tl;

int32_t tl_abi_version(void) { return TL_ABI_VERSION; }

const char* tl_isa(void) { return kernels().name; }

int32_t tl_choose_isa(const char* name) {
  for (const Kernels* one : {avx512_kernels(), avx2_kernels(), &portable_kernels()}) {
    if (one != nullptr && (strcmp(name, one->name) == 0 || strcmp(name, "") == 0)) {
      chosen.store(one, std::memory_order_relaxed);
      return 0;
    }
  }
  return -1;
}

TlPool* tl_pool_create(int32_t num_threads) { return new (std::nothrow) TlPool(num_threads); }

void tl_pool_destroy(TlPool* pool) { delete pool; }

void tl_linear(TlPool* pool, const TlMatrix* matrix, const float* in, int32_t num_rows, float* out) {
  linear(*pool, *matrix, in, num_rows, out);
}

void tl_attention(TlPool* pool, const TlModel* model, int32_t layer, const TlCache* cache, const TlStep* step,
                  const float* q, const float* k, const float* v, float* out) {
  const std::vector<Token> tokens = tokens_of(*step);
  const std::vector<Run> runs = runs_of(*step);
  const int dim = model->head_dim, group = model->num_heads / model->num_kv_heads;
  auto job = [&](int token, int kv_head) {
    const int32_t* table = step->block_table + static_cast<int64_t>(tokens[token].row) * step->max_blocks;
    return job_of(*model, layer, *cache, table, kv_head);
  };
  pool->each(step->num_tokens, [&](int t) {
    for (int head = 0; head < model->num_kv_heads; ++head) {
      const int64_t at = (static_cast<int64_t>(t) * model->num_kv_heads + head) * dim;
      kernels().store(job(t, head), tokens[t].position, k + at, v + at);
    }
  });
  pool->each(static_cast<int>(runs.size()) * model->num_kv_heads, [&](int task) {
    const Run& run = runs[task / model->num_kv_heads];
    const int kv_head = task % model->num_kv_heads;
    std::vector<float> scratch(scratch_floats(group, dim));
    AttentionRow rows[kMaxQueries];
    for (int i = 0; i < run.num_tokens; ++i) {
      const int t = run.first_token + i;
      const int64_t at = (static_cast<int64_t>(t) * model->num_heads + kv_head * group) * dim;
      rows[i] = {q + at, out + at, tokens[t].position};
    }
    kernels().attend(job(run.first_token, kv_head), rows, run.num_tokens, scratch.data());
  });
}

int32_t tl_hidden_states(TlPool* pool, const TlModel* model, const TlCache* cache, const TlStep* step, float* hidden,
                         int64_t* progress) {
  try {
    Forward(*pool, *model, *cache, *step).run(hidden, progress);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

void tl_logits(TlPool* pool, const TlModel* model, const float* hidden, int32_t num_rows, float* logits) {
  linear(*pool, model->head, hidden, num_rows, logits);
}
