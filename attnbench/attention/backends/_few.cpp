// Attention of a few queries a row, as in a step of decoding: its scores and contexts are products with a cache.

#include <cstdint>

#include "../_cached_products.hpp"
#include "_few.hpp"

// See `Attend`: the context of each query.
extern "C" int attnbench_attend(const Attention* a, int threads) {
    const Sizes& s = a->sizes;
    if (const int failed = compare_rows(a->query, a->keys, a->listed, s, a->scale, a->scores, threads)) return failed;
    const Shape rows = {s.rows * s.queries, s.heads, s.queries, s.keys};
    if (const int failed = a->forward(&a->transform, a->scores, &a->valid, &rows, a->weights, threads)) return failed;
    Sizes mixed = s;
    mixed.width = a->width;
    return blend_rows(a->weights, a->values, a->listed, mixed, a->out, threads);
}
