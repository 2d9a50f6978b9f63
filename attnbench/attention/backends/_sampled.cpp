// Products of queries with those keys alone that a list gives each of them, read where they lie.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../_cached.hpp"
#include "../_lanes.hpp"

namespace {

constexpr int64_t SERIAL = 1 << 16;  // numbers up to here are one thread's work
constexpr int64_t NEAR = 1 << 17;    // numbers of a head that are fetched before they are read in any order
constexpr int PART = 64;             // numbers of a value that are multiplied at once

struct Lists {  // of each query, the keys side by side; so many elements from one batch, head or query to the next
    const int32_t* keys;
    int64_t batch, head, query;
    const int32_t* row(int64_t row, int64_t heads) const { return keys + row / heads * batch + row % heads * head; }
};

struct Row {  // what one head of one batch has
    float *asking, *held;
    int64_t query, position;  // elements from one to the next
    const int32_t* listed;
    int64_t list;     // elements from the list of one query to that of the next
    float* of_pairs;  // of each query and each of its keys
};

bool within(const int32_t* listed, int64_t count, int64_t keys) {
    int64_t outside = 0;
    for (int64_t j = 0; j < count; ++j) outside += listed[j] < 0 || listed[j] >= keys;
    return !outside;
}

void fetch(const Row& r, int64_t keys, int64_t width) {
    if (keys * width > NEAR) return;
    for (int64_t k = 0; k < keys; ++k)
        for (int64_t e = 0; e < width; e += 16) __builtin_prefetch(r.held + k * r.position + e, 0, 2);
}

// of_pairs = query . key of each query and key that it lists: the sums of LANES of them made together
void compare(const Row& r, int64_t n, int64_t queries, int64_t width) {
    const int64_t whole = width - width % LANES, pairs = queries * n;
    int64_t q = 0, j = 0;
    for (int64_t p = 0; p < pairs; p += LANES) {
        const int64_t count = std::min<int64_t>(LANES, pairs - p);
        Lanes sums[LANES];
        float rest[LANES] = {};
        for (int64_t l = 0; l < count; ++l) {
            const float *query = r.asking + q * r.query, *key = r.held + r.listed[q * r.list + j] * r.position;
            Lanes sum = {};
            for (int64_t e = 0; e < whole; e += LANES) sum += *(const Loose*)(query + e) * *(const Loose*)(key + e);
            for (int64_t e = whole; e < width; ++e) rest[l] += query[e] * key[e];
            sums[l] = sum;
            if (++j == n) j = 0, ++q;
        }
        for (int64_t l = count; l < LANES; ++l) sums[l] = Lanes{};
        const Lanes found = sums_of(sums) + *(const Loose*)rest;
        std::memcpy(r.of_pairs + p, &found, count * sizeof(float));
    }
}

template <int COUNT>
void blend_part(const Row& r, const float* weights, const int32_t* listed, int64_t n, int64_t from, float* out) {
    float sums[COUNT] = {};
    for (int64_t j = 0; j < n; ++j) {
        const float share = weights[j], *value = r.held + listed[j] * r.position + from;
        if (share == 0) continue;  // a key that is left out is not read
#pragma omp simd
        for (int l = 0; l < COUNT; ++l) sums[l] += share * value[l];
    }
    for (int l = 0; l < COUNT; ++l) out[from + l] = sums[l];
}

// asking = sum over j of weights[j] * value listed[j], of each query
void blend(const Row& r, int64_t n, int64_t queries, int64_t width) {
    for (int64_t q = 0; q < queries; ++q) {
        const int32_t* listed = r.listed + q * r.list;
        float *out = r.asking + q * r.query, *weights = r.of_pairs + q * n;
        int64_t e = 0;
        for (; e + PART <= width; e += PART) blend_part<PART>(r, weights, listed, n, e, out);
        for (; e + 16 <= width; e += 16) blend_part<16>(r, weights, listed, n, e, out);
        for (; e < width; ++e) blend_part<1>(r, weights, listed, n, e, out);
    }
}

// held = sum of weights[j] * what each query that lists it at j asks with
void spread(const Row& r, int64_t n, int64_t queries, int64_t keys, int64_t width) {
    for (int64_t k = 0; k < keys; ++k) std::memset(r.held + k * r.position, 0, width * sizeof(float));
    for (int64_t q = 0; q < queries; ++q) {
        const int32_t* listed = r.listed + q * r.list;
        const float* given = r.asking + q * r.query;
        for (int64_t j = 0; j < n; ++j) {
            const float share = r.of_pairs[q * n + j];
            if (share == 0) continue;
            float* value = r.held + listed[j] * r.position;
#pragma omp simd
            for (int64_t e = 0; e < width; ++e) value[e] += share * given[e];
        }
    }
}

// product(row) of every head of every batch; not 0 where a list names a key that is not there. s.keys: of what is held.
// apart: numbers from the pairs of one row to those of the next.
template <class Product>
int each_row(const Rows& asking, const Rows& held, const Lists& lists, int64_t n, const Sizes& s, float* of_pairs,
             int64_t apart, int threads, Product product) {
    if (s.rows * s.queries * n * s.width <= SERIAL) threads = 1;
    bool failed = false;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < s.rows; ++row) {
        const Row r = {asking.row(row, s.heads), held.row(row, s.heads), asking.position, held.position,
                       lists.row(row, s.heads), lists.query, of_pairs + row * apart};
        bool fits = true;
        for (int64_t q = 0; q < s.queries && fits; ++q) fits = within(r.listed + q * r.list, n, s.keys);
        if (fits) {
            product(r);
        } else {
#pragma omp atomic write
            failed = true;
        }
    }
    return failed;
}

}  // namespace

// scores: queries x n, contiguous, and `apart` numbers from one row to the next.
extern "C" int attnbench_compare_sampled(const Rows* query, const Rows* keys, const Lists* lists, int64_t n,
                                         const Sizes* s, float* scores, int64_t apart, int threads) {
    return each_row(*query, *keys, *lists, n, *s, scores, apart, threads, [&](const Row& r) {
        fetch(r, s->keys, s->width);
        compare(r, n, s->queries, s->width);
    });
}

// weights: as the scores of attnbench_compare_sampled.
extern "C" int attnbench_blend_sampled(const Rows* out, const Rows* values, const Lists* lists, int64_t n,
                                       const Sizes* s, float* weights, int64_t apart, int threads) {
    return each_row(*out, *values, *lists, n, *s, weights, apart, threads, [&](const Row& r) {
        fetch(r, s->keys, s->width);
        blend(r, n, s->queries, s->width);
    });
}

// out: of every key, what each query that lists it gives, times its weight.
extern "C" int attnbench_spread_sampled(const Rows* given, const Rows* out, const Lists* lists, int64_t n,
                                        const Sizes* s, float* weights, int64_t apart, int threads) {
    return each_row(*given, *out, *lists, n, *s, weights, apart, threads,
                    [&](const Row& r) { spread(r, n, s->queries, s->keys, s->width); });
}
