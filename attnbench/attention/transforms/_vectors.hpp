// Vectors of one register: sums over the lanes of a row, exponential and logarithm, and the numbers above a bound.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../../core/_shuffle.hpp"

namespace {

// Bytes of a vector: what one register holds, since g++ takes wider ones apart number by number.
#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

struct Float {
    using T = float;
    using I = int32_t;
    static constexpr int W = BYTES / sizeof(T);
};
struct Double {
    using T = double;
    using I = int64_t;
    static constexpr int W = BYTES / sizeof(T);
};
template <class F> constexpr bool SINGLE = std::is_same_v<F, Float>;
template <class F> struct Vec {
    typedef typename F::T V __attribute__((vector_size(BYTES)));
    typedef typename F::I M __attribute__((vector_size(BYTES)));
    typedef typename F::T Loose __attribute__((vector_size(BYTES), aligned(sizeof(typename F::T)), may_alias));
    typedef uint8_t Bytes __attribute__((vector_size(F::W), aligned(1), may_alias));
};
template <class F> using V = typename Vec<F>::V;
template <class F> using M = typename Vec<F>::M;

template <class F> inline V<F> all(typename F::T value) { return value - V<F>{}; }
template <class F> inline V<F> load(const typename F::T* at) { return *(const typename Vec<F>::Loose*)at; }
template <class F> inline void store(typename F::T* at, V<F> value) { *(typename Vec<F>::Loose*)at = value; }
template <class F> inline V<F> larger(V<F> a, V<F> b) { return a > b ? a : b; }
template <class F> inline V<F> smaller(V<F> a, V<F> b) { return a < b ? a : b; }
template <class F> constexpr typename F::T INF = std::numeric_limits<typename F::T>::infinity();
template <class F> constexpr typename F::T TINY = std::numeric_limits<typename F::T>::min();
template <class F> constexpr typename F::T EPS = std::numeric_limits<typename F::T>::epsilon();

// ---- sums over the keys of a row, in every lane that belongs to it

template <int S, class X, int... L> inline X swapped(X x, std::integer_sequence<int, L...>) {
    return shuffled<(L ^ S)...>(x, x);
}
template <int S, class X, int... L> inline X turned(X x, std::integer_sequence<int, L...>) {
    return shuffled<((L + S) % (int)sizeof...(L))...>(x, x);
}
template <class F, int P, class X, class Join> inline X fold(X x, Join join) {
    constexpr std::make_integer_sequence<int, F::W> lanes{};
    if constexpr (P > 8) x = join(x, swapped<8>(x, lanes));
    if constexpr (P > 4) x = join(x, swapped<4>(x, lanes));
    if constexpr (P > 2) x = join(x, swapped<2>(x, lanes));
    if constexpr (P > 1) x = join(x, swapped<1>(x, lanes));
    return x;
}
template <class F, int P, class X> inline X sum(X x) {
    return fold<F, P>(x, [](X a, X b) { return a + b; });
}
template <class F, int P> inline V<F> most(V<F> x) { return fold<F, P>(x, larger<F>); }
template <class F, int P> inline bool any(M<F> x) {  // where all lanes are one row's they hold the same
    if constexpr (P < F::W) x = fold<F, F::W>(x, [](M<F> a, M<F> b) { return a | b; });
    return x[0] != 0;
}

// how many lanes of x are above each of its own
template <class F, int... S> inline M<F> lanes_above(V<F> x, std::integer_sequence<int, S...>) {
    M<F> count{};
    ((count -= turned<S + 1>(x, std::make_integer_sequence<int, F::W>{}) > x), ...);
    return count;
}
// the k-th largest of the lanes of x, 1 <= k <= W
template <class F> inline typename F::T kth_lane(V<F> x, typename F::I k) {
    V<F> best = lanes_above<F>(x, std::make_integer_sequence<int, F::W - 1>{}) < k ? x : all<F>(INF<F>);
    return -most<F, F::W>(-best)[0];
}

// ---- exponential and logarithm of N vectors in step, since one alone waits for its own results: polynomials in float,
// to 2 ulp; the library's in double

template <int N, class X, size_t D> inline void horner(X* p, const X* x, const float (&coefficients)[D]) {
    for (int i = 0; i < N; ++i) p[i] = all<Float>(coefficients[0]);
    for (size_t d = 1; d < D; ++d)
        for (int i = 0; i < N; ++i) p[i] = p[i] * x[i] + coefficients[d];
}

template <int N = 1> inline void power(V<Float>* x) {
    constexpr float terms[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                               4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
#ifdef __AVX512F__
    V<Float> turns[N], left[N], found[N];
    for (int i = 0; i < N; ++i) {
        V<Float> kept = smaller<Float>(larger<Float>(x[i], all<Float>(-87.3f)), all<Float>(88.3f));
        turns[i] = (V<Float>)_mm512_roundscale_ps((__m512)(kept * 1.44269504f), 0);
        left[i] = kept - turns[i] * 0.693359375f + turns[i] * 2.12194440e-4f;
    }
    horner<N>(found, left, terms);
    for (int i = 0; i < N; ++i) {
        V<Float> near = found[i] * left[i] * left[i] + left[i] + 1.0f;
        __mmask16 seen = _mm512_cmp_ps_mask((__m512)x[i], _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
        x[i] = (V<Float>)_mm512_maskz_scalef_ps(seen, (__m512)near, (__m512)turns[i]);
    }
#else
    M<Float> n[N];
    V<Float> r[N], p[N];
    for (int i = 0; i < N; ++i) {
        V<Float> kept = smaller<Float>(larger<Float>(x[i], all<Float>(-87.3f)), all<Float>(88.3f));
        V<Float> turns = kept * 1.44269504f;
        n[i] = __builtin_convertvector(turns + (kept < 0 ? all<Float>(-0.5f) : all<Float>(0.5f)), M<Float>);
        V<Float> whole = __builtin_convertvector(n[i], V<Float>);
        r[i] = kept - whole * 0.693359375f + whole * 2.12194440e-4f;
    }
    horner<N>(p, r, terms);
    for (int i = 0; i < N; ++i) {
        M<Float> bits = (n[i] + 127) << 23;
        V<Float> scale;
        std::memcpy(&scale, &bits, sizeof scale);
        x[i] = x[i] < -87.3f ? V<Float>{} : (p[i] * r[i] * r[i] + r[i] + 1.0f) * scale;
    }
#endif
}
template <int N = 1> inline void power(V<Double>* x) {
    for (int i = 0; i < N; ++i)
        for (int lane = 0; lane < Double::W; ++lane) x[i][lane] = std::exp(x[i][lane]);
}

// of positive normal numbers
template <int N = 1> inline void logarithm(V<Float>* x) {
    constexpr float terms[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                               -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
    V<Float> m[N], p[N], whole[N];
    for (int i = 0; i < N; ++i) {
#ifdef __AVX512F__
        __m512 part = _mm512_getmant_ps((__m512)x[i], _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
        __m512 exponent = _mm512_getexp_ps((__m512)x[i]);
        __mmask16 high = _mm512_cmp_ps_mask(part, _mm512_set1_ps(1.41421356f), _CMP_GE_OQ);
        whole[i] = (V<Float>)_mm512_mask_add_ps(exponent, high, exponent, _mm512_set1_ps(1.0f));
        m[i] = (V<Float>)_mm512_mask_mul_ps(part, high, part, _mm512_set1_ps(0.5f)) - 1.0f;
#else
        M<Float> bits;
        std::memcpy(&bits, &x[i], sizeof bits);
        M<Float> n = (bits >> 23) - 126;
        bits = (bits & 0x007fffff) | 0x3f000000;  // [1/2, 1)
        std::memcpy(&m[i], &bits, sizeof bits);
        M<Float> low = m[i] < 0.707106781f;
        whole[i] = __builtin_convertvector(n + low, V<Float>);  // a true lane is -1
        m[i] = (low ? m[i] + m[i] : m[i]) - 1.0f;
#endif
    }
    horner<N>(p, m, terms);
    for (int i = 0; i < N; ++i) {
        V<Float> z = m[i] * m[i];
        x[i] = m[i] + (p[i] * m[i] * z + whole[i] * -2.12194440e-4f - z * 0.5f) + whole[i] * 0.693359375f;
    }
}
template <int N = 1> inline void logarithm(V<Double>* x) {
    for (int i = 0; i < N; ++i)
        for (int lane = 0; lane < Double::W; ++lane) x[i][lane] = std::log(x[i][lane]);
}

template <class X> inline X power_of(X x) {
    power<1>(&x);
    return x;
}
template <class F> inline V<F> log_of(V<F> x) {
    x = larger<F>(x, all<F>(TINY<F>));
    logarithm<1>(&x);
    return x;
}

// e^u - 1: the error that the exponential makes near 1 is divided out again (Kahan)
template <class F> inline V<F> expm1(V<F> u) {
    V<F> moved = power_of(u), found = (moved - 1) * (u / log_of<F>(moved));
    return moved == 1 ? u : found;
}

// the numbers above `bound` of n vectors, and where they stand; `to` and `place` have room for a vector more
template <class F> int pack(const V<F>* x, int n, typename F::T bound, typename F::T* to, int32_t* place, F) {
    int kept = 0;
    for (int i = 0; i < n * F::W; ++i) {
        typename F::T value = x[i / F::W][i % F::W];
        to[kept] = value;
        place[kept] = i;
        kept += value > bound;
    }
    return kept;
}
#ifdef __AVX512F__
inline int pack(const V<Float>* x, int n, float bound, float* to, int32_t* place, Float) {
    int kept = 0;
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int j = 0; j < n; ++j) {
        __mmask16 above = _mm512_cmp_ps_mask((__m512)x[j], _mm512_set1_ps(bound), _CMP_GT_OQ);
        _mm512_storeu_ps(to + kept, _mm512_maskz_compress_ps(above, (__m512)x[j]));
        _mm512_storeu_si512(place + kept, _mm512_maskz_compress_epi32(above, at));
        kept += __builtin_popcount(above);
        at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
    }
    return kept;
}
#elif defined(__AVX2__)
struct Orders {  // which lanes are set in each byte, the lowest first
    uint64_t of[256];
    constexpr Orders() : of{} {
        for (int bits = 0; bits < 256; ++bits)
            for (int lane = 0, at = 0; lane < 8; ++lane)
                if (bits >> lane & 1) of[bits] |= (uint64_t)lane << 8 * at++;
    }
};
constexpr Orders ORDERS;
inline int pack(const V<Float>* x, int n, float bound, float* to, int32_t* place, Float) {
    int kept = 0;
    for (int j = 0; j < n; ++j) {
        int above = _mm256_movemask_ps(_mm256_cmp_ps((__m256)x[j], _mm256_set1_ps(bound), _CMP_GT_OQ));
        __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)ORDERS.of[above]));
        _mm256_storeu_ps(to + kept, _mm256_permutevar8x32_ps((__m256)x[j], order));
        _mm256_storeu_si256((__m256i*)(place + kept), _mm256_add_epi32(order, _mm256_set1_epi32(8 * j)));
        kept += __builtin_popcount(above);
    }
    return kept;
}
#endif

}  // namespace
