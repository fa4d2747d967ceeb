// Decodes: one query a sequence, its keys read in pieces (flash-decoding).
#pragma once

#include <cmath>
#include <vector>

#include "paged.h"

namespace jkv {

constexpr int64_t kSplit = 256;  // keys that a thread takes at a time

// What a query has summed, unnormalized.
struct Partial {
  float* peak;   // [heads] running maximum
  float* total;  // [heads] running sum of exponentials
  float* out;    // [heads, dim]
};

// The pool's rows of a block of tokens; what lies past the end is the last token again.
template <typename T>
struct Block {
  const T* rows[kKeys];
  Token tokens[kKeys];

  void find(const Call<T>& c, int64_t seq, int64_t key, int64_t end) {
    for (int64_t j = 0; j < kKeys; ++j) {
      tokens[j] = token(c, seq, std::min(key + j, end - 1));
      rows[j] = at(c, tokens[j]);
    }
  }
};

// Logits of G queries and kLanes keys, which lie at `offset` of their rows, into s[g * kKeys ...]. While they
// are made, the same part of the next block is fetched: the processor does not foresee that.
template <int G, typename T>
void decode_scores(const Call<T>& c, const float* q, const T* const* rows, const T* const* next, int64_t offset,
                   float* s) {
  Vec parts[G][kLanes];
  for (int j = 0; j < kLanes; ++j) {
    Vec acc[G] = {};
    for (int64_t d = 0; d < c.dim; d += kLanes) {
      Vec k = load_stored(rows[j] + offset + d);
      __builtin_prefetch(next[j] + offset + d, 0, 2);
      for (int g = 0; g < G; ++g) acc[g] += load(q + g * c.dim + d) * k;
    }
    for (int g = 0; g < G; ++g) parts[g][j] = acc[g];
  }
  for (int g = 0; g < G; ++g) store(s + g * kKeys, sums(parts[g]));
}

// Adds to the outputs of G queries the weighted values of a block, V vectors at `offset` of their rows.
template <int G, int V, typename T>
void decode_values(const Call<T>& c, const T* const* rows, const T* const* next, int64_t offset, int64_t keys,
                   const float* p, float* out) {
  Vec acc[G][V];
  for (int g = 0; g < G; ++g) {
    for (int i = 0; i < V; ++i) acc[g][i] = load(out + g * c.dim + i * kLanes);
  }
  for (int64_t j = 0; j < keys; ++j) {
    for (int i = 0; i < V; ++i) {
      Vec v = load_stored(rows[j] + offset + i * kLanes);
      __builtin_prefetch(next[j] + offset + i * kLanes, 0, 2);
      for (int g = 0; g < G; ++g) acc[g][i] += p[g * kKeys + j] * v;
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int i = 0; i < V; ++i) store(out + g * c.dim + i * kLanes, acc[g][i]);
  }
}

// One head's logits into weights; what it has summed before shrinks to the new maximum.
template <typename T>
void decode_weights(const Call<T>& c, int64_t head, const Token* tokens, int64_t keys, float* s, Partial run) {
  int64_t kv_head = head / c.group;
  if constexpr (kScaled<T>) {
    for (int64_t j = 0; j < keys; ++j) s[j] *= scale_of(c, tokens[j], kv_head, 0);
  }
  if (c.soft_cap != 0) put_under(c.soft_cap, s, keys);
  for (int64_t j = keys; j % kLanes; ++j) s[j] = kMasked;
  Vec top = broadcast(run.peak[head]), total = {};
  for (int64_t j = 0; j < keys; j += kLanes) top = vmax(top, load(s + j));
  float peak = largest(top), shrink = std::exp(run.peak[head] - peak);
  for (int64_t j = 0; j < keys; j += kLanes) {
    Vec e = exponential(load(s + j) - peak);
    total += e;
    store(s + j, e);
  }
  run.peak[head] = peak;
  run.total[head] = run.total[head] * shrink + sum(total);
  float* out = run.out + head * c.dim;
  for (int64_t d = 0; d < c.dim; d += kLanes) store(out + d, load(out + d) * shrink);
  if constexpr (kScaled<T>) {
    for (int64_t j = 0; j < keys; ++j) s[j] *= scale_of(c, tokens[j], kv_head, 1);
  }
}

// G heads, from `head` on, of one KV head take in a block's first keys.
template <int G, typename T>
void decode_heads(const Call<T>& c, const float* q, int64_t head, const Block<T>& block, const Block<T>& next,
                  int64_t keys, Partial run) {
  float s[G * kKeys];
  int64_t offset = head / c.group * 2 * c.dim, d = 0;
  for (int64_t j = 0; j < keys; j += kLanes) {
    decode_scores<G>(c, q + head * c.dim, block.rows + j, next.rows + j, offset, s + j);
  }
  for (int g = 0; g < G; ++g) decode_weights(c, head + g, block.tokens, keys, s + g * kKeys, run);
  float* out = run.out + head * c.dim;
  offset += c.dim;
  for (; d + kPanel * kLanes <= c.dim; d += kPanel * kLanes) {
    decode_values<G, kPanel>(c, block.rows, next.rows, offset + d, keys, s, out + d);
  }
  for (; d < c.dim; d += kLanes) decode_values<G, 1>(c, block.rows, next.rows, offset + d, keys, s, out + d);
}

template <typename T>
void decode_range(const Call<T>& c, int64_t seq, int64_t begin, int64_t end, Partial run) {
  std::vector<float> q(c.heads * c.dim);
  for (int64_t i = 0; i < c.heads * c.dim; ++i) q[i] = c.q[seq * c.heads * c.dim + i] * c.scale;
  std::fill(run.peak, run.peak + c.heads, kMasked);
  std::fill(run.total, run.total + c.heads, 0.0f);
  std::fill(run.out, run.out + c.heads * c.dim, 0.0f);
  Block<T> blocks[2];
  blocks[0].find(c, seq, begin, end);
  int now = 0;
  for (int64_t key = begin; key < end; key += kKeys, now = 1 - now) {
    int64_t keys = std::min(kKeys, end - key);
    Block<T>&block = blocks[now], &next = blocks[1 - now];
    next.find(c, seq, key + kKeys, end);
    for (int64_t first = 0; first < c.heads; first += c.group) {
      int64_t head = first, last = first + c.group;
      for (; last - head >= 4; head += 4) decode_heads<4>(c, q.data(), head, block, next, keys, run);
      if (last - head == 3) decode_heads<3>(c, q.data(), head, block, next, keys, run);
      if (last - head == 2) decode_heads<2>(c, q.data(), head, block, next, keys, run);
      if (last - head == 1) decode_heads<1>(c, q.data(), head, block, next, keys, run);
    }
  }
}

struct DecodePiece {
  int64_t seq, begin, end;
};

// The first `sequences` ones' queries, with keys cut at multiples of kSplit; the parts are put together at the
// end.
template <typename T>
void decode(xla::ffi::ThreadPool pool, const Call<T>& c, int64_t sequences) {
  std::vector<DecodePiece> pieces;
  for (int64_t i = 0; i < sequences; ++i) {
    int64_t end = c.kv_lens[i];
    for (int64_t begin = first_key(c, end - 1); begin < end;) {
      int64_t next = std::min(end, (begin / kSplit + 1) * kSplit);
      pieces.push_back({i, begin, next});
      begin = next;
    }
  }
  int64_t size = c.heads * (c.dim + 2);
  std::vector<float> parts(pieces.size() * size);
  auto part = [&](int64_t i) {
    float* p = parts.data() + i * size;
    return Partial{p, p + c.heads, p + 2 * c.heads};
  };
  parallel_for(pool, pieces.size(), [&](int64_t i) {
    decode_range(c, pieces[i].seq, pieces[i].begin, pieces[i].end, part(i));
  });
  for (size_t i = 0, last; i < pieces.size(); i = last) {
    for (last = i; last < pieces.size() && pieces[last].seq == pieces[i].seq;) ++last;
    for (int64_t h = 0; h < c.heads; ++h) {
      float peak = kMasked, total = 0;
      for (size_t j = i; j < last; ++j) peak = std::max(peak, part(j).peak[h]);
      float* out = c.out + (pieces[i].seq * c.heads + h) * c.dim;
      std::fill(out, out + c.dim, 0.0f);
      for (size_t j = i; j < last; ++j) {
        float weight = std::exp(part(j).peak[h] - peak);
        total += weight * part(j).total[h];
        for (int64_t d = 0; d < c.dim; ++d) out[d] += weight * part(j).out[h * c.dim + d];
      }
      for (int64_t d = 0; d < c.dim; ++d) out[d] /= total;
    }
  }
}

}  // namespace jkv
