// How a weight lies in memory: in panels of 16 outputs, `[panels, words, 16]` of 32 bits. An output's words
// are its codes, a block of 32 inputs after the other; a block's scales follow its codes.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace jkv {

constexpr int kPanel = 16;
constexpr int kParts = kPanel / kLanes;  // vectors of a panel
constexpr int kBlock = 32;               // inputs that share scales

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

inline Words load_words(const uint32_t* p) {
  Words w;
  std::memcpy(&w, p, sizeof w);
  return w;
}

// A word has the codes of kCodes inputs in a row; with two passes, also of as many in the block's second half.
// kScales are those of a block.
struct Float32 {
  static constexpr int kCodes = 1, kPasses = 1, kScales = 0;
  static Vec decode(Words w, int, int, const Vec*) { return (Vec)w; }
};

struct BFloat16 {
  static constexpr int kCodes = 2, kPasses = 1, kScales = 0;
  static Vec decode(Words w, int, int i, const Vec*) { return (Vec)(i ? w & 0xffff0000 : w << 16); }
};

// code * scale, as GGUF's Q8_0
struct Int8 {
  static constexpr int kCodes = 4, kPasses = 1, kScales = 1;
  static Vec decode(Words w, int, int i, const Vec* scales) {
    return __builtin_convertvector((IntVec)(w << (24 - 8 * i)) >> 24, Vec) * scales[0];
  }
};

// code * scale + least, as GGUF's Q4_1
struct Int4 {
  static constexpr int kCodes = 4, kPasses = 2, kScales = 2;
  static Vec decode(Words w, int pass, int i, const Vec* scales) {
    IntVec code = (IntVec)(w >> (8 * i + 4 * pass) & 15);
    return __builtin_convertvector(code, Vec) * scales[0] + scales[1];
  }
};

// Words of a block without its scales.
template <typename E>
constexpr int kCodeWords = kBlock / E::kCodes / E::kPasses;

template <typename E>
constexpr int kBlockWords = kCodeWords<E> + E::kScales;

template <typename E>
constexpr int64_t words_of(int64_t inputs) {
  return inputs / (E::kCodes * E::kPasses) + inputs / kBlock * E::kScales;
}

// Words of what is left of a block, where `inputs` are left of all.
template <typename E>
constexpr int words_in_pass(int64_t inputs) {
  return (inputs < kBlock ? inputs : kBlock) / (E::kCodes * E::kPasses);
}

template <typename E>
inline void load_scales(const uint32_t* block, int part, Vec* scales) {
  for (int i = 0; i < E::kScales; ++i) scales[i] = (Vec)load_words(block + (kCodeWords<E> + i) * kPanel + part);
}

}  // namespace jkv
