// Products of a few queries a row with its keys, and of their weights with its values: what a step of decoding asks of a
// cache that is a part of a larger one, which matrix products would copy first.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "_cached.hpp"
#include "_lanes.hpp"

namespace {

constexpr int64_t SERIAL = 1 << 16;  // numbers up to here are one thread's work
constexpr int TOGETHER = 5;          // queries of one pass over what is held: what the registers hold
constexpr int AHEAD = 8;             // values from one that is read to one that is fetched
// Numbers of a value that are multiplied at once, with every query of a pass.
constexpr int PART = LANES == 16 ? 64 : 16;

struct Few {  // queries of a row, or their weights, scores or contexts: so many elements from one to the next
    float* data;
    int64_t apart;
    float* operator[](int64_t i) const { return data + i * apart; }
};

// out[i, j] = scale * query i . key j of Q queries; keys are read in the order in which they lie, the sums of LANES
// of them made together
template <int Q>
void compare_few(const Few& query, const float* key, int64_t apart, const Sizes& s, float scale, const Few& out) {
    const int64_t whole = s.width - s.width % LANES;
    for (int64_t j = 0; j < s.keys; j += LANES) {
        const int64_t count = std::min<int64_t>(LANES, s.keys - j);
        Lanes sums[Q][LANES];
        for (int64_t l = 0; l < LANES; ++l) {
            const float* of = key + std::min(j + l, s.keys - 1) * apart;
            Lanes sum[Q] = {};
            for (int64_t e = 0; e < whole; e += LANES) {
                const Lanes part = *(const Loose*)(of + e);
#pragma GCC unroll 8
                for (int i = 0; i < Q; ++i) sum[i] += part * *(const Loose*)(query[i] + e);
            }
#pragma GCC unroll 8
            for (int i = 0; i < Q; ++i) sums[i][l] = sum[i];
        }
        for (int i = 0; i < Q; ++i) {
            Lanes found = sums_of(sums[i]);
            for (int64_t e = whole; e < s.width; ++e)
                for (int l = 0; l < LANES; ++l) found[l] += query[i][e] * key[std::min(j + l, s.keys - 1) * apart + e];
            found *= scale;
            std::memcpy(out[i] + j, &found, count * sizeof(float));
        }
    }
}

// out[i, e ... e + COUNT] = sum over j of weights[i, j] * values[j, e ... e + COUNT], for Q queries
template <int Q, int COUNT>
void blend_part(const Few& weights, const float* value, int64_t apart, const Sizes& s, const Few& out, int64_t from) {
    float sums[Q][COUNT] = {};
    for (int64_t j = 0; j < s.keys; ++j, value += apart) {
        if (!from && s.width > COUNT)  // for the passes to come; the processor foresees but what one pass reads
            for (int64_t e = 0; e < s.width; e += 16) __builtin_prefetch(value + AHEAD * apart + e);
        for (int i = 0; i < Q; ++i) {
            const float share = weights[i][j];
#pragma omp simd
            for (int l = 0; l < COUNT; ++l) sums[i][l] += share * value[from + l];
        }
    }
    for (int i = 0; i < Q; ++i)
        for (int l = 0; l < COUNT; ++l) out[i][from + l] = sums[i][l];
}

template <int Q>
void blend_few(const Few& weights, const float* value, int64_t apart, const Sizes& s, const Few& out) {
    int64_t e = 0;
    for (; e + PART <= s.width; e += PART) blend_part<Q, PART>(weights, value, apart, s, out, e);
    for (; e + 16 <= s.width; e += 16) blend_part<Q, 16>(weights, value, apart, s, out, e);
    for (; e < s.width; ++e) blend_part<Q, 1>(weights, value, apart, s, out, e);
}

template <>
void blend_few<1>(const Few& weights, const float* value, int64_t apart, const Sizes& s, const Few& context) {
    float* out = context[0];
    for (int64_t e = 0; e < s.width; ++e) out[e] = 0;
    for (int64_t j = 0; j < s.keys; ++j, value += apart) {
        const float share = weights[0][j];
        if (share == 0) continue;  // a key that is left out is not read
#pragma omp simd
        for (int64_t e = 0; e < s.width; ++e) out[e] += share * value[e];
    }
}

void compare(const Few& query, const float* key, int64_t apart, const Sizes& s, float scale, const Few& out) {
    using Compare = void (*)(const Few&, const float*, int64_t, const Sizes&, float, const Few&);
    static constexpr Compare COMPARE[TOGETHER] = {
        compare_few<1>, compare_few<2>, compare_few<3>, compare_few<4>, compare_few<5>};
    for (int64_t i = 0; i < s.queries; i += TOGETHER) {
        const int64_t count = std::min<int64_t>(TOGETHER, s.queries - i);
        COMPARE[count - 1]({query[i], query.apart}, key, apart, s, scale, {out[i], out.apart});
    }
}

void blend(const Few& weights, const float* value, int64_t apart, const Sizes& s, const Few& out) {
    using Blend = void (*)(const Few&, const float*, int64_t, const Sizes&, const Few&);
    static constexpr Blend BLEND[TOGETHER] = {blend_few<1>, blend_few<2>, blend_few<3>, blend_few<4>, blend_few<5>};
    for (int64_t i = 0; i < s.queries; i += TOGETHER) {
        const int64_t count = std::min<int64_t>(TOGETHER, s.queries - i);
        BLEND[count - 1]({weights[i], weights.apart}, value, apart, s, {out[i], out.apart});
    }
}

// product(what asks, what is held, how far apart, what is made) of every row; keys that are listed are copied together,
// and where there is no memory for that it is not 0
template <class Product>
int each_row(
    const Rows& asking, const Rows& held, const Listed& listed, const Sizes& s, const Rows& out, int threads,
    Product product) {
    if (s.rows * s.queries * s.keys * s.width <= SERIAL) threads = 1;
    bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::unique_ptr<float[]> together;
        if (listed.keys) together.reset(new (std::nothrow) float[s.keys * s.width]);
        const bool ready = together || !listed.keys;
        if (!ready) {
#pragma omp atomic write
            failed = true;
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < s.rows; ++row) {
            if (!ready) continue;
            const Few from = {asking.row(row, s.heads), asking.position}, to = {out.row(row, s.heads), out.position};
            const float* all = held.row(row, s.heads);
            if (listed.keys) {
                const int64_t* keys = listed.row(row, s.heads);
                for (int64_t j = 0; j < s.keys; ++j)
                    std::memcpy(&together[j * s.width], all + keys[j] * held.position, s.width * sizeof(float));
                product(from, together.get(), s.width, to);
            } else {
                product(from, all, held.position, to);
            }
        }
    }
    return failed;
}

// Scores or weights, which lie side by side.
Rows side_by_side(float* data, const Sizes& s) {
    return {data, s.heads * s.queries * s.keys, s.queries * s.keys, s.keys};
}

int compare_rows(const Rows& query, const Rows& keys, const Listed& listed, const Sizes& s, float scale, float* scores,
                 int threads) {
    auto product = [&](const Few& query, const float* key, int64_t apart, const Few& out) {
        compare(query, key, apart, s, scale, out);
    };
    return each_row(query, keys, listed, s, side_by_side(scores, s), threads, product);
}

int blend_rows(
    float* weights, const Rows& values, const Listed& listed, const Sizes& s, const Rows& out, int threads) {
    auto product = [&](const Few& weights, const float* value, int64_t apart, const Few& out) {
        blend(weights, value, apart, s, out);
    };
    return each_row(side_by_side(weights, s), values, listed, s, out, threads, product);
}

}  // namespace
