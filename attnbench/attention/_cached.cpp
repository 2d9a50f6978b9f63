// The products of _cached_products.hpp, each in one call.

#include <cstdint>

#include "_cached_products.hpp"

// scores: rows x queries x keys, contiguous.
extern "C" void attnbench_compare(
    const Rows* query, const Rows* keys, const Sizes* s, float scale, float* scores, int threads) {
    compare_rows(*query, *keys, {}, *s, scale, scores, threads);
}

// weights: rows x queries x keys, contiguous.
extern "C" void attnbench_blend(float* weights, const Rows* values, const Sizes* s, const Rows* out, int threads) {
    blend_rows(weights, *values, {}, *s, *out, threads);
}
