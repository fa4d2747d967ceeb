// The paged KV pool as it lies, and what a call's pieces share.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace jkv {

constexpr int64_t kKeys = 64;  // of a block
constexpr int kPanel = kRegisters == 32 ? 4 : 2;  // vectors of columns that a product takes at once
constexpr float kMasked = -1e30f;

// One call's operands. `T` is the stored type: float, bfloat16's bits or int8 with scales.
template <typename T>
struct Call {
  const T* values;      // [layers * pages, page_size, width]
  const float* scales;  // [layers * pages, 2 * kv_heads * page_size], of int8
  const float* q;       // [tokens, heads, dim]
  float* out;           // [tokens, heads, dim]
  const int32_t *table, *kv_lens, *q_starts, *q_lens;
  int64_t first_row, table_width, page_size, width, heads, kv_heads, group, dim, window;
  float scale, soft_cap;  // soft_cap is 0 where there is none
};

struct Token {
  int64_t row;     // of the pool
  int64_t offset;  // inside the page
};

template <typename T>
Token token(const Call<T>& c, int64_t seq, int64_t key) {
  return {c.first_row + c.table[seq * c.table_width + key / c.page_size], key % c.page_size};
}

template <typename T>
const T* at(const Call<T>& c, Token t) {
  return c.values + (t.row * c.page_size + t.offset) * c.width;
}

template <typename T>
constexpr bool kScaled = sizeof(T) == 1;

// What a key's (v = 0) or value's (v = 1) int8 are multiplied by.
template <typename T>
float scale_of(const Call<T>& c, Token t, int64_t kv_head, int v) {
  if constexpr (kScaled<T>) {
    return c.scales[(t.row * 2 * c.kv_heads + 2 * kv_head + v) * c.page_size + t.offset];
  } else {
    return 1.0f;
  }
}

inline Vec load_stored(const float* p) { return load(p); }

inline Vec load_stored(const uint16_t* p) {
  typedef uint16_t Bits __attribute__((vector_size(kLanes * 2)));
  typedef uint32_t Wide __attribute__((vector_size(kLanes * 4)));
  Bits b;
  std::memcpy(&b, p, sizeof b);
  return (Vec)(__builtin_convertvector(b, Wide) << 16);
}

inline Vec load_stored(const int8_t* p) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, IntVec), Vec);
}

// Logits x become cap * tanh(x / cap); tanh(x) is 1 - 2 / (e^2x + 1).
inline void put_under(float cap, float* s, int64_t n) {
  for (int64_t j = 0; j < n; j += kLanes) {
    Vec x = vmin(load(s + j) * (2 / cap), broadcast(80.0f));  // more would overflow, and is 1 already
    store(s + j, cap - 2 * cap / (exponential(x) + 1.0f));
  }
}

// The first key that a query at `position` sees.
template <typename T>
int64_t first_key(const Call<T>& c, int64_t position) {
  return std::max<int64_t>(position - c.window + 1, 0);
}

}  // namespace jkv
