// The transforms of _simplex.py for one block: thresholds are searched, and scores become weights where they lie.
//
// A block is n vectors of W lanes, P successive lanes a row: with P = 1 a vector holds the same key of W rows (short
// rows: no sum goes across lanes), with P = W successive keys of one (long rows: nothing is turned about). The searches
// are written once for all P.
// Dead keys hold -inf. A spoilt row (NaN or +inf at a living key) is searched as a row of equal scores, then made NaN.

#pragma once

#include <algorithm>

#include "_transform.hpp"
#include "_vectors.hpp"

namespace {

constexpr int ROUNDS = 64;
template <class F> constexpr typename F::T STILL = 8 * EPS<F>;  // up to here a threshold has not moved
constexpr double ROUGHLY = 0.2;  // the same where it is a guess for another's
constexpr double CLOSE = 3e-3;  // up to here weights are moved by a step of their threshold
constexpr int PATIENCE = 5;  // rounds before masses may be as far from 1 as a digit of the threshold takes them
constexpr int STEP = 4;  // vectors at a time where a function of each is dear

// Hundreds of one size added one by one lose digits, all in the same direction: so N are added before they join the others.
template <class F, int N> inline V<F> joined(const V<F>* x) {
    if constexpr (N == 1) return x[0];
    else return joined<F, N / 2>(x) + joined<F, N / 2>(x + N / 2);
}
// the sum of term(0) to term(n - 1), each asked for once
template <class F, class G> inline V<F> summed(int n, G term) {
    V<F> total{};
    int j = 0;
    for (; j + STEP <= n; j += STEP) {
        V<F> terms[STEP];
        for (int i = 0; i < STEP; ++i) terms[i] = term(j + i);
        total += joined<F, STEP>(terms);
    }
    for (; j < n; ++j) total += term(j);
    return total;
}

template <class F, int P> struct Block {
    V<F>* x;  // scores, then weights
    V<F>* other;  // room for n vectors more, and as much again for a block of few
    int n;
    V<F> bound{};  // of a block of few: above it are its scores in the block that it is of

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
            total += joined<F, STEP>(x + j);
        }
        for (; j < n; ++j) total += x[j] = power_of(x[j]);
        return total;
    }

    // masses made to sum to 1; NaN where the row is spoilt
    void share(V<F> total, V<F> top) {
        V<F> scale = 1 / larger<F>(total, all<F>(TINY<F>));
        for (int j = 0; j < n; ++j) x[j] *= scale;
        spoil(top);
    }
    // weights above 0 made NaN where the row is spoilt
    void spoil(V<F> top) {
        M<F> spoilt = top == INF<F>;
        if (any<F, P>(spoilt))
            for (int j = 0; j < n; ++j) x[j] = (spoilt & (x[j] > 0)) ? all<F>(std::nan("")) : x[j];
    }

    // the scores above `bound` of one row, the others having no weight in any case, where they are so few that the work
    // saved is more than that of moving them
    Block if_few(V<F> bound) const {
        if constexpr (P < F::W) return *this;
        if (2 * ((count_above<F>(x, n, bound) + F::W - 1) / F::W) > n) return *this;
        V<F>* few = other + n;
        return {few, other, (pack<F>(x, n, bound, -INF<F>, few) + F::W - 1) / F::W, bound};
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
        typename F::T reached = k < F::W ? kth_lane<F>(least, (typename F::I)k) : -most<F, P>(-least)[0];
        if (!(reached > -INF<F> && reached < INF<F>)) return *this;
        Block found = if_few(all<F>(std::nextafter(reached, -INF<F>)));
        return found.top()[0] < INF<F> ? found : *this;  // a spoilt row is spoilt at all its living keys
    }
    // their weights put where the scores were
    void place(const Block& few) const {
        if (few.x != x) unpack<F>(few.x, x, n, few.bound, x);
    }

    // a threshold that only climbs: in which lanes it moved
    static M<F> climb(V<F>& threshold, V<F> step, typename F::T still) {
        V<F> before = threshold;
        threshold += step > 0 ? step : V<F>{};  // NaN in rows without a living key
        return threshold - before > still;
    }
};


template <class F, int P> void softmax(Block<F, P> b, V<F> top) {
    b.centre(top);
    b.share(sum<F, P>(b.power_all()), top);
}

// 1 / (1 + e^-x) of each score alone, by an exponential that is at most 1
template <class F, int P> void gates(Block<F, P> b, V<F> top) {
    auto open = [](V<F> x, V<F> less) { return (x < 0 ? less : all<F>(1)) / (1 + less); };
    // where the row is spoilt a living key must not come out as 0
    M<F> spoilt = top == INF<F>;
    for (int j = 0; j < b.n; ++j) {
        V<F> x = spoilt & (b.x[j] > -INF<F>) ? V<F>{} : b.x[j];
        b.x[j] = open(x, power_of(x < 0 ? x : -x));
    }
    b.spoil(top);
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

constexpr int FEW = 8;  // scores of each lane that the registers hold in order

// The k-th largest of each lane of n vectors, k <= K, by k of them held in order while all pass; -inf where there are fewer.
template <class F, int K = FEW> V<F> kth_of_lanes(const V<F>* from, int n, typename F::I k, V<F>& top) {
    if constexpr (K > 1)
        if (k < K) return kth_of_lanes<F, K - 1>(from, n, k, top);
    V<F> best[K];
    for (int i = 0; i < K; ++i) best[i] = all<F>(-INF<F>);
    for (int j = 0; j < n; ++j) {
        V<F> x = from[j];
#pragma GCC unroll 8
        for (int i = 0; i < K; ++i) {
            V<F> better = larger<F>(best[i], x);
            x = smaller<F>(best[i], x);
            best[i] = better;
        }
    }
    top = best[0];
    return best[K - 1];
}

// The number t of `section` for every row of a block; -inf where a row has no more than k. top: the largest score, which is
// told.
template <class F, int P> V<F> kth(const V<F>* from, int n, typename F::I k, V<F>& top) {
    if constexpr (P == 1)
        if (k <= FEW) {
            V<F> t = kth_of_lanes<F>(from, n, k, top);
            return top == INF<F> ? all<F>(-INF<F>) : t;
        }
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
    if constexpr (P == F::W) {
        if (few[0]) return all<F>(-INF<F>);
        return all<F>(n == 1 ? kth_lane<F>(from[0], k) : section<F>(from, n, k, low[0], high[0]));
    }
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

// The same without `keep` for a row that keeps a part of its living keys, or of equal scores the first ones.
template <class F> void topk_of_one(Block<F, F::W> whole, const Transform& given) {
    const int living = count_above<F>(whole.x, whole.n, all<F>(-INF<F>));
    int64_t k = given.k;
    if (given.whole) k = std::max(given.least, (living * given.part + given.whole - 1) / given.whole);
    V<F> top;
    Block<F, F::W> b = whole.largest(k);
    const V<F> t = kth<F, F::W>(b.x, b.n, (typename F::I)k, top);
    if (given.first && t[0] > -INF<F>) {
        int64_t room = k - count_above<F>(b.x, b.n, t);  // for scores that are t
        typename F::T* x = (typename F::T*)b.x;
        for (int i = 0; i < b.n * F::W; ++i)
            if (x[i] == t[0] && --room < 0) x[i] = -INF<F>;
    }
    for (int j = 0; j < b.n; ++j) b.x[j] = b.x[j] >= t ? b.x[j] : all<F>(-INF<F>);
    softmax(b, top);
    whole.place(b);
}

// Newton's method on sum [d - tau]_+ = 1 from below: it never overshoots, and of the keys of the round before its step was
// exact (Michelot's rounds). A short step ends nothing: it may leave many keys behind.
template <class F, int P> V<F> threshold2(const V<F>* x, int n, typename F::T still = 0) {
    V<F> tau = all<F>(-1);
    M<F> before{};
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
        support = sum<F, P>(support);
        V<F> count = __builtin_convertvector(support, V<F>);
        if (!any<F, P>(Block<F, P>::climb(tau, (mass - 1) / count, still) & (support != before))) break;
        before = support;
    }
    return tau;
}

template <class F, int P> void sparsemax(Block<F, P> whole) {
    V<F> top = whole.top();
    whole.centre(top);
    Block<F, P> b = whole.if_few(all<F>(-1));
    V<F> tau = threshold2<F, P>(b.x, b.n);
    V<F> total = summed<F>(b.n, [&](int j) { return b.x[j] = larger<F>(b.x[j] - tau, V<F>{}); });
    b.share(sum<F, P>(total), top);
    whole.place(b);
}

template <class F> inline V<F> root(V<F> x) {
    for (int lane = 0; lane < F::W; ++lane) x[lane] = std::sqrt(x[lane]);
    return x;
}

// tau of half the centred scores: Newton's method on the norm of [d/2 - tau]_+, which is convex in tau. After a step that is
// hardly one the mass is wrong by its square, key for key.
template <class F, int P> V<F> threshold15(const V<F>* x, int n, typename F::T still = STILL<F>) {
    V<F> tau = all<F>(-1);
    for (int round = 0; round < ROUNDS; ++round) {
        V<F> mass{}, squares{};
        for (int j = 0; j < n; ++j) {
            V<F> above = larger<F>(x[j] * (typename F::T)0.5 - tau, V<F>{});
            mass += above;
            squares += above * above;
        }
        V<F> norm = root<F>(sum<F, P>(squares));
        if (!any<F, P>(Block<F, P>::climb(tau, (norm - 1) * norm / sum<F, P>(mass), still))) break;
    }
    return tau;
}

template <class F, int P> void entmax15(Block<F, P> whole) {
    V<F> top = whole.top();
    whole.centre(top);
    Block<F, P> b = whole.if_few(all<F>(-2));
    V<F> tau = threshold15<F, P>(b.x, b.n);
    V<F> total = summed<F>(b.n, [&](int j) {
        V<F> above = larger<F>(b.x[j] * (typename F::T)0.5 - tau, V<F>{});
        return b.x[j] = above * above;
    });
    b.share(sum<F, P>(total), top);
    whole.place(b);
}

template <class F> struct Masses {  // sums over the keys of p, p/r and p/r^2
    V<F> mass{}, slope{}, bend{};
};
// alpha = 1 + e, e in (0, 1]: p = r^(1/e) with r = [1 + e (d - t)]_+ of N vectors, and what they add to the sums. ROUGH:
// to some 1e-4, which is enough to find the next threshold
template <class F, int N, bool ROUGH = false>
inline void weigh(const V<F>* d, V<F>* p, V<F> t, V<F> e, V<F> inverse, Masses<F>& sums) {
    V<F> r[N], log[N], lost[N], over[N], steep[N];
    for (int i = 0; i < N; ++i) {
        V<F> base = (d[i] - t) * e, moved = base + 1;
        log[i] = r[i] = larger<F>(moved, all<F>(TINY<F>));
        lost[i] = base - (moved - 1);  // by rounding: of weight where base is near 0, and there its logarithm's, too
    }
    logarithm2<N, ROUGH>(log);
    for (int i = 0; i < N; ++i) {
        if constexpr (!ROUGH) log[i] += (r[i] > TINY<F> ? lost[i] : V<F>{}) * (typename F::T)(1 / LN2);
        log[i] *= inverse;
    }
    power2<N, ROUGH>(log);
    for (int i = 0; i < N; ++i) {
        p[i] = r[i] > TINY<F> ? log[i] : V<F>{};
        over[i] = near_inverse(r[i]);
        steep[i] = p[i] * over[i];
        over[i] *= steep[i];
    }
    sums.mass += joined<F, N>(p);
    sums.slope += joined<F, N>(steep);
    sums.bend += joined<F, N>(over);
}
template <class F, bool ROUGH, int P> Masses<F> weigh_all(Block<F, P> b, V<F> t, V<F> e, V<F> inverse) {
    Masses<F> sums;
    V<F> unkept[STEP];
    int j = 0;
    for (; j + STEP <= b.n; j += STEP) weigh<F, STEP, ROUGH>(b.x + j, ROUGH ? unkept : b.other + j, t, e, inverse, sums);
    for (; j < b.n; ++j) weigh<F, 1, ROUGH>(b.x + j, ROUGH ? unkept : b.other + j, t, e, inverse, sums);
    return {sum<F, P>(sums.mass), sum<F, P>(sums.slope), sum<F, P>(sums.bend)};
}

// The weights at t in `other` moved to t + step, and their sum: p (1 - e step/r)^(1/e) by its series. Where r is too little
// for that they are found anew.
template <class F, int P> V<F> moved_by(Block<F, P> b, V<F> t, V<F> step, V<F> e, V<F> inverse) {
    using T = typename F::T;
    V<F> edge = larger<F>(step, -step) * 8, half = (1 - e) * (T)0.5, third = (1 - 2 * e) * (T)(1.0 / 3);
    V<F> total = summed<F>(b.n, [&](int j) {
        V<F> r = (b.x[j] - t) * e + 1, x = step * near_inverse(r);
        if (any<F, 1>((r <= edge) & (r >= -edge))) {  // 0 in a lane that takes no step, too
            Masses<F> sums;
            weigh<F, 1>(b.x + j, b.other + j, t + step, e, inverse, sums);
        } else {
            b.other[j] -= b.other[j] * x * (1 - half * x * (1 - third * x));
        }
        return b.other[j];
    });
    return sum<F, P>(total);
}

// A threshold near that of e. The largest weight, (1 - e t)^(1/e), runs nearly straight from e = 0, where it is one over
// the sum of e^d, to 1/2 and from there to 1; at these two the threshold is exact.
template <class F, int P> V<F> near_threshold(Block<F, P> b, V<F> e) {
    using T = typename F::T;
    M<F> lower = e < (T)0.5, upper = e > (T)0.5;
    T still15 = any<F, 1>(e == (T)0.5) ? STILL<F> : (T)ROUGHLY, still2 = any<F, 1>(e == (T)1) ? 0 : (T)ROUGHLY;
    V<F> tau = threshold15<F, P>(b.x, b.n, still15), half = tau * tau, largest = half;
    if (any<F, 1>(lower)) {
        V<F> soft = summed<F>(b.n, [&](int j) {
            V<F> x = b.x[j] * (T)(1 / LN2);
            power2<1, true>(&x);
            return x;
        });
        soft = 1 / larger<F>(sum<F, P>(soft), all<F>(1));
        largest = lower ? soft + (half - soft) * (2 * e) : largest;
    }
    V<F> flat = half;
    if (any<F, 1>(upper)) {
        flat = -threshold2<F, P>(b.x, b.n, still2);
        largest = upper ? half + (flat - half) * (2 * e - 1) : largest;
    }
    V<F> log = larger<F>(largest, all<F>(TINY<F>));
    logarithm2<1>(&log);
    log *= e;
    power2<1>(&log);
    V<F> t = (1 - log) / e;
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
        V<F> some = larger<F>(mass, all<F>(TINY<F>));
        logarithm2<1, true>(&some);
        some *= -e;
        if (!any<F, P>(~((some < (T)0.5) & (some > (T)-0.5)))) return -power2_less_one(some);
    }
    return -expm1<F>(-e * log_of<F>(mass));
}

// Solves (sum p)^e = 1 by Halley's rounds, which may land on either side, then Newton's: the first of these lands below, as
// the sum is convex, and the others climb. Where a step is short the weights are moved by it and not found again.
template <class F, int P> void entmax(Block<F, P> whole, V<F> e) {
    using T = typename F::T;
    V<F> top = whole.top(), inverse = 1 / e, total{};
    M<F> dead = top == -INF<F>;
    whole.centre(top);
    Block<F, P> b = whole.if_few(-inverse);
    V<F> t = near_threshold(b, e);
    bool rough = SINGLE<F> && any<F, 1>((e != (T)0.5) & (e != (T)1));
    for (int round = 0; round < ROUNDS; ++round) {
        Masses<F> sums = rough ? weigh_all<F, true>(b, t, e, inverse) : weigh_all<F, false>(b, t, e, inverse);
        V<F> mass = total = sums.mass, slope = sums.slope;
        V<F> step = mass * one_less_power<F, P>(mass, e) / (e * slope);
        if (rough && b.x == whole.x && step[0] == step[0])  // no threshold is below t + step: Newton's lands below
            b = whole.if_few(t + step - inverse - (T)(2 * CLOSE));
        if (round < 2) {  // what the curve takes from or adds to the step; at the edge of a support it is no guide
            V<F> bent = 1 + step * (1 - e) * (slope / mass - sums.bend / slope) * (T)0.5;
            step /= bent == bent ? smaller<F>(larger<F>(bent, all<F>((T)0.5)), all<F>(2)) : all<F>(1);
        }
        step = dead ? V<F>{} : step;
        V<F> length = larger<F>(step, -step);
        if (!rough && !any<F, P>(~((slope * length < 4 * EPS<F>) | dead))) break;
        if (SINGLE<F> && !rough && !any<F, P>(~(length < (T)CLOSE))) {
            total = moved_by(b, t, step, e, inverse);
            V<F> off = larger<F>(total - 1, 1 - total);
            V<F> enough = round < PATIENCE ? smaller<F>(slope, all<F>(4)) : slope;  // a wide support is hard to sum
            if (!any<F, P>(~((off <= (enough + 4) * EPS<F>) | dead))) break;
        }
        rough = false;
        if (round <= 2) {  // 0 is below; NaN: no living key
            t += step;
            t = t > 0 ? t : V<F>{};
        } else if (!any<F, P>(Block<F, P>::climb(t, step, 0))) {  // weights and total are of one t, before the step or behind
            break;
        }
    }
    for (int j = 0; j < b.n; ++j) b.x[j] = b.other[j];
    b.share(total, top);
    whole.place(b);
}

}  // namespace
