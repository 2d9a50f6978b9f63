// Label-smoothed cross-entropy and its gradient, a row at a time: the row is read from memory once.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../core/_bfloat16.hpp"
#include "../core/_power.hpp"

namespace {

constexpr int64_t STRETCH = 64;

// z becomes e^(z - top), whose sum is returned. What is read and written next is fetched meanwhile.
template <class T> float powers(float* z, int64_t words, float top, const T* next, const T* to) {
    float sums[STRETCH] = {}, mass = 0;
    int64_t s = 0;
    for (; s + STRETCH <= words; s += STRETCH) {
        for (int64_t v = s; v < s + STRETCH; v += 64 / sizeof(T)) {
            __builtin_prefetch(next + v);
            __builtin_prefetch(to + v, 1);
        }
#pragma omp simd
        for (int64_t l = 0; l < STRETCH; ++l) sums[l] += z[s + l] = power(z[s + l] - top);
    }
    for (; s < words; ++s) mass += z[s] = power(z[s] - top);
    for (int64_t l = 0; l < STRETCH; ++l) mass += sums[l];
    return mass;
}

constexpr int64_t IGNORED = -100;

// loss and nll of each row; gradient where it is asked for. How many targets are no word: their rows are left as they are.
template <class T>
int smoothed(
    const T* logits, const int64_t* target, int64_t rows, int64_t words, float smoothing, T* gradient, float* loss,
    float* nll, int threads) {
    const float even = smoothing / words;
    int strange = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> row(words);
        float* z = row.data();
#pragma omp for schedule(static) reduction(+ : strange)
        for (int64_t i = 0; i < rows; ++i) {
            T* to = gradient ? gradient + i * words : nullptr;
            if (target[i] == IGNORED) {
                loss[i] = nll[i] = 0;
                if (to) std::memset(to, 0, words * sizeof(T));
                continue;
            }
            if (target[i] < 0 || target[i] >= words) {
                ++strange;
                continue;
            }
            const T* from = logits + i * words;
            const float wanted = wide(from[target[i]]);
            const float near = std::isfinite(wanted) ? wanted : 0;  // logits that lie far from 0 lie near one another
            float top = -INFINITY, all = 0;
#pragma omp simd reduction(max : top) reduction(+ : all)
            for (int64_t v = 0; v < words; ++v) {
                z[v] = wide(from[v]);
                top = z[v] > top ? z[v] : top;
                all += z[v] - near;
            }
            const float mass = powers<T>(z, words, top, from + words, to ? to : from);
            const bool sound = all == all && top < INFINITY;  // a NaN among the logits is in their sum
            const float log_mass = sound ? std::log(mass) : NAN;  // the top is taken away first: it may dwarf this
            nll[i] = log_mass + (top - wanted);
            loss[i] = (1 - smoothing) * nll[i] + (smoothing > 0 ? smoothing * (log_mass + (top - near - all / words)) : 0);
            if (!to) continue;
            const float scale = sound ? 1 / mass : NAN;
#pragma omp simd
            for (int64_t v = 0; v < words; ++v) narrow(z[v] * scale - even, to[v]);
            narrow(z[target[i]] * scale - even - (1 - smoothing), to[target[i]]);
        }
    }
    return strange;
}

}  // namespace

#define SMOOTHED(NAME, T)                                                                                              \
    extern "C" int attnbench_smoothed_##NAME(                                                                         \
        const T* logits, const int64_t* target, int64_t rows, int64_t words, float smoothing, T* gradient,             \
        float* loss, float* nll, int threads) {                                                                        \
        return smoothed<T>(logits, target, rows, words, smoothing, gradient, loss, nll, threads);                             \
    }

SMOOTHED(float32, float)
SMOOTHED(bfloat16, BFloat16)
