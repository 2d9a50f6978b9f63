// Dropout in one pass: what is drawn below a bound becomes 0, the rest is scaled. Of bfloat16, with torch's rounding.

#include <cstdint>
#include <cstring>

#include "_bfloat16.hpp"

namespace {

constexpr int64_t SERIAL = 1 << 15;  // elements up to here are one thread's work

template <class T>
void drop(
    const T* x, const int16_t* drawn, int bound, float scale, T* out, uint8_t* dropped, int64_t n, int threads) {
    if (n <= SERIAL) threads = 1;
#pragma omp parallel for simd num_threads(threads) schedule(static) if (parallel : threads > 1)
    for (int64_t i = 0; i < n; ++i) {
        bool gone = drawn[i] < bound;
        float kept = gone ? 0.0f : wide(x[i]) * scale;
        narrow(kept, out[i]);
        dropped[i] = gone;
    }
}

template <class T> void pass(const T* grad, const uint8_t* dropped, float scale, T* out, int64_t n, int threads) {
    if (n <= SERIAL) threads = 1;
#pragma omp parallel for simd num_threads(threads) schedule(static) if (parallel : threads > 1)
    for (int64_t i = 0; i < n; ++i) {
        float kept = dropped[i] ? 0.0f : wide(grad[i]) * scale;
        narrow(kept, out[i]);
    }
}

}  // namespace

#define DROPOUT(NAME, T)                                                                                               \
    extern "C" void attnbench_drop_##NAME(                                                                             \
        const T* x, const int16_t* drawn, int bound, float scale, T* out, uint8_t* dropped, int64_t n, int threads) {  \
        drop<T>(x, drawn, bound, scale, out, dropped, n, threads);                                                     \
    }                                                                                                                  \
    extern "C" void attnbench_pass_##NAME(                                                                             \
        const T* grad, const uint8_t* dropped, float scale, T* out, int64_t n, int threads) {                          \
        pass<T>(grad, dropped, scale, out, n, threads);                                                                \
    }

DROPOUT(float32, float)
DROPOUT(bfloat16, BFloat16)
