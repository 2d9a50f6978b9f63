// What LSTM and GRU layers make of the products of a step, and the gradients, each in one pass; gates.py defines them.

#include <cmath>
#include <cstdint>

#include "_power.hpp"

namespace {

constexpr int64_t SERIAL = 1 << 13;  // units up to here are one thread's work

// to 2 ulp: near 0 by the polynomial of Cephes (tanhf)
inline float tangent(float x) {
    float square = x * x;
    float near = -5.70498872745e-3f;
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    float small = power(-2 * std::fabs(x));
    float far = std::copysign((1 - small) / (1 + small), x);
    return square < 0.390625f ? near : far;
}

}  // namespace

// products: rows x 4 x units, of the gates enter, keep, new and leave; made, as large: these gates. cell, after and
// hidden: rows x units.
extern "C" void attnbench_lstm(
    const float* products, const float* cell, float* made, float* after, float* hidden, int64_t rows, int64_t units,
    int threads) {
    if (rows * units <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const float *given = products + row * 4 * units, *before = cell + row * units;
        float *gates = made + row * 4 * units, *state = after + row * units, *out = hidden + row * units;
#pragma omp simd
        for (int64_t i = 0; i < units; ++i) {
            float enter = sigmoid(given[i]), keep = sigmoid(given[units + i]);
            float fresh = tangent(given[2 * units + i]), leave = sigmoid(given[3 * units + i]);
            float now = keep * before[i] + enter * fresh;
            gates[i] = enter;
            gates[units + i] = keep;
            gates[2 * units + i] = fresh;
            gates[3 * units + i] = leave;
            state[i] = now;
            out[i] = leave * tangent(now);
        }
    }
}

// at_hidden, at_after: gradients, of which either may be null. to_products, as large as `made`, and to_cell: what is
// sought.
extern "C" void attnbench_lstm_backward(
    const float* at_hidden, const float* at_after, const float* made, const float* cell, const float* after,
    float* to_products, float* to_cell, int64_t rows, int64_t units, int threads) {
    if (rows * units <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const float *gates = made + row * 4 * units, *before = cell + row * units, *now = after + row * units;
        float *back = to_products + row * 4 * units, *out = to_cell + row * units;
        const float* hidden = at_hidden ? at_hidden + row * units : nullptr;
        const float* later = at_after ? at_after + row * units : nullptr;
#pragma omp simd
        for (int64_t i = 0; i < units; ++i) {
            float enter = gates[i], keep = gates[units + i], fresh = gates[2 * units + i], leave = gates[3 * units + i];
            float at = hidden ? hidden[i] : 0, shown = tangent(now[i]);
            float carried = (later ? later[i] : 0) + at * leave * (1 - shown * shown);
            back[i] = carried * fresh * enter * (1 - enter);
            back[units + i] = carried * before[i] * keep * (1 - keep);
            back[2 * units + i] = carried * enter * (1 - fresh * fresh);
            back[3 * units + i] = at * shown * leave * (1 - leave);
            out[i] = carried * keep;
        }
    }
}

// ours, theirs: products of the input and of the state, rows x 3 x units, of the gates reset, keep and new; made, as
// large: these gates. before, after: states, rows x units.
extern "C" void attnbench_gru(
    const float* ours, const float* theirs, const float* before, float* made, float* after, int64_t rows, int64_t units,
    int threads) {
    if (rows * units <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const float *mine = ours + row * 3 * units, *other = theirs + row * 3 * units, *state = before + row * units;
        float *gates = made + row * 3 * units, *out = after + row * units;
#pragma omp simd
        for (int64_t i = 0; i < units; ++i) {
            float reset = sigmoid(mine[i] + other[i]), keep = sigmoid(mine[units + i] + other[units + i]);
            float fresh = tangent(mine[2 * units + i] + reset * other[2 * units + i]);
            gates[i] = reset;
            gates[units + i] = keep;
            gates[2 * units + i] = fresh;
            out[i] = fresh + keep * (state[i] - fresh);
        }
    }
}

// at_after: the gradient. to_ours, to_theirs and to_before: what is sought.
extern "C" void attnbench_gru_backward(
    const float* at_after, const float* made, const float* theirs, const float* before, float* to_ours,
    float* to_theirs, float* to_before, int64_t rows, int64_t units, int threads) {
    if (rows * units <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const float *gates = made + row * 3 * units, *other = theirs + row * 3 * units + 2 * units;
        const float *at = at_after + row * units, *state = before + row * units;
        float *mine = to_ours + row * 3 * units, *back = to_theirs + row * 3 * units, *out = to_before + row * units;
#pragma omp simd
        for (int64_t i = 0; i < units; ++i) {
            float reset = gates[i], keep = gates[units + i], fresh = gates[2 * units + i];
            float at_new = at[i] * (1 - keep) * (1 - fresh * fresh);
            float at_keep = at[i] * (state[i] - fresh) * keep * (1 - keep);
            float at_reset = at_new * other[i] * reset * (1 - reset);
            mine[i] = back[i] = at_reset;
            mine[units + i] = back[units + i] = at_keep;
            mine[2 * units + i] = at_new;
            back[2 * units + i] = at_new * reset;
            out[i] = at[i] * keep;
        }
    }
}
