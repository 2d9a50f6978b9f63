// What the compiled transforms (_rowwise.cpp) take.

#pragma once

#include <cstdint>

namespace {

enum Kind { SOFTMAX, TOPK, SPARSEMAX, ENTMAX15, ENTMAX, SIGMOID };

struct Strided {  // one value or one row for each row of the scores; strides in elements, 0 where it is broadcast
    const void* data;
    int64_t outer, middle, inner, key;
};
struct Shape {
    int64_t rows, middle, inner, keys;  // rows = outer * middle * inner
};
struct Transform {
    int kind;
    int64_t k;       // of top-k; keeps all where a row has no more, or it is 0
    Strided keep;    // of top-k
    Strided excess;  // of entmax
    int64_t part, whole, least;  // instead of k, unless whole is 0: that part of its living keys, rounded up, or `least`
    int first;       // of top-k: whether of equal scores the first ones are kept, k in all
};

// scores, out: rows x keys, contiguous. Not 0 where there is no memory.
using Forward = int (*)(
    const Transform*, const float* scores, const Strided* valid, const Shape*, float* out, int threads);

}  // namespace
