// Dropout in one pass: what is drawn below a bound becomes 0, the rest is scaled, and all of it is added to something
// where it shall be. Of bfloat16, with torch's rounding. What is drawn at a place is its number, mixed with a key.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "_bfloat16.hpp"

namespace {

constexpr int64_t SERIAL = 1 << 15;  // elements up to here are one thread's work
constexpr int64_t BLOCK = 1 << 10;   // elements of a turn, an even number: two places share a word

struct Key {
    uint32_t factor, summand;
    explicit Key(uint64_t bits) : factor((uint32_t)bits | 1), summand((uint32_t)(bits >> 32)) {}
};

// Wellons's lowbias32 (nullprogram.com/blog/2018/07/31) of a place in the key's own order.
inline uint32_t mixed(uint32_t place, Key key) {
    uint32_t word = place * key.factor + key.summand;
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    return word ^ (word >> 16);
}

template <bool ADDS, class X, class To, class Out>
void drop(
    const X* x, const To* to, Key key, int bound, float scale, Out* out, uint8_t* dropped, int64_t n, int threads) {
    if (n <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel : threads > 1)
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int count = (int)std::min(BLOCK, n - begin);
        const uint32_t first = (uint32_t)(begin / 2);
        const X* from = x + begin;
        const To* base = to + (ADDS ? begin : 0);
        Out* into = out + begin;
        uint8_t* gone = dropped + begin;
#pragma omp simd
        for (int j = 0; j < count; ++j) {
            uint32_t word = mixed(first + (uint32_t)(j >> 1), key);
            bool below = (int16_t)(word >> (16 * (j & 1))) < bound;
            float kept = wide(from[j]) * scale;
            uint32_t bits;  // masked as such: a product that is added as it is would be rounded once, here and there
            std::memcpy(&bits, &kept, 4);
            bits &= (uint32_t)below - 1;
            std::memcpy(&kept, &bits, 4);
            narrow(ADDS ? wide(base[j]) + kept : kept, into[j]);
            gone[j] = below;
        }
    }
}

template <class G, class X>
void pass(const G* grad, const uint8_t* dropped, float scale, X* out, int64_t n, int threads) {
    if (n <= SERIAL) threads = 1;
#pragma omp parallel for simd num_threads(threads) schedule(static) if (parallel : threads > 1)
    for (int64_t i = 0; i < n; ++i) narrow(dropped[i] ? 0.0f : wide(grad[i]) * scale, out[i]);
}

}  // namespace

#define DROP(NAME, X)                                                                                                  \
    extern "C" void attnbench_drop_##NAME(                                                                             \
        const X* x, uint64_t key, int bound, float scale, X* out, uint8_t* dropped, int64_t n, int threads) {          \
        drop<false>(x, (const X*)nullptr, Key(key), bound, scale, out, dropped, n, threads);                           \
    }
#define ADD(NAME, X, TO)                                                                                               \
    extern "C" void attnbench_add_##NAME(                                                                              \
        const X* x, const TO* to, uint64_t key, int bound, float scale, TO* out, uint8_t* dropped, int64_t n,          \
        int threads) {                                                                                                 \
        drop<true>(x, to, Key(key), bound, scale, out, dropped, n, threads);                                           \
    }
#define PASS(NAME, G, X)                                                                                               \
    extern "C" void attnbench_pass_##NAME(                                                                             \
        const G* grad, const uint8_t* dropped, float scale, X* out, int64_t n, int threads) {                          \
        pass(grad, dropped, scale, out, n, threads);                                                                   \
    }

DROP(float32, float)
DROP(bfloat16, BFloat16)
ADD(float32_to_float32, float, float)
ADD(bfloat16_to_bfloat16, BFloat16, BFloat16)
ADD(bfloat16_to_float32, BFloat16, float)
PASS(float32_to_float32, float, float)
PASS(bfloat16_to_bfloat16, BFloat16, BFloat16)
PASS(float32_to_bfloat16, float, BFloat16)
