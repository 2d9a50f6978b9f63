// Products of a few queries a row with its keys, and of their weights with its values, and the attention made of both:
// what a step of decoding asks of a cache that is a part of a larger one, which matrix products would copy first.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t SERIAL = 1 << 16;  // numbers up to here are one thread's work
constexpr int LANES = 16;            // numbers of a key or value that are multiplied at once, with every query
constexpr int TOGETHER = 5;          // queries of one pass over the keys or values: what the registers hold

struct Rows {  // of a query, key or value each; strides in elements, the numbers of one position lie side by side
    float* data;
    int64_t batch, head, position;
    float* row(int64_t row, int64_t heads) const { return data + row / heads * batch + row % heads * head; }
};
struct Shape {
    int64_t rows, heads, queries, keys, width;  // batch * heads rows
};

struct Few {  // queries of a row, or their weights, scores or contexts: so many elements from one to the next
    float* data;
    int64_t apart;
    float* operator[](int64_t i) const { return data + i * apart; }
};

// out[i, j] = scale * query i . key j, for Q queries
template <int Q>
void compare(const Few& query, const float* key, int64_t apart, const Shape& s, float scale, const Few& out) {
    const int64_t whole = s.width - s.width % LANES;
    for (int64_t j = 0; j < s.keys; ++j, key += apart) {
        float sums[Q][LANES] = {};
        for (int64_t e = 0; e < whole; e += LANES)
            for (int i = 0; i < Q; ++i)
#pragma omp simd
                for (int l = 0; l < LANES; ++l) sums[i][l] += query[i][e + l] * key[e + l];
        for (int i = 0; i < Q; ++i) {
            float sum = 0;
            for (int64_t e = whole; e < s.width; ++e) sum += query[i][e] * key[e];
#pragma omp simd reduction(+ : sum)
            for (int l = 0; l < LANES; ++l) sum += sums[i][l];
            out[i][j] = scale * sum;
        }
    }
}

// out[i, e ... e + COUNT] = sum over j of weights[i, j] * values[j, e ... e + COUNT], for Q queries
template <int Q, int COUNT>
void blend_part(const Few& weights, const float* value, int64_t apart, const Shape& s, const Few& out, int64_t from) {
    float sums[Q][COUNT] = {};
    for (int64_t j = 0; j < s.keys; ++j, value += apart)
        for (int i = 0; i < Q; ++i) {
            const float share = weights[i][j];
#pragma omp simd
            for (int l = 0; l < COUNT; ++l) sums[i][l] += share * value[from + l];
        }
    for (int i = 0; i < Q; ++i)
        for (int l = 0; l < COUNT; ++l) out[i][from + l] = sums[i][l];
}

template <int Q>
void blend(const Few& weights, const float* value, int64_t apart, const Shape& s, float, const Few& out) {
    int64_t e = 0;
    for (; e + LANES <= s.width; e += LANES) blend_part<Q, LANES>(weights, value, apart, s, out, e);
    for (; e < s.width; ++e) blend_part<Q, 1>(weights, value, apart, s, out, e);
}

template <>
void blend<1>(const Few& weights, const float* value, int64_t apart, const Shape& s, float, const Few& context) {
    float* out = context[0];
    for (int64_t e = 0; e < s.width; ++e) out[e] = 0;
    for (int64_t j = 0; j < s.keys; ++j, value += apart) {
        const float share = weights[0][j];
        if (share == 0) continue;  // a key that is left out is not read
#pragma omp simd
        for (int64_t e = 0; e < s.width; ++e) out[e] += share * value[e];
    }
}

using Product = void (*)(const Few&, const float*, int64_t, const Shape&, float, const Few&);

// A product of every row, of up to TOGETHER queries at a time.
void each_row(
    const Product (&product)[TOGETHER], const Rows& asking, const Rows& held, const Shape& s, float scale, const Rows& out,
    int threads) {
    if (s.rows * s.queries * s.keys * s.width <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < s.rows; ++row) {
        const Few from = {asking.row(row, s.heads), asking.position}, to = {out.row(row, s.heads), out.position};
        for (int64_t i = 0; i < s.queries; i += TOGETHER) {
            const int64_t count = std::min<int64_t>(TOGETHER, s.queries - i);
            const Few some = {from[i], from.apart}, made = {to[i], to.apart};
            product[count - 1](some, held.row(row, s.heads), held.position, s, scale, made);
        }
    }
}

// Scores or weights, which lie side by side.
Rows side_by_side(float* data, const Shape& s) {
    return {data, s.heads * s.queries * s.keys, s.queries * s.keys, s.keys};
}

}  // namespace

// scores: rows x queries x keys, contiguous.
extern "C" void attnbench_compare(
    const Rows* query, const Rows* keys, const Shape* s, float scale, float* scores, int threads) {
    static constexpr Product PRODUCT[] = {compare<1>, compare<2>, compare<3>, compare<4>, compare<5>};
    each_row(PRODUCT, *query, *keys, *s, scale, side_by_side(scores, *s), threads);
}

// weights: rows x queries x keys, contiguous.
extern "C" void attnbench_blend(float* weights, const Rows* values, const Shape* s, const Rows* out, int threads) {
    static constexpr Product PRODUCT[] = {blend<1>, blend<2>, blend<3>, blend<4>, blend<5>};
    each_row(PRODUCT, side_by_side(weights, *s), *values, *s, 1, *out, threads);
}

using Forward = int (*)(
    int, const float*, const void*, const void*, const void*, const void*, int64_t, float*, int);

// The context of each query, whose scores and weights are left in `scores` and `weights`. forward, and what is given to it:
// that of _rows.cpp. Not 0 where it has failed.
extern "C" int attnbench_attend(
    const Rows* query, const Rows* keys, const Rows* values, const Shape* s, int64_t width, float scale, Forward forward,
    int kind, const void* valid, const void* keep, const void* excess, const void* rows, int64_t k, float* scores,
    float* weights, const Rows* out, int threads) {
    attnbench_compare(query, keys, s, scale, scores, threads);
    if (const int failed = forward(kind, scores, valid, keep, excess, rows, k, weights, threads)) return failed;
    Shape mixed = *s;
    mixed.width = width;
    attnbench_blend(weights, values, &mixed, out, threads);
    return 0;
}
