// Prefills: chunks of queries, each block of keys brought into order once for many of them.
#pragma once

#include <iterator>
#include <vector>

#include "paged.h"

namespace jkv {

constexpr int64_t kTileRows = 192;  // queries times heads of a group that a thread takes at a time
constexpr int kRows = 6;            // of these, multiplied at once

// c[m][n] = a[m][...depth] * b[...depth][n] (+ c * shrink[m]) for kRows rows and V vectors of columns.
template <int V>
void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, const float* shrink,
              float* c, int64_t c_stride) {
  Vec acc[kRows][V];
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < V; ++v) {
      acc[m][v] = shrink ? load(c + m * c_stride + v * kLanes) * shrink[m] : Vec{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec bv[V];
    for (int v = 0; v < V; ++v) bv[v] = load(b + k * b_stride + v * kLanes);
    for (int m = 0; m < kRows; ++m) {
      Vec x = broadcast(a[m * a_stride + k]);
      keep(x);
      for (int v = 0; v < V; ++v) acc[m][v] += x * bv[v];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < V; ++v) store(c + m * c_stride + v * kLanes, acc[m][v]);
  }
}

inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                     const float* shrink, float* c, int64_t c_stride, int64_t columns) {
  int64_t n = 0;
  for (; n + kPanel * kLanes <= columns; n += kPanel * kLanes) {
    multiply<kPanel>(a, a_stride, b + n, b_stride, depth, shrink, c + n, c_stride);
  }
  for (; n < columns; n += kLanes) multiply<1>(a, a_stride, b + n, b_stride, depth, shrink, c + n, c_stride);
}

// Keys of one KV head transposed, [dim, kKeys], and values, [kKeys, dim]; zero past `keys`.
template <typename T>
void load_block(const Call<T>& c, int64_t seq, int64_t kv_head, int64_t key, int64_t keys, float* k, float* v) {
  for (int64_t j0 = 0; j0 < kKeys; j0 += kLanes) {
    const T* rows[kLanes];
    Token tokens[kLanes];
    int64_t used = std::max<int64_t>(0, std::min<int64_t>(kLanes, keys - j0));
    for (int64_t j = 0; j < used; ++j) {
      tokens[j] = token(c, seq, key + j0 + j);
      rows[j] = at(c, tokens[j]) + 2 * kv_head * c.dim;
    }
    for (int64_t d = 0; d < c.dim; d += kLanes) {
      Vec tile[kLanes] = {};
      for (int64_t j = 0; j < used; ++j) {
        tile[j] = load_stored(rows[j] + d) * scale_of(c, tokens[j], kv_head, 0);
      }
      transpose(tile);
      for (int64_t i = 0; i < kLanes; ++i) store(k + (d + i) * kKeys + j0, tile[i]);
      for (int64_t j = 0; j < kLanes; ++j) {
        Vec x = j < used ? load_stored(rows[j] + c.dim + d) * scale_of(c, tokens[j], kv_head, 1) : Vec{};
        store(v + (j0 + j) * c.dim + d, x);
      }
    }
  }
}

// kRows rows' logits over a block into weights, of row m those that it sees, from `from[m]` to `to[m]`.
// `shrink` is what the rows have summed before is to be multiplied by.
inline void soften(float* s, const int64_t* from, const int64_t* to, bool masked, float* peak, float* total,
                   float* shrink) {
  constexpr int kGroup = std::min(kRows, kLanes);
  for (int m0 = 0; m0 < kRows; m0 += kGroup) {
    int group = std::min(kGroup, kRows - m0);
    Vec tops[kLanes] = {}, parts[kLanes] = {};
    for (int m = 0; m < group; ++m) {
      Vec top = broadcast(kMasked);
      for (int64_t j = 0; j < kKeys; j += kLanes) {
        float* at = s + (m0 + m) * kKeys + j;
        Vec x = load(at);
        if (masked) {
          IntVec key = kIota + int32_t(j);
          x = select((key >= int32_t(from[m0 + m])) & (key <= int32_t(to[m0 + m])), x, broadcast(kMasked));
          store(at, x);
        }
        top = vmax(top, x);
      }
      tops[m] = top;
    }
    Vec before = Vec{}, summed = Vec{};
    std::memcpy(&before, peak + m0, group * sizeof(float));
    std::memcpy(&summed, total + m0, group * sizeof(float));
    Vec now = vmax(before, maxima(tops)), less = exponential(before - now);
    for (int m = 0; m < group; ++m) {
      float top = now[m];
      for (int64_t j = 0; j < kKeys; j += kLanes) {
        float* at = s + (m0 + m) * kKeys + j;
        Vec e = exponential(load(at) - top);
        parts[m] += e;
        store(at, e);
      }
    }
    summed = summed * less + sums(parts);
    std::memcpy(peak + m0, &now, group * sizeof(float));
    std::memcpy(total + m0, &summed, group * sizeof(float));
    std::memcpy(shrink + m0, &less, group * sizeof(float));
  }
}

struct PrefillPiece {
  int64_t seq, kv_head, first, queries;  // queries `first` ... of the chunk
};

// A piece's queries as rows, head by head of a group, and what they have summed; and a block of keys.
struct PrefillRows {
  int64_t used, count;   // whole multiples of kRows, the last rows zero
  float *q, *out;        // [count, dim]
  float *peak, *total;   // [count]
  float *k, *v, *s;      // see load_block; [kRows, kKeys]
};

// Cuts the arrays out of one thread's memory, each where a vector may start.
inline PrefillRows prefill_rows(int64_t used, int64_t dim) {
  thread_local std::vector<float> memory;
  int64_t count = (used + kRows - 1) / kRows * kRows, at = 0;
  int64_t sizes[] = {count * dim, count * dim, count, count, kKeys * dim, kKeys * dim, kRows * kKeys};
  int64_t starts[std::size(sizes)];
  for (size_t i = 0; i < std::size(sizes); ++i) {
    starts[i] = at;
    at += (sizes[i] + kLanes - 1) / kLanes * kLanes;
  }
  memory.resize(at + kLanes);
  float* m = memory.data();
  while (reinterpret_cast<uintptr_t>(m) % sizeof(Vec)) ++m;
  return {used,          count,         m + starts[0], m + starts[1], m + starts[2],
          m + starts[3], m + starts[4], m + starts[5], m + starts[6]};
}

// Where a row's query lies in `[tokens, heads, dim]`.
template <typename T>
int64_t place(const Call<T>& c, const PrefillPiece& piece, int64_t row) {
  int64_t token = c.q_starts[piece.seq] + piece.first + row / c.group;
  return (token * c.heads + piece.kv_head * c.group + row % c.group) * c.dim;
}

// Rows take in a block of keys that starts at `key`; the first one's query stands at `position`.
template <typename T>
void prefill_block(const Call<T>& c, const PrefillRows& rows, int64_t position, int64_t last, int64_t key) {
  bool masked = key + kKeys - 1 > position || key < first_key(c, last);
  for (int64_t r = 0; r < rows.count; r += kRows) {
    int64_t from[kRows], to[kRows];
    for (int m = 0; m < kRows; ++m) {
      int64_t at = std::min(position + (r + m) / c.group, last);
      from[m] = std::max<int64_t>(first_key(c, at) - key, 0);
      to[m] = std::min(at - key, kKeys);
    }
    if (to[kRows - 1] < 0) continue;
    float shrink[kRows];
    multiply(rows.q + r * c.dim, c.dim, rows.k, kKeys, c.dim, nullptr, rows.s, kKeys, kKeys);
    if (c.soft_cap != 0) put_under(c.soft_cap, rows.s, kRows * kKeys);
    soften(rows.s, from, to, masked, rows.peak + r, rows.total + r, shrink);
    multiply(rows.s, kKeys, rows.v, c.dim, kKeys, shrink, rows.out + r * c.dim, c.dim, c.dim);
  }
}

template <typename T>
void prefill_piece(const Call<T>& c, const PrefillPiece& piece) {
  PrefillRows rows = prefill_rows(piece.queries * c.group, c.dim);
  std::fill(rows.q, rows.q + rows.count * c.dim, 0.0f);
  std::fill(rows.out, rows.out + rows.count * c.dim, 0.0f);
  std::fill(rows.peak, rows.peak + rows.count, kMasked);
  std::fill(rows.total, rows.total + rows.count, 0.0f);
  for (int64_t r = 0; r < rows.used; ++r) {
    const float* q = c.q + place(c, piece, r);
    for (int64_t d = 0; d < c.dim; ++d) rows.q[r * c.dim + d] = q[d] * c.scale;
  }
  int64_t position = c.kv_lens[piece.seq] - c.q_lens[piece.seq] + piece.first;
  int64_t last = position + piece.queries - 1;
  for (int64_t key = first_key(c, position) / kKeys * kKeys; key <= last; key += kKeys) {
    load_block(c, piece.seq, piece.kv_head, key, std::min(kKeys, last + 1 - key), rows.k, rows.v);
    prefill_block(c, rows, position, last, key);
  }
  for (int64_t r = 0; r < rows.used; ++r) {
    float* out = c.out + place(c, piece, r);
    for (int64_t d = 0; d < c.dim; ++d) out[d] = rows.out[r * c.dim + d] / rows.total[r];
  }
}

// Chunks of queries, some queries of one KV head's group at a time, the longest first.
template <typename T>
void prefill(xla::ffi::ThreadPool pool, const Call<T>& c, int64_t begin, int64_t end) {
  int64_t queries = 0;
  for (int64_t i = begin; i < end; ++i) queries += c.q_lens[i];
  int64_t tile = std::max<int64_t>(1, kTileRows / c.group);
  while (tile > 8 && queries * c.kv_heads < 4 * pool.num_threads() * tile) tile /= 2;
  std::vector<PrefillPiece> pieces;
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      for (int64_t q = 0; q < c.q_lens[i]; q += tile) {
        pieces.push_back({i, h, q, std::min<int64_t>(tile, c.q_lens[i] - q)});
      }
    }
  }
  auto keys = [&](const PrefillPiece& p) { return c.kv_lens[p.seq] - c.q_lens[p.seq] + p.first; };
  std::stable_sort(pieces.begin(), pieces.end(), [&](auto& a, auto& b) { return keys(a) > keys(b); });
  parallel_for(pool, pieces.size(), [&](int64_t i) { prefill_piece(c, pieces[i]); });
}

}  // namespace jkv
