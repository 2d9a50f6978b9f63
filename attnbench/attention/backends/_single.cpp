// Products of one query a row with its keys, and of its weights with its values: what a step of decoding asks of a cache
// that is a part of a larger one, which matrix products would copy first.

#include <cstdint>

namespace {

constexpr int64_t SERIAL = 1 << 16;  // numbers up to here are one thread's work

struct Rows {  // keys or values; strides in elements, the numbers of one position lie side by side
    const float* data;
    int64_t batch, head, position;
};
struct Shape {
    int64_t rows, heads, keys, width;  // batch * heads rows
};

// work(row, its part of what is held) for every row
template <class Work> void each_row(const Rows& held, const Shape& s, int threads, Work work) {
    if (s.rows * s.keys * s.width <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < s.rows; ++row)
        work(row, held.data + (row / s.heads) * held.batch + (row % s.heads) * held.head);
}

}  // namespace

extern "C" void attnbench_compare(const float* query, const Rows* keys, const Shape* shape, float* out, int threads) {
    const Shape s = *shape;
    each_row(*keys, s, threads, [=](int64_t row, const float* k) {
        const float* q = query + row * s.width;
        for (int64_t j = 0; j < s.keys; ++j, k += keys->position) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t e = 0; e < s.width; ++e) sum += q[e] * k[e];
            out[row * s.keys + j] = sum;
        }
    });
}

extern "C" void attnbench_blend(const float* weights, const Rows* values, const Shape* shape, float* out, int threads) {
    const Shape s = *shape;
    each_row(*values, s, threads, [=](int64_t row, const float* v) {
        float* to = out + row * s.width;
        for (int64_t e = 0; e < s.width; ++e) to[e] = 0;
        for (int64_t j = 0; j < s.keys; ++j, v += values->position) {
            const float share = weights[row * s.keys + j];
            if (share == 0) continue;  // a key that is left out is not read
#pragma omp simd
            for (int64_t e = 0; e < s.width; ++e) to[e] += share * v[e];
        }
    });
}
