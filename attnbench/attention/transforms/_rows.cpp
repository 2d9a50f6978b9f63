// The transforms of _simplex.py for rows in memory, forward and backward, each row read and written once.
//
// A block is n vectors of W lanes, P successive lanes a row: with P = 1 a vector holds the same key of W rows (short rows:
// no sum goes across lanes), with P = W successive keys of one (long rows: nothing is turned about). The searches below
// are written once for all P.
// Dead keys hold -inf. A spoilt row (NaN or +inf at a living key) is searched as a row of equal scores and then made NaN.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

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
    return __builtin_shufflevector(x, x, (L ^ S)...);
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

// ---- one block

constexpr int ROUNDS = 64;
constexpr int STEP = 4;  // vectors at a time where a function of each is dear

template <class F, int P> struct Block {
    V<F>* x;  // scores, then weights
    V<F>* other;  // room for n vectors more, and as much again for a block of few
    int n;
    const int32_t* places = nullptr;  // of a block of few: where its scores stood
    int kept = 0;

    V<F> top() const {
        V<F> found = x[0];
        for (int j = 1; j < n; ++j) found = larger<F>(found, x[j]);
        return most<F, P>(found);
    }

    // scores minus the largest; of a spoilt row 0 at living keys
    void centre(V<F> top) {
        M<F> spoilt = top == INF<F>;
        V<F> by = top == -INF<F> ? V<F>{} : top;
        if (any<F, P>(spoilt)) {
            for (int j = 0; j < n; ++j) {
                V<F> flat = x[j] > -INF<F> ? V<F>{} : all<F>(-INF<F>);
                x[j] = spoilt ? flat : x[j] - by;
            }
        } else {
            for (int j = 0; j < n; ++j) x[j] -= by;
        }
    }

    // scores made exponentials; their sum in each lane
    V<F> power_all() const {
        V<F> total{};
        int j = 0;
        for (; j + STEP <= n; j += STEP) {
            power<STEP>(x + j);
            for (int i = j; i < j + STEP; ++i) total += x[i];
        }
        for (; j < n; ++j) total += x[j] = power_of(x[j]);
        return total;
    }

    // masses made to sum to 1; NaN where the row is spoilt
    void share(V<F> total, V<F> top) {
        V<F> scale = 1 / larger<F>(total, all<F>(TINY<F>));
        for (int j = 0; j < n; ++j) x[j] *= scale;
        M<F> spoilt = top == INF<F>;
        if (any<F, P>(spoilt))
            for (int j = 0; j < n; ++j) x[j] = (spoilt & (x[j] > 0)) ? all<F>(std::nan("")) : x[j];
    }

    // the scores above `bound` of each row alone, the others having no weight in any case
    Block above(V<F> bound) const {
        if constexpr (P < F::W) return *this;
        using T = typename F::T;
        T* to = (T*)(other + n);
        int32_t* place = (int32_t*)(other + 2 * n + 1);
        int kept = pack(x, n, bound[0], to, place, F{});
        int vectors = (kept + F::W - 1) / F::W;
        for (int i = kept; i < vectors * F::W; ++i) to[i] = -INF<F>;
        return {(V<F>*)to, other, vectors, place, kept};
    }
    // the same where they are so few that the work saved is more than that of moving them
    Block if_few(V<F> bound) const {
        Block found = above(bound);
        return 2 * found.n <= n ? found : *this;
    }
    // the scores of one row among which its k largest are
    Block largest(int64_t k) const {
        if constexpr (P < F::W) return *this;
        int64_t groups = (k + F::W - 1) / F::W;  // each of W lanes, whose maxima are k scores or more
        if (2 * groups > n) return *this;
        V<F> least = all<F>(INF<F>);
        for (int64_t group = 0; group < groups; ++group) {
            V<F> found = all<F>(-INF<F>);
            for (int64_t j = group; j < n; j += groups) found = larger<F>(found, x[j]);
            least = smaller<F>(least, found);
        }
        typename F::T reached = -most<F, P>(-least)[0];
        if (!(reached > -INF<F> && reached < INF<F>)) return *this;
        Block found = if_few(all<F>(std::nextafter(reached, -INF<F>)));
        return found.top()[0] < INF<F> ? found : *this;  // a spoilt row is spoilt at all its living keys
    }
    // their weights put where the scores were
    void place(const Block& few) const {
        if (few.x == x) return;
        using T = typename F::T;
        for (int j = 0; j < n; ++j) x[j] = V<F>{};
        for (int i = 0; i < few.kept; ++i) ((T*)x)[few.places[i]] = ((const T*)few.x)[i];
    }

    // a threshold that only climbs: true when no lane moved
    static bool climb(V<F>& threshold, V<F> step, typename F::T still = 8 * EPS<F>) {
        step = step > 0 ? step : V<F>{};  // NaN in rows without a living key
        threshold += step;
        return !any<F, P>(step > still);
    }
};


template <class F, int P> void softmax(Block<F, P> b, V<F> top) {
    b.centre(top);
    b.share(sum<F, P>(b.power_all()), top);
}

// how many scores of one row are at or above each of three numbers
template <class F> inline void tally(const V<F>* from, int n, const typename F::T (&t)[3], int64_t (&count)[3]) {
#ifdef __AVX512F__
    if constexpr (SINGLE<F>) {
        const __m512 a = _mm512_set1_ps(t[0]), b = _mm512_set1_ps(t[1]), c = _mm512_set1_ps(t[2]);
        int found[3] = {};
        for (int j = 0; j < n; ++j) {
            found[0] += __builtin_popcount(_mm512_cmp_ps_mask((__m512)from[j], a, _CMP_GE_OQ));
            found[1] += __builtin_popcount(_mm512_cmp_ps_mask((__m512)from[j], b, _CMP_GE_OQ));
            found[2] += __builtin_popcount(_mm512_cmp_ps_mask((__m512)from[j], c, _CMP_GE_OQ));
        }
        for (int i = 0; i < 3; ++i) count[i] = found[i];
        return;
    }
#endif
    M<F> found[3] = {};
    for (int j = 0; j < n; ++j)
        for (int i = 0; i < 3; ++i) found[i] -= from[j] >= t[i];
    for (int i = 0; i < 3; ++i) count[i] = sum<F, F::W>(found[i])[0];
}

// A number t with the k largest of n vectors at or above it and no other, ties with the k-th included, for one row: more
// than k are at or above `low`, none above `high`. Three numbers at a time, since each count is waited for.
template <class F> typename F::T section(const V<F>* from, int n, int64_t k, typename F::T low, typename F::T high) {
    using T = typename F::T;
    int64_t count[3];
    T t[3] = {low * (T)0.5 + high * (T)0.5, low * (T)0.25 + high * (T)0.75, high};
    for (;;) {
        tally<F>(from, n, t, count);
        for (int i = 0; i < 3; ++i)
            if (count[i] == k) return t[i];
        T above = high;
        for (int i = 2; i >= 0; --i) above = count[i] < k ? t[i] : above;
        for (int i = 0; i < 3; ++i) low = count[i] > k ? t[i] : low;
        high = above;
        t[0] = low * (T)0.75 + high * (T)0.25;
        t[1] = low * (T)0.5 + high * (T)0.5;
        t[2] = low * (T)0.25 + high * (T)0.75;
        if (!(t[1] > low && t[1] < high)) return low;
    }
}

// The same for every row of a block; -inf where a row has no more than k. top: the largest score, which is told.
template <class F, int P> V<F> kth(const V<F>* from, int n, typename F::I k, V<F>& top) {
    V<F> bottom = all<F>(INF<F>);
    M<F> living{};
    top = all<F>(-INF<F>);
    for (int j = 0; j < n; ++j) {
        M<F> lives = from[j] > -INF<F>;
        living -= lives;
        top = larger<F>(top, from[j]);
        bottom = lives ? smaller<F>(bottom, from[j]) : bottom;
    }
    top = most<F, P>(top);
    V<F> low = -most<F, P>(-bottom), high = top, t = top;
    M<F> few = (sum<F, P>(living) <= k) | (top == INF<F>), open = ~few;
    if constexpr (P == F::W) return few[0] ? all<F>(-INF<F>) : all<F>(section<F>(from, n, k, low[0], high[0]));
    while (any<F, P>(open)) {
        M<F> count{};
        for (int j = 0; j < n; ++j) count -= from[j] >= t;
        count = sum<F, P>(count);
        low = (open & (count >= k)) ? t : low;
        high = (open & (count < k)) ? t : high;
        t = low * (typename F::T)0.5 + high * (typename F::T)0.5;
        open &= (count != k) & (t > low) & (t < high);
    }
    return few ? all<F>(-INF<F>) : low;
}

// Softmax over the k best. keep: where it is positive a key is attended in any case, and the k best are those of the
// others.
template <class F, int P> void topk(Block<F, P> whole, typename F::I k, const V<F>* keep) {
    V<F> top, t;
    Block<F, P> b = whole;
    if (keep) {
        for (int j = 0; j < b.n; ++j) b.other[j] = keep[j] > 0 ? all<F>(-INF<F>) : b.x[j];
        t = kth<F, P>(b.other, b.n, k, top);
        top = b.top();
        t = top == INF<F> ? all<F>(-INF<F>) : t;  // a spoilt row is spoilt at all its living keys
        for (int j = 0; j < b.n; ++j) b.x[j] = ((b.x[j] >= t) | (keep[j] > 0)) ? b.x[j] : all<F>(-INF<F>);
    } else {
        b = whole.largest(k);
        t = kth<F, P>(b.x, b.n, k, top);
        for (int j = 0; j < b.n; ++j) b.x[j] = b.x[j] >= t ? b.x[j] : all<F>(-INF<F>);
    }
    softmax(b, top);
    whole.place(b);
}

// Newton's method on sum [d - tau]_+ = 1 from below: it never overshoots (Michelot's rounds)
template <class F, int P> V<F> threshold2(const V<F>* x, int n) {
    V<F> tau = all<F>(-1);
    for (int round = 0; round < ROUNDS; ++round) {
        V<F> mass{};
        M<F> support{};
        for (int j = 0; j < n; ++j) {
            V<F> above = x[j] - tau;
            M<F> in = above > 0;
            mass += in ? above : V<F>{};
            support -= in;
        }
        mass = sum<F, P>(mass);
        V<F> count = __builtin_convertvector(sum<F, P>(support), V<F>);
        if (Block<F, P>::climb(tau, (mass - 1) / count)) break;
    }
    return tau;
}

template <class F, int P> void sparsemax(Block<F, P> whole) {
    V<F> top = whole.top(), total{};
    whole.centre(top);
    Block<F, P> b = whole.if_few(all<F>(-1));
    V<F> tau = threshold2<F, P>(b.x, b.n);
    for (int j = 0; j < b.n; ++j) total += b.x[j] = larger<F>(b.x[j] - tau, V<F>{});
    b.share(sum<F, P>(total), top);
    whole.place(b);
}

template <class F> inline V<F> root(V<F> x) {
    for (int lane = 0; lane < F::W; ++lane) x[lane] = std::sqrt(x[lane]);
    return x;
}

// tau of half the centred scores: Newton's method on the norm of [d/2 - tau]_+, which is convex in tau
template <class F, int P> V<F> threshold15(const V<F>* x, int n) {
    V<F> tau = all<F>(-1);
    for (int round = 0; round < ROUNDS; ++round) {
        V<F> mass{}, squares{};
        for (int j = 0; j < n; ++j) {
            V<F> above = larger<F>(x[j] * (typename F::T)0.5 - tau, V<F>{});
            mass += above;
            squares += above * above;
        }
        V<F> norm = root<F>(sum<F, P>(squares));
        if (Block<F, P>::climb(tau, (norm - 1) * norm / sum<F, P>(mass))) break;
    }
    return tau;
}

template <class F, int P> void entmax15(Block<F, P> whole) {
    V<F> top = whole.top(), total{};
    whole.centre(top);
    Block<F, P> b = whole.if_few(all<F>(-2));
    V<F> tau = threshold15<F, P>(b.x, b.n);
    for (int j = 0; j < b.n; ++j) {
        V<F> above = larger<F>(b.x[j] * (typename F::T)0.5 - tau, V<F>{});
        total += b.x[j] = above * above;
    }
    b.share(sum<F, P>(total), top);
    whole.place(b);
}

template <class F> struct Masses {  // sums over the keys of p, p/r and p/r^2
    V<F> mass{}, slope{}, bend{};
};
// alpha = 1 + e, e in (0, 1]: p = r^(1/e) with r = [1 + e (d - t)]_+ of N vectors, and what they add to the sums
template <class F, int N> inline void weigh(const V<F>* d, V<F>* p, V<F> t, V<F> e, V<F> inverse, Masses<F>& sums) {
    V<F> base[N], r[N], log[N];
    for (int i = 0; i < N; ++i) {
        base[i] = larger<F>((d[i] - t) * e, all<F>(-1));
        V<F> moved = base[i] + 1;
        log[i] = r[i] = larger<F>(moved, all<F>(TINY<F>));
        base[i] -= moved - 1;  // what 1 + base rounds off: of weight where base is near 0, and there its logarithm's, too
    }
    logarithm<N>(log);
    for (int i = 0; i < N; ++i) log[i] = (log[i] + base[i]) * inverse;
    power<N>(log);
    for (int i = 0; i < N; ++i) {
        p[i] = r[i] > TINY<F> ? log[i] : V<F>{};
        V<F> over_r = 1 / r[i], steep = p[i] * over_r;
        sums.mass += p[i];
        sums.slope += steep;
        sums.bend += steep * over_r;
    }
}

// A threshold near that of e. The largest weight, (1 - e t)^(1/e), runs nearly straight from e = 0, where it is one over
// the sum of e^d, to 1/2 and from there to 1; at these two the threshold is exact.
template <class F, int P> V<F> near_threshold(Block<F, P> b, V<F> e) {
    using T = typename F::T;
    V<F> tau = threshold15<F, P>(b.x, b.n), half = tau * tau, largest = half;
    M<F> lower = e < (T)0.5, upper = e > (T)0.5;
    if (any<F, 1>(lower)) {
        for (int j = 0; j < b.n; ++j) b.other[j] = b.x[j];
        V<F> soft = 1 / larger<F>(sum<F, P>(Block<F, P>{b.other, nullptr, b.n}.power_all()), all<F>(1));
        largest = lower ? soft + (half - soft) * (2 * e) : largest;
    }
    V<F> flat = half;
    if (any<F, 1>(upper)) {
        flat = -threshold2<F, P>(b.x, b.n);
        largest = upper ? half + (flat - half) * (2 * e - 1) : largest;
    }
    V<F> t = (1 - power_of(e * log_of<F>(largest))) / e;
    t = e == (T)0.5 ? 2 * (tau + 1) : t;
    return e == (T)1 ? 1 - flat : t;
}

// 1 - mass^-e: near 1, where all rounds but the first are, by its series
template <class F, int P> V<F> one_less_power(V<F> mass, V<F> e) {
    using T = typename F::T;
    if constexpr (SINGLE<F>) {
        V<F> u = mass - 1;
        M<F> far = ~((u < (T)0.01) & (u > (T)-0.01));
        if (!any<F, P>(far)) {
            V<F> x = e * u * (1 - u * ((T)0.5 - u * ((T)(1.0 / 3) - u * (T)0.25)));
            return x * (1 - x * ((T)0.5 - x * ((T)(1.0 / 6) - x * (T)(1.0 / 24))));
        }
    }
    return -expm1<F>(-e * log_of<F>(mass));
}

// Solves (sum p)^e = 1 by two of Halley's rounds, which may land on either side, then Newton's: the first of these lands
// below, as the sum is convex, and the others climb.
template <class F, int P> void entmax(Block<F, P> whole, V<F> e) {
    using T = typename F::T;
    V<F> top = whole.top(), inverse = 1 / e, total{};
    whole.centre(top);
    Block<F, P> b = whole.above(-inverse);
    V<F> t = near_threshold(b, e);
    for (int round = 0; round < ROUNDS; ++round) {
        Masses<F> sums;
        int j = 0;
        for (; j + STEP <= b.n; j += STEP) weigh<F, STEP>(b.x + j, b.other + j, t, e, inverse, sums);
        for (; j < b.n; ++j) weigh<F, 1>(b.x + j, b.other + j, t, e, inverse, sums);
        V<F> mass = total = sum<F, P>(sums.mass), slope = sum<F, P>(sums.slope);
        V<F> step = mass * one_less_power<F, P>(mass, e) / (e * slope);
        if (round < 2) {  // what the curve takes from or adds to the step; at the edge of a support it is no guide
            V<F> bent = 1 + step * (1 - e) * (slope / mass - sum<F, P>(sums.bend) / slope) * (T)0.5;
            step /= bent == bent ? smaller<F>(larger<F>(bent, all<F>((T)0.5)), all<F>(2)) : all<F>(1);
        }
        if (round <= 2) {  // 0 is below; NaN: no living key
            V<F> moved = t + step;
            moved = moved > 0 ? moved : V<F>{};
            M<F> still = (moved - t < 2 * EPS<F>) & (t - moved < 2 * EPS<F>);
            if (!any<F, P>(~still)) break;
            t = moved;
        } else if (Block<F, P>::climb(t, step, 2 * EPS<F>)) {  // p is of t before the step
            break;
        }
    }
    for (int j = 0; j < b.n; ++j) b.x[j] = b.other[j];
    b.share(total, top);
    whole.place(b);
}

// ---- rows in memory

struct Strided {  // one value or one row for each row of the scores; strides in elements, 0 where it is broadcast
    const void* data;
    int64_t outer, middle, inner, key;
};
struct Shape {
    int64_t rows, middle, inner, keys;  // rows = outer * middle * inner
};
inline int64_t offset(const Strided& s, const Shape& shape, int64_t row) {
    int64_t inner = row % shape.inner, rest = row / shape.inner;
    return (rest / shape.middle) * s.outer + (rest % shape.middle) * s.middle + inner * s.inner;
}

template <class F> inline V<F> some(const typename F::T* at, int count, typename F::T fill) {
    if (count >= F::W) return load<F>(at);
    V<F> found = all<F>(fill);
    std::memcpy(&found, at, count * sizeof(typename F::T));
    return found;
}
template <class F> inline void put(typename F::T* at, V<F> value, int count) {
    if (count >= F::W) store<F>(at, value);
    else std::memcpy(at, &value, count * sizeof(typename F::T));
}
// nonzero where the bytes from `at` on are
template <class F> inline M<F> marks(const uint8_t* at, int64_t stride, int count) {
    if (stride == 0) return M<F>{} - (typename F::I)(*at != 0);
    typename Vec<F>::Bytes bytes{};
    if (count >= F::W) bytes = *(const typename Vec<F>::Bytes*)at;
    else std::memcpy(&bytes, at, count);
    return __builtin_convertvector(bytes, M<F>) != 0;
}

// W / P vectors, each of a row, become vectors with P lanes of every row
template <int S, class X, int... L> inline void exchange(X& a, X& b, std::integer_sequence<int, L...>) {
    constexpr int W = sizeof...(L);
    X first = __builtin_shufflevector(a, b, ((L & S) ? W + L - S : L)...);
    b = __builtin_shufflevector(a, b, ((L & S) ? W + L : L + S)...);
    a = first;
}
template <class F, int P, int S = F::W / 2> inline void turn(V<F>* tile) {
    if constexpr (S >= P) {
        for (int i = 0; i < F::W / P; ++i)
            if (!(i & (S / P))) exchange<S>(tile[i], tile[i + S / P], std::make_integer_sequence<int, F::W>{});
        turn<F, P, S / 2>(tile);
    }
}

template <class F> struct Scores {
    const typename F::T* data;
    Strided valid;
    Shape shape;

    // W keys of one row from `first` on: NaN made +inf, dead and absent ones -inf
    V<F> operator()(int64_t row, int64_t first) const {
        int count = (int)(shape.keys - first);
        V<F> x = some<F>(data + row * shape.keys + first, count, -INF<F>);
        x = x == x ? x : all<F>(INF<F>);
        if (valid.data) {
            const uint8_t* at = (const uint8_t*)valid.data + offset(valid, shape, row) + first * valid.key;
            M<F> alive = marks<F>(at, valid.key, count);
            x = alive ? x : all<F>(-INF<F>);
        }
        return x;
    }
};
template <class F> struct Marks {
    Strided given;
    Shape shape;

    V<F> operator()(int64_t row, int64_t first) const {
        const uint8_t* at = (const uint8_t*)given.data + offset(given, shape, row) + first * given.key;
        M<F> set = marks<F>(at, given.key, (int)(shape.keys - first));
        return set ? all<F>(1) : V<F>{};
    }
};

// the block of `rows` rows from `row` on, read through `from`
template <class F, int P, class From> void gather(V<F>* x, From from, int64_t row, int rows, int64_t keys, V<F> none) {
    constexpr int R = F::W / P;
    for (int64_t first = 0; first < keys; first += F::W) {
        V<F> tile[R];
        for (int r = 0; r < R; ++r) tile[r] = r < rows ? from(row + r, first) : none;
        turn<F, P>(tile);
        for (int j = 0; j < R && first + j * P < keys; ++j) x[first / P + j] = tile[j];
    }
}
template <class F, int P> void scatter(const V<F>* x, typename F::T* out, int64_t row, int rows, int64_t keys) {
    constexpr int R = F::W / P;
    for (int64_t first = 0; first < keys; first += F::W) {
        V<F> tile[R];
        for (int j = 0; j < R; ++j) tile[j] = first + j * P < keys ? x[first / P + j] : V<F>{};
        turn<F, P>(tile);
        for (int r = 0; r < rows; ++r) put<F>(out + (row + r) * keys + first, tile[r], (int)(keys - first));
    }
}

enum Kind { SOFTMAX, TOPK, SPARSEMAX, ENTMAX15, ENTMAX };
constexpr int64_t SHORT = 64;  // the longest rows that take one lane
constexpr int64_t SERIAL = 1 << 14;  // numbers up to here are one thread's work

// one number a row, in the lanes of its block
template <class F, int P> V<F> per_row(const Strided& given, const Shape& shape, int64_t row, int rows) {
    const typename F::T* from = (const typename F::T*)given.data;
    V<F> found = all<F>(1);
    for (int lane = 0; lane < rows * P; ++lane) found[lane] = from[offset(given, shape, row + lane / P)];
    return found;
}

template <int P> using Lanes = std::integral_constant<int, P>;

// work(lanes a row, room of four blocks, first row, rows) over all rows; 1 where there is no memory
template <class F, int P, class Work> int in_blocks(const Shape& shape, int threads, Work work) {
    constexpr int R = F::W / P;
    bool failed = false;
    int64_t blocks = (shape.rows + R - 1) / R, n = (shape.keys + P - 1) / P;
    if (shape.rows * shape.keys <= SERIAL) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        // one vector more than four blocks; 4 makes the bytes a multiple of 64, as they must be
        V<F>* room = (V<F>*)std::aligned_alloc(64, (4 * n + 4) * sizeof(V<F>));
        if (!room) {
#pragma omp atomic write
            failed = true;
        }
#pragma omp for schedule(static)
        for (int64_t at = 0; at < blocks; ++at) {
            int64_t row = at * R;
            if (room) work(Lanes<P>{}, room, row, (int)(shape.rows - row < R ? shape.rows - row : R));
        }
        std::free(room);
    }
    return failed;
}
template <class F, class Work> int in_blocks(const Shape& shape, int threads, Work work) {
    if (shape.keys <= SHORT) return in_blocks<F, 1>(shape, threads, work);
    return in_blocks<F, F::W>(shape, threads, work);
}

template <class F> struct Job {
    Kind kind;
    Scores<F> scores;
    Strided keep;  // of top-k
    Strided excess;  // of entmax
    int64_t k;
    typename F::T* out;

    template <int P> void block(V<F>* x, int64_t row, int rows) const {
        const Shape& shape = scores.shape;
        int n = (int)((shape.keys + P - 1) / P);
        Block<F, P> b{x, x + n, n};
        gather<F, P>(x, scores, row, rows, shape.keys, all<F>(-INF<F>));
        switch (kind) {
            case SOFTMAX: softmax(b, b.top()); break;
            case TOPK:
                if (keep.data) gather<F, P>(x + 2 * n, Marks<F>{keep, shape}, row, rows, shape.keys, V<F>{});
                topk(b, (typename F::I)k, keep.data ? x + 2 * n : nullptr);
                break;
            case SPARSEMAX: sparsemax(b); break;
            case ENTMAX15: entmax15(b); break;
            case ENTMAX: entmax(b, per_row<F, P>(excess, shape, row, rows)); break;
        }
        scatter<F, P>(x, out, row, rows, shape.keys);
    }

    int operator()(int threads) const {
        return in_blocks<F>(scores.shape, threads, [this](auto lanes, V<F>* room, int64_t row, int rows) {
            block<decltype(lanes)::value>(room, row, rows);
        });
    }
};

// (e^x - 1 - x) / x^2 for x >= 0, by its series below 1/2
template <class F, int N> inline void second_order(const V<F>* x, const V<F>* power_of_x, V<F>* found) {
    using T = typename F::T;
    V<F> near[N];
    for (int i = 0; i < N; ++i) {
        near[i] = smaller<F>(x[i], all<F>((T)0.5));
        found[i] = all<F>(1);
    }
    for (int divisor = SINGLE<F> ? 10 : 16; divisor > 2; --divisor)
        for (int i = 0; i < N; ++i) found[i] = found[i] * near[i] * ((T)1 / divisor) + 1;
    for (int i = 0; i < N; ++i) {
        V<F> closed = (power_of_x[i] - 1 - x[i]) / (x[i] * x[i]);
        found[i] = x[i] < (T)0.5 ? found[i] * (T)0.5 : closed;
    }
}

// the gradient at the scores, q (g - <q, g> / sum q) with q = -1 / H''(p) on the support and 0 off it, and at alpha,
// sum_i g_i dp_i/dalpha in the form of _entmax.alpha_gradient
template <class F> struct Back {
    Kind kind;
    const typename F::T *weights, *grad;
    Strided excess;
    Shape shape;
    typename F::T *out, *to_excess;  // each may be missing

    struct Reader {
        const typename F::T* data;
        int64_t keys;
        V<F> operator()(int64_t row, int64_t first) const { return some<F>(data + row * keys + first, (int)(keys - first), 0); }
    };

    // the others' q is made again where it is asked for
    V<F> slope(V<F> p) const {
        if (kind == SPARSEMAX) return p > 0 ? all<F>(1) : p;
        return kind == ENTMAX15 ? root<F>(p) : p;
    }

    void row(int64_t at) const {
        Reader p_of{weights, shape.keys}, g_of{grad, shape.keys};
        V<F> all_q{}, taken{};
        for (int64_t j = 0; j < shape.keys; j += F::W) {
            V<F> q = slope(p_of(at, j));
            all_q += q;
            taken += q != 0 ? q * g_of(at, j) : V<F>{};
        }
        V<F> mean = sum<F, F::W>(taken) / larger<F>(sum<F, F::W>(all_q), all<F>(TINY<F>));
        for (int64_t j = 0; j < shape.keys; j += F::W) {
            V<F> q = slope(p_of(at, j)), found = q * (g_of(at, j) - mean);
            put<F>(out + at * shape.keys + j, q != 0 ? found : V<F>{}, (int)(shape.keys - j));
        }
    }

    template <int P> void block(V<F>* p, int64_t row, int rows) const {
        using T = typename F::T;
        int n = (int)((shape.keys + P - 1) / P), m = n, kept = -1;
        V<F>*g = p + n, *q = p;
        int32_t* place = nullptr;
        gather<F, P>(p, Reader{weights, shape.keys}, row, rows, shape.keys, V<F>{});
        gather<F, P>(g, Reader{grad, shape.keys}, row, rows, shape.keys, V<F>{});
        if constexpr (P == F::W) {  // of a row alone, its support is enough
            M<F> strange{};
            for (int j = 0; j < n; ++j) strange |= p[j] != p[j];
            if (!any<F, 1>(strange)) {
                q = p + 2 * n;
                place = (int32_t*)(p + 3 * n + 1);
                kept = pack(p, n, (T)0, (T*)q, place, F{});
                m = (kept + F::W - 1) / F::W;
                for (int i = 0; i < kept; ++i) ((T*)g)[i] = ((T*)g)[place[i]];
                for (int i = kept; i < m * F::W; ++i) ((T*)q)[i] = 0;
            }
        }
        this->template slopes<P>(q, g, m, row, rows);
        if (!out) return;
        V<F> all_q{}, taken{};
        for (int j = 0; j < m; ++j) {
            all_q += q[j];
            taken += q[j] != 0 ? q[j] * g[j] : V<F>{};
        }
        V<F> mean = sum<F, P>(taken) / larger<F>(sum<F, P>(all_q), all<F>(TINY<F>));
        for (int j = 0; j < m; ++j) {
            V<F> found = q[j] * (g[j] - mean);
            q[j] = q[j] != 0 ? found : V<F>{};
        }
        if (kept >= 0) {
            for (int j = 0; j < n; ++j) p[j] = V<F>{};
            for (int i = 0; i < kept; ++i) ((T*)p)[place[i]] = ((const T*)q)[i];
        }
        scatter<F, P>(p, out, row, rows, shape.keys);
    }

    struct Sums {
        V<F> bend{}, log{}, taken{}, taken_bend{}, taken_log{}, grown{};
    };

    // p of N vectors becomes q = p^(1 - e); sums grow by what the gradient at alpha needs: with l = log p and x = -e l,
    // (e^x - 1 - x) / e^2, which a small e leaves no digits but by its series
    template <int N> void slopes(V<F>* p, const V<F>* g, V<F> e, bool series, Sums& sums) const {
        V<F> l[N], x[N], ex[N], second[N], inverse_square = 1 / (e * e);
        for (int i = 0; i < N; ++i) l[i] = larger<F>(p[i], all<F>(TINY<F>));
        logarithm<N>(l);
        for (int i = 0; i < N; ++i) ex[i] = x[i] = -e * l[i];
        power<N>(ex);
        if (to_excess) {
            if (series) second_order<F, N>(x, ex, second);
            for (int i = 0; i < N; ++i) {
                V<F> pg = p[i] != 0 ? p[i] * g[i] : V<F>{}, grown = ex[i] - 1, v = (grown - x[i]) * inverse_square;
                if (series) {
                    grown = x[i] + x[i] * x[i] * second[i];
                    v = l[i] * l[i] * second[i];
                }
                sums.bend += p[i] * v;
                sums.log += p[i] * l[i];
                sums.taken += pg;
                sums.taken_bend += pg * v;
                sums.taken_log += pg * l[i];
                sums.grown += p[i] * grown;
            }
        }
        for (int i = 0; i < N; ++i) p[i] = p[i] == p[i] ? p[i] * ex[i] : p[i];
    }

    template <int P> void slopes(V<F>* p, const V<F>* g, int n, int64_t row, int rows) const {
        V<F> e = per_row<F, P>(excess, shape, row, rows);
        Sums sums;
        bool series = !SINGLE<F> || any<F, 1>(e < (typename F::T)0.25);
        int j = 0;
        for (; j + STEP <= n; j += STEP) slopes<STEP>(p + j, g + j, e, series, sums);
        for (; j < n; ++j) slopes<1>(p + j, g + j, e, series, sums);
        if (!to_excess) return;
        V<F> b = sum<F, P>(sums.bend), l = sum<F, P>(sums.log);
        V<F> tb = sum<F, P>(sums.taken_bend), tl = sum<F, P>(sums.taken_log);
        V<F> found = (b * sum<F, P>(sums.taken) - tb + e * (l * tb - b * tl)) / (1 + sum<F, P>(sums.grown));
        for (int r = 0; r < rows; ++r) to_excess[row + r] = found[r * P];
    }

    int operator()(int threads) const {
        if (kind == ENTMAX)
            return in_blocks<F>(shape, threads, [this](auto lanes, V<F>* room, int64_t row, int rows) {
                block<decltype(lanes)::value>(room, row, rows);
            });
        if (shape.rows * shape.keys <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t at = 0; at < shape.rows; ++at) row(at);
        return 0;
    }
};

}  // namespace

#define TRANSFORM(NAME, F)                                                                                             \
    extern "C" int attnbench_##NAME##_forward(                                                                         \
        int kind, const F::T* scores, const Strided* valid, const Strided* keep, const Strided* excess,                \
        const Shape* shape, int64_t k, F::T* out, int threads) {                                                       \
        return Job<F>{(Kind)kind, {scores, *valid, *shape}, *keep, *excess, k, out}(threads);                          \
    }                                                                                                                  \
    extern "C" int attnbench_##NAME##_backward(                                                                       \
        int kind, const F::T* weights, const F::T* grad, const Strided* excess, const Shape* shape, F::T* out,         \
        F::T* to_excess, int threads) {                                                                                \
        return Back<F>{(Kind)kind, weights, grad, *excess, *shape, out, to_excess}(threads);                                  \
    }

TRANSFORM(float32, Float)
TRANSFORM(float64, Double)

extern "C" int attnbench_bytes() { return BYTES; }
