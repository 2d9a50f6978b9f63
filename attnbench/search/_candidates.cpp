// The likeliest words of each row: one reading of the row for its largest logits, one for its mass, and one of the few
// stretches that hold a word which may be among the best.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "../core/_bfloat16.hpp"
#include "../core/_power.hpp"

namespace {

constexpr int64_t STRETCH = 64, LANES = 16;

inline float most(const float* z, int64_t begin, int64_t end) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t v = begin; v < end; ++v) top = z[v] > top ? z[v] : top;
    if (top <= -std::numeric_limits<float>::max())  // where some compilers let the largest begin
        for (top = -INFINITY; begin < end; ++begin) top = z[begin] > top ? z[begin] : top;
    return top;
}

// Copies a row, and tells the largest of each stretch; returns the sum, which a NaN makes one.
template <class T> float read(const T* from, int64_t words, float* z, float* tops) {
    float sums[LANES] = {}, sum = 0;
    int64_t s = 0;
    for (; s + STRETCH <= words; s += STRETCH) {
        float top[LANES];
        for (int64_t l = 0; l < LANES; ++l) top[l] = wide(from[s + l]);
        for (int64_t v = s; v < s + STRETCH; v += LANES)
#pragma omp simd
            for (int64_t l = 0; l < LANES; ++l) {
                const float x = wide(from[v + l]);
                z[v + l] = x;
                sums[l] += x;
                top[l] = x > top[l] ? x : top[l];
            }
        *tops++ = most(top, 0, LANES);
    }
    if (s < words) {
        for (int64_t v = s; v < words; ++v) sum += z[v] = wide(from[v]);
        *tops = most(z, s, words);
    }
    for (int64_t l = 0; l < LANES; ++l) sum += sums[l];
    return sum;
}

// The sum of e^(z - top); the row that is read next is fetched meanwhile.
template <class T> float mass_of(const float* z, int64_t words, float top, const T* next) {
    float sums[STRETCH] = {}, mass = 0;
    int64_t s = 0;
    for (; s + STRETCH <= words; s += STRETCH) {
        for (int64_t v = 0; v < STRETCH; v += LANES) __builtin_prefetch(next + s + v);
#pragma omp simd
        for (int64_t l = 0; l < STRETCH; ++l) sums[l] += power(z[s + l] - top);
    }
    for (; s < words; ++s) mass += power(z[s] - top);
    for (int64_t l = 0; l < STRETCH; ++l) mass += sums[l];
    return mass;
}

// How many rows are not all numbers, or have no word that is possible: their first value becomes NaN.
template <class T>
int best(
    const T* logits, int64_t rows, int64_t words, const int64_t* banned, int64_t bans, int64_t count, float* values,
    int64_t* ids, int threads) {
    const int64_t stretches = (words + STRETCH - 1) / STRETCH;
    int strange = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> row(words), tops(stretches), ranked(stretches);
        std::vector<std::pair<float, int64_t>> found;
        float* z = row.data();
#pragma omp for schedule(static) reduction(+ : strange)
        for (int64_t i = 0; i < rows; ++i) {
            const T* from = logits + i * words;
            const float sum = read(from, words, z, tops.data());
            const float top = *std::max_element(tops.begin(), tops.end());
            if (!(sum == sum && top < INFINITY && top > -INFINITY)) {
                ++strange;
                values[i * count] = NAN;
                continue;
            }
            const float all = std::log(mass_of(z, words, top, from + words));
            for (int64_t b = 0; b < bans; ++b) {
                if (banned[b] < 0 || banned[b] >= words) continue;
                const int64_t s = banned[b] / STRETCH;
                z[banned[b]] = -INFINITY;
                tops[s] = most(z, s * STRETCH, std::min(words, (s + 1) * STRETCH));
            }
            float least = -INFINITY;  // log-probability that so many stretches reach, so the words asked for do
            if (stretches >= count) {
                std::copy(tops.begin(), tops.end(), ranked.begin());
                std::nth_element(ranked.begin(), ranked.begin() + (count - 1), ranked.end(), std::greater<float>());
                least = (ranked[count - 1] - top) - all;
            }
            found.clear();
            for (int64_t s = 0; s < stretches; ++s) {
                if (!((tops[s] - top) - all >= least)) continue;
                for (int64_t v = s * STRETCH; v < std::min(words, (s + 1) * STRETCH); ++v) {
                    const float value = (z[v] - top) - all;
                    if (value >= least) found.emplace_back(-value, v);
                }
            }
            std::partial_sort(found.begin(), found.begin() + count, found.end());
            for (int64_t c = 0; c < count; ++c) {
                values[i * count + c] = -found[c].first;
                ids[i * count + c] = found[c].second;
            }
        }
    }
    return strange;
}

}  // namespace

#define BEST(NAME, T)                                                                                                  \
    extern "C" int attnbench_best_##NAME(                                                                              \
        const T* logits, int64_t rows, int64_t words, const int64_t* banned, int64_t bans, int64_t count,              \
        float* values, int64_t* ids, int threads) {                                                                    \
        return best<T>(logits, rows, words, banned, bans, count, values, ids, threads);                                \
    }

BEST(float32, float)
BEST(bfloat16, BFloat16)
