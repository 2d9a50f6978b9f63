// The transforms of _simplex.py for rows in memory, forward and backward, each row read and written once.

#include "_memory.hpp"
#include "_searches.hpp"

namespace {

template <class F> struct Job {
    Transform transform;
    Scores<F> scores;
    typename F::T* out;

    Kind kind() const {
        const bool every = !transform.whole && (transform.k <= 0 || transform.k >= scores.shape.keys);
        return transform.kind == TOPK && every ? SOFTMAX : (Kind)transform.kind;
    }
    bool one_by_one() const { return kind() == TOPK && (transform.whole || transform.first); }

    template <int P> void block(V<F>* x, int64_t row, int rows) const {
        const Shape& shape = scores.shape;
        int n = (int)((shape.keys + P - 1) / P);
        Block<F, P> b{x, x + n, n};
        const Strided& keep = transform.keep;
        Offsets<F, P> valid(scores.valid, shape, row, rows), kept(keep, shape, row, rows);
        auto score = [from = scores, row, valid](int r, int64_t first) { return from(row + r, valid.of[r], first); };
        auto mark = [&](int r, int64_t first) { return Marks<F>{keep, shape.keys}(kept.of[r], first); };
        gather<F, P>(x, score, rows, shape.keys, all<F>(-INF<F>), scores.data + (row + rows) * shape.keys);
        switch (kind()) {
            case SOFTMAX: softmax(b, b.top()); break;
            case TOPK:
                if constexpr (P == F::W)
                    if (one_by_one()) {
                        topk_of_one(b, transform);
                        break;
                    }
                if (keep.data) gather<F, P>(x + 2 * n, mark, rows, shape.keys, V<F>{});
                topk(b, (typename F::I)transform.k, keep.data ? x + 2 * n : nullptr);
                break;
            case SPARSEMAX: sparsemax(b); break;
            case ENTMAX15: entmax15(b); break;
            case ENTMAX: entmax(b, per_row<F, P>(transform.excess, shape, row, rows)); break;
            case SIGMOID: gates(b, b.top()); break;
        }
        scatter<F, P>(x, out, row, rows, shape.keys);
    }

    int operator()(int threads) const {
        int64_t longest = one_by_one() ? 0 : kind() == ENTMAX ? SHORT_ENTMAX : SHORT;
        return in_blocks<F>(scores.shape, longest, threads, [this](auto lanes, V<F>* room, int64_t row, int rows) {
            block<decltype(lanes)::value>(room, row, rows);
        });
    }
};

// e^x - 1 - x for x >= 0 from e^x, which leaves it no digits near 0: there by its series
template <int N> inline void second_order(const V<Float>* x, V<Float>* found) {
    constexpr float terms[] = {1.6630337721e-3f, 8.2099841326e-3f, 4.1688926335e-2f, 1.6666526622e-1f,
                               5.0000001467e-1f};
    V<Float> near[N];
    horner<N>(near, x, terms);
    for (int i = 0; i < N; ++i) found[i] = x[i] < 0.5f ? near[i] * x[i] * x[i] : found[i] - 1 - x[i];
}
template <int N> inline void second_order(const V<Double>* x, V<Double>* found) {
    for (int i = 0; i < N; ++i) {
        V<Double> near = all<Double>(1), within = smaller<Double>(x[i], all<Double>(0.5));
        for (int divisor = 16; divisor > 2; --divisor) near = near * within * (1.0 / divisor) + 1;
        found[i] = x[i] < 0.5 ? near * 0.5 * x[i] * x[i] : found[i] - 1 - x[i];
    }
}

// the gradient at the scores, q (g - <q, g> / sum q) with q = -1 / H''(p) on the support and 0 off it (of gates q g with
// q = p - p^2), and at alpha, sum_i g_i dp_i/dalpha in the form of _entmax.alpha_gradient
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

    // each gate by itself
    void gates(int64_t at) const {
        Reader p_of{weights, shape.keys}, g_of{grad, shape.keys};
        for (int64_t j = 0; j < shape.keys; j += F::W) {
            V<F> p = p_of(at, j), q = p - p * p, found = q * g_of(at, j);
            put<F>(out + at * shape.keys + j, q != 0 ? found : V<F>{}, (int)(shape.keys - j));
        }
    }

    void row(int64_t at) const {
        if (kind == SIGMOID) return gates(at);
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
        int n = (int)((shape.keys + P - 1) / P), m = n, kept = 0;
        V<F>*g = p + n, *q = p;
        int32_t* place = nullptr;
        auto weight = [&](int r, int64_t first) { return Reader{weights, shape.keys}(row + r, first); };
        auto slope_of = [&](int r, int64_t first) { return Reader{grad, shape.keys}(row + r, first); };
        gather<F, P>(p, weight, rows, shape.keys, V<F>{});
        gather<F, P>(g, slope_of, rows, shape.keys, V<F>{});
        if constexpr (P == F::W) {  // of a row alone, its support is enough where it is small
            M<F> strange{};
            for (int j = 0; j < n; ++j) strange |= p[j] != p[j];
            if (!any<F, 1>(strange) && 2 * count_above<F>(p, n, V<F>{}) <= n * F::W) {
                q = p + 2 * n;
                place = (int32_t*)(p + 3 * n + 1);
                kept = pack<F>(p, n, V<F>{}, 0, q, place);
                m = (kept + F::W - 1) / F::W;
                for (int i = 0; i < kept; ++i) ((T*)g)[i] = ((const T*)g)[place[i]];
            }
        }
        this->template slopes<P>(q, g, m, row, rows);
        if (!out) return;
        V<F> all_q = summed<F>(m, [q](int j) { return q[j]; });
        V<F> taken = summed<F>(m, [q, g](int j) { return q[j] != 0 ? q[j] * g[j] : V<F>{}; });
        V<F> mean = sum<F, P>(taken) / larger<F>(sum<F, P>(all_q), all<F>(TINY<F>));
        for (int j = 0; j < m; ++j) {
            V<F> found = q[j] * (g[j] - mean);
            q[j] = q[j] != 0 ? found : V<F>{};
        }
        if (q != p) {
            for (int j = 0; j < n; ++j) p[j] = V<F>{};
            for (int i = 0; i < kept; ++i) ((T*)p)[place[i]] = ((const T*)q)[i];
        }
        scatter<F, P>(p, out, row, rows, shape.keys);
    }

    struct Sums {
        V<F> bend{}, log{}, taken{}, taken_bend{}, taken_log{};
    };

    // p of N vectors becomes q = p^(1 - e); sums grow by what the gradient at alpha needs: x = -e log p, and e^x - 1 - x
    template <int N> void slopes(V<F>* p, const V<F>* g, V<F> e, bool series, Sums& sums) const {
        V<F> x[N], power[N], bend[N];
        for (int i = 0; i < N; ++i) x[i] = larger<F>(p[i], all<F>(TINY<F>));
        logarithm2<N>(x);
        for (int i = 0; i < N; ++i) power[i] = x[i] *= -e;
        power2<N>(power);
        if (to_excess) {
            for (int i = 0; i < N; ++i) {
                x[i] *= (typename F::T)LN2;
                bend[i] = series ? power[i] : power[i] - 1 - x[i];
            }
            if (series) second_order<N>(x, bend);
            for (int i = 0; i < N; ++i) {
                V<F> pg = p[i] != 0 ? p[i] * g[i] : V<F>{};
                sums.bend += p[i] * bend[i];
                sums.log += p[i] * x[i];
                sums.taken += pg;
                sums.taken_bend += pg * bend[i];
                sums.taken_log += pg * x[i];
            }
        }
        for (int i = 0; i < N; ++i) p[i] = p[i] == p[i] ? p[i] * power[i] : p[i];
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
        V<F> found = (b * (sum<F, P>(sums.taken) + tl) - tb * (1 + l)) / (e * e * (1 + b + l));
        for (int r = 0; r < rows; ++r) to_excess[row + r] = found[r * P];
    }

    int operator()(int threads) const {
        if (kind == ENTMAX)
            return in_blocks<F>(shape, SHORT_BACK, threads, [this](auto lanes, V<F>* room, int64_t row, int rows) {
                block<decltype(lanes)::value>(room, row, rows);
            });
        if (shape.rows * shape.keys <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t at = 0; at < shape.rows; ++at) row(at);
        return 0;
    }
};

}  // namespace

// forward: see `Forward`.
#define TRANSFORM(NAME, F)                                                                                             \
    extern "C" int attnbench_##NAME##_forward(                                                                         \
        const Transform* transform, const F::T* scores, const Strided* valid, const Shape* shape, F::T* out,           \
        int threads) {                                                                                                 \
        return Job<F>{*transform, {scores, *valid, *shape}, out}(threads);                                             \
    }                                                                                                                  \
    extern "C" int attnbench_##NAME##_backward(                                                                       \
        int kind, const F::T* weights, const F::T* grad, const Strided* excess, const Shape* shape, F::T* out,         \
        F::T* to_excess, int threads) {                                                                                \
        return Back<F>{(Kind)kind, weights, grad, *excess, *shape, out, to_excess}(threads);                                  \
    }

TRANSFORM(float32, Float)
TRANSFORM(float64, Double)

extern "C" int attnbench_bytes() { return REGISTER; }
