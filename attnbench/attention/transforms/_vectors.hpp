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

#include "../../core/_register.hpp"
#include "../../core/_shuffle.hpp"

namespace {

struct Float {
    using T = float;
    using I = int32_t;
    static constexpr int W = REGISTER / sizeof(T);
};
struct Double {
    using T = double;
    using I = int64_t;
    static constexpr int W = REGISTER / sizeof(T);
};
template <class F> constexpr bool SINGLE = std::is_same_v<F, Float>;
template <class F> struct Vec {
    typedef typename F::T V __attribute__((vector_size(REGISTER)));
    typedef typename F::I M __attribute__((vector_size(REGISTER)));
    typedef typename F::T Loose __attribute__((vector_size(REGISTER), aligned(sizeof(typename F::T)), may_alias));
    typedef uint8_t Bytes __attribute__((vector_size(F::W), aligned(1), may_alias));
};
template <class F> using V = typename Vec<F>::V;
template <class F> using M = typename Vec<F>::M;

template <class F> inline V<F> all(typename F::T value) { return value - V<F>{}; }
template <class F> inline V<F> load(const typename F::T* at) { return *(const typename Vec<F>::Loose*)at; }
template <class F> inline void store(typename F::T* at, V<F> value) { *(typename Vec<F>::Loose*)at = value; }
// The one or the other of each lane; b where either is NaN. By intrinsics: of a > b ? a : b g++ makes a comparison and a
// blend in most places.
template <class F> inline V<F> larger(V<F> a, V<F> b) {
#if defined(__AVX512F__)
    if constexpr (SINGLE<F>) return (V<F>)_mm512_max_ps((__m512)a, (__m512)b);
    else return (V<F>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    if constexpr (SINGLE<F>) return (V<F>)_mm256_max_ps((__m256)a, (__m256)b);
    else return (V<F>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    return a > b ? a : b;
#endif
}
template <class F> inline V<F> smaller(V<F> a, V<F> b) {
#if defined(__AVX512F__)
    if constexpr (SINGLE<F>) return (V<F>)_mm512_min_ps((__m512)a, (__m512)b);
    else return (V<F>)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    if constexpr (SINGLE<F>) return (V<F>)_mm256_min_ps((__m256)a, (__m256)b);
    else return (V<F>)_mm256_min_pd((__m256d)a, (__m256d)b);
#else
    return a < b ? a : b;
#endif
}
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
template <class F> inline bool any_lane(M<F> x) {
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    return fold<F, F::W>(x, [](M<F> a, M<F> b) { return a | b; })[0] != 0;
#endif
}
template <class F, int P> inline bool any(M<F> x) {  // where all lanes are one row's they hold the same
    if constexpr (P < F::W) return any_lane<F>(x);
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

#ifndef __AVX512F__
// the whole number nearest to each
inline M<Float> nearest(V<Float> x) {
#ifdef __AVX2__
    return (M<Float>)_mm256_cvtps_epi32((__m256)x);
#else
    return __builtin_convertvector(x + (x < 0 ? all<Float>(-0.5f) : all<Float>(0.5f)), M<Float>);
#endif
}
#endif

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
        n[i] = nearest(kept * 1.44269504f);
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

// log2 of positive normal numbers; ROUGH: to 1e-5
template <int N = 1, bool ROUGH = false> inline void logarithm2(V<Float>* x) {
    constexpr float terms[] = {-6.4353725450e-2f, 1.5068810564e-1f,  -1.9029157469e-1f, 2.0910223453e-1f, -2.4014709182e-1f,
                               2.8838381424e-1f,  -3.6067487892e-1f, 4.8090077788e-1f,  -7.2134753725e-1f, 1.4426950349f};
    constexpr float few[] = {-1.5225982362e-1f, 2.9516545070e-1f,  -3.6953021995e-1f,
                             4.8124693391e-1f,  -7.2117064757e-1f, 1.4426913821f};
    M<Float> n[N];
    V<Float> m[N], p[N];
    for (int i = 0; i < N; ++i) {
        M<Float> bits;
        std::memcpy(&bits, &x[i], sizeof bits);
        n[i] = (bits - 0x3f400000) >> 23;
        bits -= n[i] << 23;  // [3/4, 3/2)
        std::memcpy(&m[i], &bits, sizeof bits);
        m[i] -= 1.0f;
    }
    if constexpr (ROUGH) horner<N>(p, m, few);
    else horner<N>(p, m, terms);
    for (int i = 0; i < N; ++i) x[i] = p[i] * m[i] + __builtin_convertvector(n[i], V<Float>);
}
template <int N = 1, bool = false> inline void logarithm2(V<Double>* x) {
    for (int i = 0; i < N; ++i)
        for (int lane = 0; lane < Double::W; ++lane) x[i][lane] = std::log2(x[i][lane]);
}

// (2^x - 1) / x for |x| <= 1/2; ROUGH: to 1e-5
template <int N, bool ROUGH> inline void power2_slope(V<Float>* found, const V<Float>* x) {
    constexpr float terms[] = {1.5353361798e-4f, 1.3398874446e-3f, 9.6184373584e-3f,
                               5.5503324710e-2f, 2.4022647914e-1f, 6.9314720286e-1f};
    constexpr float few[] = {9.5828528656e-3f, 5.5906424925e-2f, 2.4024098617e-1f, 6.9312419336e-1f};
    if constexpr (ROUGH) horner<N>(found, x, few);
    else horner<N>(found, x, terms);
}
// 2^x - 1 for |x| <= 1/2
inline V<Float> power2_less_one(V<Float> x) {
    V<Float> slope;
    power2_slope<1, false>(&slope, &x);
    return slope * x;
}
// 2^x of numbers up to 127; ROUGH: to 1e-5
template <int N = 1, bool ROUGH = false> inline void power2(V<Float>* x) {
    V<Float> turns[N], left[N], found[N];
    for (int i = 0; i < N; ++i) {
#ifdef __AVX512F__
        turns[i] = (V<Float>)_mm512_roundscale_ps((__m512)x[i], 0);
        left[i] = x[i] - turns[i];
#else
        V<Float> kept = larger<Float>(x[i], all<Float>(-126.0f));
        M<Float> n = nearest(kept);
        left[i] = kept - __builtin_convertvector(n, V<Float>);
        n = (n + 127) << 23;
        std::memcpy(&turns[i], &n, sizeof n);
#endif
    }
    power2_slope<N, ROUGH>(found, left);
    for (int i = 0; i < N; ++i) {
        V<Float> near = found[i] * left[i] + 1.0f;
#ifdef __AVX512F__
        x[i] = (V<Float>)_mm512_scalef_ps((__m512)near, (__m512)turns[i]);
#else
        x[i] = x[i] < -126.0f ? V<Float>{} : near * turns[i];
#endif
    }
}
template <int N = 1, bool = false> inline void power2(V<Double>* x) {
    for (int i = 0; i < N; ++i)
        for (int lane = 0; lane < Double::W; ++lane) x[i][lane] = std::exp2(x[i][lane]);
}

// 1 / x; where AVX-512 is, of floats, to 1e-4
inline V<Float> near_inverse(V<Float> x) {
#ifdef __AVX512F__
    return (V<Float>)_mm512_rcp14_ps((__m512)x);
#else
    return 1 / x;
#endif
}
inline V<Double> near_inverse(V<Double> x) { return 1 / x; }

constexpr double LN2 = 0.693147180559945309;

template <class X> inline X power_of(X x) {
    power<1>(&x);
    return x;
}
template <class F> inline V<F> log_of(V<F> x) {
    x = larger<F>(x, all<F>(TINY<F>));
    logarithm2<1>(&x);
    return x * (typename F::T)LN2;
}

// e^u - 1: the error that the exponential makes near 1 is divided out again (Kahan)
template <class F> inline V<F> expm1(V<F> u) {
    V<F> moved = power_of(u), found = (moved - 1) * (u / log_of<F>(moved));
    return moved == 1 ? u : found;
}

#if defined(__AVX512F__)
inline unsigned lanes_set(M<Float> x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x); }
inline V<Float> drawn_together(V<Float> x, unsigned lanes) {
    return (V<Float>)_mm512_maskz_compress_ps((__mmask16)lanes, (__m512)x);
}
inline V<Float> spread_out(V<Float> x, unsigned lanes) {
    return (V<Float>)_mm512_maskz_expand_ps((__mmask16)lanes, (__m512)x);
}
#elif defined(__AVX2__)
struct Orders {  // of each byte: which bits are set, the lowest first; and how many below each bit, 128 where it is not set
    uint64_t set[256], below[256];
    constexpr Orders() : set{}, below{} {
        for (int bits = 0; bits < 256; ++bits)
            for (int lane = 0, at = 0; lane < 8; ++lane) {
                bool in = bits >> lane & 1;
                below[bits] |= (uint64_t)(in ? at : 128) << 8 * lane;
                if (in) set[bits] |= (uint64_t)lane << 8 * at++;
            }
    }
};
constexpr Orders ORDERS;
inline unsigned lanes_set(M<Float> x) { return _mm256_movemask_ps((__m256)x); }
inline V<Float> drawn_together(V<Float> x, unsigned lanes) {
    __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)ORDERS.set[lanes]));
    return (V<Float>)_mm256_permutevar8x32_ps((__m256)x, order);
}
inline V<Float> spread_out(V<Float> x, unsigned lanes) {
    __m256i order = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)ORDERS.below[lanes]));
    __m256 found = _mm256_permutevar8x32_ps((__m256)x, order);  // by the three lowest bits
    return (V<Float>)_mm256_andnot_ps(_mm256_castsi256_ps(_mm256_srai_epi32(order, 31)), found);
}
#endif

// how many numbers of n vectors are above those of `bound`
template <class F> int count_above(const V<F>* x, int n, V<F> bound) {
    M<F> count{};
    for (int j = 0; j < n; ++j) count -= x[j] > bound;
    return (int)sum<F, F::W>(count)[0];
}

// The numbers of n vectors that are above `bound`, packed into vectors, the last of which `fill` fills up; how many numbers.
// place: where they stood, if it is given. Both have room for a vector more.
template <class F> int pack(const V<F>* x, int n, V<F> bound, typename F::T fill, V<F>* to, int32_t* place = nullptr) {
    typename F::T* at = (typename F::T*)to;
    int kept = 0;
#if defined(__AVX512F__) || defined(__AVX2__)
    if constexpr (SINGLE<F>) {
        M<F> lane{};
        for (int i = 0; i < F::W; ++i) lane[i] = i;
        for (int j = 0; j < n; ++j, lane += F::W) {
            unsigned above = lanes_set(x[j] > bound);
            store<F>(at + kept, drawn_together(x[j], above));
            if (place) store<F>((float*)(place + kept), drawn_together((V<F>)lane, above));
            kept += __builtin_popcount(above);
        }
    } else
#endif
        for (int i = 0; i < n * F::W; ++i) {
            at[kept] = x[i / F::W][i % F::W];
            if (place) place[kept] = i;
            kept += x[i / F::W][i % F::W] > bound[i % F::W];
        }
    for (int i = kept; i % F::W; ++i) at[i] = fill;
    return kept;
}
// Packed numbers put where they came from, 0 elsewhere. `to` may be `by`; behind `from` a vector more is read.
template <class F> void unpack(const V<F>* from, const V<F>* by, int n, V<F> bound, V<F>* to) {
    const typename F::T* at = (const typename F::T*)from;
#if defined(__AVX512F__) || defined(__AVX2__)
    if constexpr (SINGLE<F>) {
        for (int j = 0; j < n; ++j) {
            unsigned above = lanes_set(by[j] > bound);
            to[j] = spread_out(load<F>(at), above);
            at += __builtin_popcount(above);
        }
        return;
    }
#endif
    for (int j = 0; j < n; ++j) {
        M<F> above = by[j] > bound;
        for (int lane = 0; lane < F::W; ++lane) to[j][lane] = above[lane] ? *at++ : 0;
    }
}

}  // namespace
