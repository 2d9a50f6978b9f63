// Products of a few queries a row with its keys, and of their weights with its values, and the attention made of both:
// what a step of decoding asks of a cache that is a part of a larger one, which matrix products would copy first.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t SERIAL = 1 << 16;  // numbers up to here are one thread's work
constexpr int LANES = 16;            // numbers of a key or value that are multiplied at once, with every query
constexpr int TOGETHER = 5;          // queries of one pass over the keys or values: what the registers hold

struct Rows {  // keys or values; strides in elements, the numbers of one position lie side by side
    const float* data;
    int64_t batch, head, position;
};
struct Shape {
    int64_t rows, heads, queries, keys, width;  // batch * heads rows
};

// out[i, j] = query i . key j, for Q queries
template <int Q> void compare(const float* query, const float* key, int64_t apart, const Shape& s, float* out) {
    const int64_t whole = s.width - s.width % LANES;
    for (int64_t j = 0; j < s.keys; ++j, key += apart) {
        float sums[Q][LANES] = {};
        for (int64_t e = 0; e < whole; e += LANES)
            for (int i = 0; i < Q; ++i)
#pragma omp simd
                for (int l = 0; l < LANES; ++l) sums[i][l] += query[i * s.width + e + l] * key[e + l];
        for (int i = 0; i < Q; ++i) {
            float sum = 0;
            for (int64_t e = whole; e < s.width; ++e) sum += query[i * s.width + e] * key[e];
#pragma omp simd reduction(+ : sum)
            for (int l = 0; l < LANES; ++l) sum += sums[i][l];
            out[i * s.keys + j] = sum;
        }
    }
}

// out[i, e ... e + COUNT] = sum over j of weights[i, j] * values[j, e ... e + COUNT], for Q queries
template <int Q, int COUNT>
void blend_part(const float* weights, const float* value, int64_t apart, const Shape& s, float* out) {
    float sums[Q][COUNT] = {};
    for (int64_t j = 0; j < s.keys; ++j, value += apart)
        for (int i = 0; i < Q; ++i) {
            const float share = weights[i * s.keys + j];
#pragma omp simd
            for (int l = 0; l < COUNT; ++l) sums[i][l] += share * value[l];
        }
    for (int i = 0; i < Q; ++i)
        for (int l = 0; l < COUNT; ++l) out[i * s.width + l] = sums[i][l];
}

template <int Q> void blend(const float* weights, const float* value, int64_t apart, const Shape& s, float* out) {
    int64_t e = 0;
    for (; e + LANES <= s.width; e += LANES) blend_part<Q, LANES>(weights, value + e, apart, s, out + e);
    for (; e < s.width; ++e) blend_part<Q, 1>(weights, value + e, apart, s, out + e);
}

template <> void blend<1>(const float* weights, const float* value, int64_t apart, const Shape& s, float* out) {
    for (int64_t e = 0; e < s.width; ++e) out[e] = 0;
    for (int64_t j = 0; j < s.keys; ++j, value += apart) {
        const float share = weights[j];
        if (share == 0) continue;  // a key that is left out is not read
#pragma omp simd
        for (int64_t e = 0; e < s.width; ++e) out[e] += share * value[e];
    }
}

using Product = void (*)(const float*, const float*, int64_t, const Shape&, float*);

// A product of every row, of up to TOGETHER queries at a time; asking and out have so many numbers a query
void each_row(
    const Product (&product)[TOGETHER], const float* asking, int64_t asked, const Rows& held, const Shape& s, float* out,
    int64_t given, int threads) {
    if (s.rows * s.queries * s.keys * s.width <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < s.rows; ++row) {
        const float* at = held.data + (row / s.heads) * held.batch + (row % s.heads) * held.head;
        for (int64_t i = 0; i < s.queries; i += TOGETHER) {
            const int64_t count = std::min<int64_t>(TOGETHER, s.queries - i), query = row * s.queries + i;
            product[count - 1](asking + query * asked, at, held.position, s, out + query * given);
        }
    }
}

}  // namespace

extern "C" void attnbench_compare(const float* query, const Rows* keys, const Shape* s, float* out, int threads) {
    static constexpr Product PRODUCT[] = {compare<1>, compare<2>, compare<3>, compare<4>, compare<5>};
    each_row(PRODUCT, query, s->width, *keys, *s, out, s->keys, threads);
}

extern "C" void attnbench_blend(const float* weights, const Rows* values, const Shape* s, float* out, int threads) {
    static constexpr Product PRODUCT[] = {blend<1>, blend<2>, blend<3>, blend<4>, blend<5>};
    each_row(PRODUCT, weights, s->keys, *values, *s, out, s->width, threads);
}

using Forward = int (*)(
    int, const float*, const void*, const void*, const void*, const void*, int64_t, float*, int);

// The context of each query, whose scores and weights are left in `scores` and `weights`. forward, and what is given to it:
// that of _rows.cpp. Not 0 where it has failed.
extern "C" int attnbench_attend(
    const float* query, const Rows* keys, const Rows* values, const Shape* s, int64_t width, Forward forward, int kind,
    const void* valid, const void* keep, const void* excess, const void* rows, int64_t k, float* scores, float* weights,
    float* out, int threads) {
    attnbench_compare(query, keys, s, scores, threads);
    if (const int failed = forward(kind, scores, valid, keep, excess, rows, k, weights, threads)) return failed;
    Shape mixed = *s;
    mixed.width = width;
    attnbench_blend(weights, values, &mixed, out, threads);
    return 0;
}
