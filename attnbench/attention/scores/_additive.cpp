// Additive scores and their gradients, as additive.py defines them: no unit is written to memory.

#include <algorithm>

#include "../transforms/_memory.hpp"

namespace {

constexpr int UNITS = 4;  // vectors of units in step: one alone waits for its own results
constexpr int64_t FEW = 1 << 12;  // units up to here are one thread's work
constexpr int W = Float::W;

// tanh x to 3 ulp: near 0 by the polynomial of Cephes (tanhf), beyond by an exponential; NaN stays
template <int N> inline void tangent(V<Float>* x) {
    constexpr float terms[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                               -3.33332819422e-1f};
    V<Float> square[N], near[N], far[N];
    for (int i = 0; i < N; ++i) square[i] = x[i] * x[i];
    horner<N>(near, square, terms);
    for (int i = 0; i < N; ++i) far[i] = x[i] + x[i];
    power<N>(far);
    for (int i = 0; i < N; ++i) {
        far[i] = 1 - 2 / (1 + far[i]);
        near[i] = near[i] * square[i] * x[i] + x[i];
        x[i] = square[i] < 0.390625f ? near[i] : x[i] == x[i] ? far[i] : x[i];
    }
}

struct Sizes {
    int64_t rows, heads, queries, keys, units;  // rows = batch * heads
};

// N vectors of units from `from` on, those beyond the last 0
template <int N> inline void read(const float* row, int64_t from, int64_t units, V<Float>* to) {
    for (int i = 0; i < N; ++i) {
        const int64_t count = units - from - i * W;
        to[i] = count > 0 ? some<Float>(row + from + i * W, (int)std::min<int64_t>(count, W), 0) : V<Float>{};
    }
}
template <int N> inline void add(float* row, int64_t from, int64_t units, const V<Float>* more) {
    for (int i = 0; i < N; ++i) {
        const int count = (int)std::clamp<int64_t>(units - from - i * W, 0, W);
        if (count) put<Float>(row + from + i * W, some<Float>(row + from + i * W, count, 0) + more[i], count);
    }
}

float score(const float* query, const float* key, const float* vector, int64_t units) {
    V<Float> sums[UNITS] = {};
    for (int64_t e = 0; e < units; e += UNITS * W) {
        V<Float> x[UNITS], k[UNITS], v[UNITS];
        read<UNITS>(query, e, units, x);
        read<UNITS>(key, e, units, k);
        read<UNITS>(vector, e, units, v);
        for (int i = 0; i < UNITS; ++i) x[i] += k[i];
        tangent<UNITS>(x);
        for (int i = 0; i < UNITS; ++i) sums[i] += v[i] * x[i];
    }
    return sum<Float, W>((sums[0] + sums[1]) + (sums[2] + sums[3]))[0];
}

// Adds what one key of a row gives to the gradients of the row.
void turn_back(
    const Sizes& s, const float* grad, const float* queries, const float* key, const float* vector, float* to_queries,
    float* to_key, float* to_vector) {
    for (int64_t e = 0; e < s.units; e += UNITS * W) {
        V<Float> k[UNITS], v[UNITS], at_key[UNITS] = {}, at_vector[UNITS] = {};
        read<UNITS>(key, e, s.units, k);
        read<UNITS>(vector, e, s.units, v);
        for (int64_t q = 0; q < s.queries; ++q) {
            const float g = grad[q * s.keys];
            if (g == 0) continue;  // a sparse transform leaves most keys without
            V<Float> x[UNITS], slope[UNITS];
            read<UNITS>(queries + q * s.units, e, s.units, x);
            for (int i = 0; i < UNITS; ++i) x[i] += k[i];
            tangent<UNITS>(x);
            for (int i = 0; i < UNITS; ++i) {
                at_vector[i] += g * x[i];
                slope[i] = g * v[i] * (1 - x[i] * x[i]);
                at_key[i] += slope[i];
            }
            add<UNITS>(to_queries + q * s.units, e, s.units, slope);
        }
        add<UNITS>(to_key, e, s.units, at_key);
        add<UNITS>(to_vector, e, s.units, at_vector);
    }
}

}  // namespace

// out: rows x queries x keys. queries, keys: rows x their number x units, contiguous. vector: heads x units.
extern "C" void attnbench_additive(
    const Sizes* s, const float* queries, const float* keys, const float* vector, float* out, int threads) {
    if (s->rows * s->queries * s->keys * s->units <= FEW) threads = 1;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t at = 0; at < s->rows * s->queries; ++at)
        for (int64_t j = 0; j < s->keys; ++j) {
            const int64_t row = at / s->queries;
            out[at * s->keys + j] = score(
                queries + at * s->units, keys + (row * s->keys + j) * s->units, vector + row % s->heads * s->units,
                s->units);
        }
}

// Gradients of the same, all 0 before; to_vector: rows x units, of each row apart, so that threads change nothing.
extern "C" void attnbench_additive_backward(
    const Sizes* s, const float* grad, const float* queries, const float* keys, const float* vector, float* to_queries,
    float* to_keys, float* to_vector, int threads) {
    if (s->rows * s->queries * s->keys * s->units <= FEW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < s->rows; ++row)
        for (int64_t j = 0; j < s->keys; ++j)
            turn_back(
                *s, grad + row * s->queries * s->keys + j, queries + row * s->queries * s->units,
                keys + (row * s->keys + j) * s->units, vector + row % s->heads * s->units,
                to_queries + row * s->queries * s->units, to_keys + (row * s->keys + j) * s->units,
                to_vector + row * s->units);
}
