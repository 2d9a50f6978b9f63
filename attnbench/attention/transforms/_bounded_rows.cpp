// csoftmax and csparsemax for rows in memory, forward and backward: what _bounded.py computes in torch operations.
// What is out of the ordinary is left to the caller: scores that are no numbers, bounds that decide all, and rows that
// still move after ROUNDS.

#include <cstdlib>

#include "_vectors.hpp"

namespace {

enum Kind { CSOFTMAX, CSPARSEMAX };

constexpr int MOST = 2;  // these two as in _bounded.py
constexpr double FEASIBLE = 1e-6;
constexpr int ROUNDS = 40;
constexpr int64_t SERIAL = 1 << 13;  // numbers up to here are one thread's work

struct Size {
    int64_t rows, keys;
};

// Newton's method on `sum min(c e^z, u) = 1`, which climbs and never oversteps; a negative c where it does not end, and
// where the free keys' powers are too small to have digits
template <class T> T softmax_scale(const T* power, const T* bound, int64_t keys) {
    constexpr T tolerance = 16 * std::numeric_limits<T>::epsilon(), faint = std::numeric_limits<T>::min() / tolerance;
    T whole = 0;
#pragma omp simd reduction(+ : whole)
    for (int64_t i = 0; i < keys; ++i) whole += power[i];
    T scale = 1 / whole;
    for (int round = 0; round < ROUNDS; ++round) {
        T sum = 0, free = 0;
#pragma omp simd reduction(+ : sum, free)
        for (int64_t i = 0; i < keys; ++i) {
            T part = power[i] * scale;
            sum += part < bound[i] ? part : bound[i];
            free += part < bound[i] ? power[i] : 0;
        }
        T rest = 1 - sum;
        if (free < faint) return std::fabs(rest) <= tolerance ? scale : -1;
        scale += rest / free;
        if (std::fabs(rest) <= tolerance) return scale;
    }
    return -1;
}

// Newton's method on `sum min([z - tau]_+, u) = 1`, and where its step leaves the bracket, a point between the
// bracket's middle and the secant's root; NaN where it does not end. In double precision: under tight bounds tau lies
// far from every weight.
double sparsemax_threshold(const double* score, const double* bound, int64_t keys, double total, double tolerance) {
    double low = 0, high = 0;
#pragma omp simd reduction(min : low)
    for (int64_t i = 0; i < keys; ++i) low = score[i] < low ? score[i] : low;
    double tau = low - low * (0.85 - 0.7 / total), at_low = total - 1, at_high = -1;
    tau = tau < -0.5 ? tau : -0.5;
    low -= MOST;
    for (int round = 0; round < ROUNDS; ++round) {
        double sum = 0, free = 0;
#pragma omp simd reduction(+ : sum, free)
        for (int64_t i = 0; i < keys; ++i) {
            double above = score[i] - tau, part = above > 0 ? above : 0;
            sum += part < bound[i] ? part : bound[i];
            free += (above > 0 ? 1.0 : 0.0) * (above < bound[i] ? 1.0 : 0.0);
        }
        double rest = sum - 1, guess = tau + rest / (free > 0 ? free : std::numeric_limits<double>::epsilon());
        if (std::fabs(rest) <= tolerance) return free > 0 ? guess : tau;
        (rest > 0 ? low : high) = tau;
        (rest > 0 ? at_low : at_high) = rest;
        bool within = guess > low && guess < high;
        tau = within ? guess : low + (high - low) * (0.7 * at_low / (at_low - at_high) + 0.15);
    }
    return std::numeric_limits<double>::quiet_NaN();
}

template <class F> struct Job {
    using T = typename F::T;
    Kind kind;
    const T *scores, *upper;
    const uint8_t* valid;  // may be missing
    Size size;
    T *weights, *bounds;
    uint8_t* left;  // 1: the caller's

    // bounds that hold, their sum and the largest score under one; whether all scores are numbers
    template <bool MASKED> bool heed(int64_t at, T& total, T& top) const {
        const T *z = scores + at * size.keys, *u = upper + at * size.keys;
        const uint8_t* seen = MASKED ? valid + at * size.keys : nullptr;
        T* b = bounds + at * size.keys;
        T sum = 0, most = -std::numeric_limits<T>::max(), strange = 0;
#pragma omp simd reduction(+ : sum, strange) reduction(max : most)
        for (int64_t i = 0; i < size.keys; ++i) {
            T score = z[i];
            if (MASKED) score = seen[i] ? score : -INF<F>;
            strange += score < INF<F> ? (T)0 : (T)1;
            T bound = u[i] < MOST ? u[i] : MOST;
            bound = bound > 2 * TINY<F> ? bound : 0;
            bound = score == -INF<F> ? 0 : bound;
            T counted = bound > 0 ? score : most;
            most = counted > most ? counted : most;
            sum += b[i] = bound;
        }
        total = sum;
        top = most;
        return strange == 0;
    }

    // whether it is done. room: of two numbers for each key and one vector more
    bool row(int64_t at, double* room) const {
        const T* z = scores + at * size.keys;
        T *p = weights + at * size.keys, *b = bounds + at * size.keys, total, top;
        bool numbers = valid ? heed<true>(at, total, top) : heed<false>(at, total, top);
        if (!numbers || !(total > 1 + FEASIBLE)) return false;
        return kind == CSOFTMAX ? softmax(z, b, top, p, (T*)room) : sparsemax(z, b, top, total, p, room);
    }

    bool softmax(const T* z, const T* b, T top, T* p, T* power_of) const {
        for (int64_t i = 0; i < size.keys; ++i) power_of[i] = b[i] > 0 ? z[i] - top : -INF<F>;
        for (int64_t i = 0; i < size.keys; i += F::W) {  // the last vector may hold something else besides
            V<F> x = load<F>(power_of + i);
            power(&x);
            store<F>(power_of + i, x);
        }
        T scale = softmax_scale(power_of, b, size.keys);
        for (int64_t i = 0; i < size.keys; ++i) {
            T part = power_of[i] * scale;
            p[i] = part < b[i] ? part : b[i];
        }
        return scale > 0;
    }

    bool sparsemax(const T* z, const T* b, T top, T total, T* p, double* score) const {
        double* bound = score + size.keys;
        for (int64_t i = 0; i < size.keys; ++i) {
            score[i] = b[i] > 0 ? (double)z[i] - top : 0;
            bound[i] = b[i];
        }
        double tau = sparsemax_threshold(score, bound, size.keys, total, 16 * EPS<F>);
        for (int64_t i = 0; i < size.keys; ++i) {
            double above = score[i] - tau, part = above > 0 ? above : 0;
            p[i] = (T)(part < bound[i] ? part : bound[i]);
        }
        return tau > -INF<Double>;
    }

    int run(int threads) const {
        bool failed = false;
        if (size.rows * size.keys <= SERIAL) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            double* room = (double*)std::malloc((2 * size.keys + Float::W) * sizeof(double));
            if (!room) {
#pragma omp atomic write
                failed = true;
            }
#pragma omp for schedule(static)
            for (int64_t at = 0; at < size.rows; ++at)
                if (room) left[at] = !row(at, room);
            std::free(room);
        }
        return failed;
    }
};

// mean = sum_F q g / sum_F q, dz = q (g - mean), du = g - mean on A; see _bounded.py
template <class F> struct Back {
    using T = typename F::T;
    Kind kind;
    const T *weights, *bounds, *grad;
    const uint8_t* small;  // rows whose bounds sum to less than 1; may be missing
    Size size;
    T *to_scores, *to_upper;  // the second may be missing

    // whether it is done: not where a weight is no number
    template <Kind KIND> bool row(int64_t at) const {
        const T *p = weights + at * size.keys, *u = bounds + at * size.keys, *g = grad + at * size.keys;
        T *dz = to_scores + at * size.keys, whole = 0, mass = 0, taken = 0;
#pragma omp simd reduction(+ : whole, mass, taken)
        for (int64_t i = 0; i < size.keys; ++i) {
            whole += p[i];
            T q = slope<KIND>(p[i], u[i]);
            mass += q;
            taken += q > 0 ? q * heeded(g[i]) : 0;
        }
        T mean = mass > 0 ? taken / mass : 0;
        if (!std::isfinite(mean)) mean = 0;
#pragma omp simd
        for (int64_t i = 0; i < size.keys; ++i) {
            T q = slope<KIND>(p[i], u[i]);
            dz[i] = q > 0 ? q * (heeded(g[i]) - mean) : 0;
        }
        if (to_upper) {
            T *du = to_upper + at * size.keys, moves = mass > 0 || (small && small[at]) ? 0 : INF<F>;
#pragma omp simd
            for (int64_t i = 0; i < size.keys; ++i) {
                T found = p[i] > moves ? heeded(g[i]) - mean : 0;
                du[i] = p[i] < u[i] ? 0 : found;
            }
        }
        return whole == whole;
    }

    template <Kind KIND> static T slope(T p, T u) {
        T q = KIND == CSOFTMAX ? p : (T)1;
        return p > 0 && p < u ? q : (T)0;
    }

    // a gradient that is no number is infinite, so that it is seen
    static T heeded(T g) { return g == g ? g : INF<F>; }

    int run(int threads) const {
        int strange = 0;
        if (size.rows * size.keys <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : strange) if (threads > 1)
        for (int64_t at = 0; at < size.rows; ++at)
            strange |= !(kind == CSOFTMAX ? this->template row<CSOFTMAX>(at) : this->template row<CSPARSEMAX>(at));
        return strange;
    }
};

}  // namespace

#define TRANSFORM(NAME, F)                                                                                             \
    extern "C" int attnbench_##NAME##_forward(                                                                         \
        int kind, const F::T* scores, const F::T* upper, const uint8_t* valid, int64_t rows, int64_t keys,             \
        F::T* weights, F::T* bounds, uint8_t* left, int threads) {                                                     \
        return Job<F>{(Kind)kind, scores, upper, valid, {rows, keys}, weights, bounds, left}.run(threads);             \
    }                                                                                                                  \
    extern "C" int attnbench_##NAME##_backward(                                                                        \
        int kind, const F::T* weights, const F::T* bounds, const F::T* grad, const uint8_t* small, int64_t rows,       \
        int64_t keys, F::T* to_scores, F::T* to_upper, int threads) {                                                  \
        return Back<F>{(Kind)kind, weights, bounds, grad, small, {rows, keys}, to_scores, to_upper}.run(threads);      \
    }

TRANSFORM(float32, Float)
TRANSFORM(float64, Double)
