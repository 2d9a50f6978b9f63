// Rows in memory, with whatever strides they have: gathered into blocks, scattered again, and shared out among threads.

#pragma once

#include <cstdlib>

#include "_transform.hpp"
#include "_vectors.hpp"

namespace {

// where what belongs to each row of a block lies, by one division for all of them: it would cost more than the rest
template <class F, int P> struct Offsets {
    int64_t of[F::W / P];

    Offsets(const Strided& s, const Shape& shape, int64_t row, int rows) {
        if (!s.data) return;
        int64_t inner = row % shape.inner, rest = row / shape.inner;
        int64_t middle = rest % shape.middle, outer = rest / shape.middle;
        for (int r = 0; r < rows; ++r) {
            of[r] = outer * s.outer + middle * s.middle + inner * s.inner;
            if (++inner < shape.inner) continue;
            inner = 0;
            if (++middle < shape.middle) continue;
            middle = 0;
            ++outer;
        }
    }
};

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
#ifdef __AVX512F__
    if constexpr (SINGLE<F>) {  // g++ takes the conversion apart number by number
        __m128i all_bytes;
        std::memcpy(&all_bytes, &bytes, sizeof bytes);
        return (M<F>)_mm512_cvtepu8_epi32(all_bytes) != 0;
    }
#endif
    return __builtin_convertvector(bytes, M<F>) != 0;
}

// W / P vectors, each of a row, become vectors with P lanes of every row
template <int S, class X, int... L> inline void exchange(X& a, X& b, std::integer_sequence<int, L...>) {
    constexpr int W = sizeof...(L);
    X first = shuffled<((L & S) ? W + L - S : L)...>(a, b);
    b = shuffled<((L & S) ? W + L : L + S)...>(a, b);
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

    // W keys of one row from `first` on: NaN made +inf, dead and absent ones -inf. marked: where the row's mask lies
    V<F> operator()(int64_t row, int64_t marked, int64_t first) const {
        int count = (int)(shape.keys - first);
        V<F> x = some<F>(data + row * shape.keys + first, count, -INF<F>);
        x = x == x ? x : all<F>(INF<F>);
        if (valid.data) {
            const uint8_t* at = (const uint8_t*)valid.data + marked + first * valid.key;
            M<F> alive = marks<F>(at, valid.key, count);
            x = alive ? x : all<F>(-INF<F>);
        }
        return x;
    }
};
template <class F> struct Marks {
    Strided given;
    int64_t keys;

    V<F> operator()(int64_t marked, int64_t first) const {
        const uint8_t* at = (const uint8_t*)given.data + marked + first * given.key;
        M<F> set = marks<F>(at, given.key, (int)(keys - first));
        return set ? all<F>(1) : V<F>{};
    }
};

// The numbers behind a block, as many as W keys of its rows are, are fetched meanwhile: where rows are read side by
// side the processor does not see what comes next, and lines to be written it fetches late in any case.
template <class F, int P, bool WRITTEN = false> inline void fetch(const typename F::T* behind, int64_t first) {
    constexpr int LINE = 64 / sizeof(typename F::T), R = F::W / P;
    if (R * F::W < LINE && first * R % LINE) return;
    for (int i = 0; i < R * F::W; i += LINE) __builtin_prefetch(behind + first * R + i, WRITTEN, 3);
}

// a block of `rows` rows, W keys of one of which `from` reads; behind: the next block, null where it is not fetched
template <class F, int P, class From>
void gather(V<F>* x, From from, int rows, int64_t keys, V<F> none, const typename F::T* behind = nullptr) {
    constexpr int R = F::W / P;
    for (int64_t first = 0; first < keys; first += F::W) {
        if (behind) fetch<F, P>(behind, first);
        V<F> tile[R];
        for (int r = 0; r < R; ++r) tile[r] = r < rows ? from(r, first) : none;
        turn<F, P>(tile);
        for (int j = 0; j < R && first + j * P < keys; ++j) x[first / P + j] = tile[j];
    }
}
template <class F, int P> void scatter(const V<F>* x, typename F::T* out, int64_t row, int rows, int64_t keys) {
    constexpr int R = F::W / P;
    for (int64_t first = 0; first < keys; first += F::W) {
        fetch<F, P, true>(out + (row + rows) * keys, first);
        V<F> tile[R];
        for (int j = 0; j < R; ++j) tile[j] = first + j * P < keys ? x[first / P + j] : V<F>{};
        turn<F, P>(tile);
        for (int r = 0; r < rows; ++r) put<F>(out + (row + r) * keys + first, tile[r], (int)(keys - first));
    }
}

// The longest rows that take one lane each: of entmax, whose rounds are dear, so that a row of its own is better searched
// among the keys that can have a weight, of its gradients, which only those keys have, and of the others.
constexpr int64_t SHORT_ENTMAX = REGISTER == 64 ? 128 : 64, SHORT_BACK = 64;
constexpr int64_t SHORT = REGISTER == 64 ? 192 : 4 * REGISTER;
constexpr int64_t SERIAL = 1 << 14;  // numbers up to here are one thread's work

// one number a row, in the lanes of its block
template <class F, int P> V<F> per_row(const Strided& given, const Shape& shape, int64_t row, int rows) {
    const typename F::T* from = (const typename F::T*)given.data;
    V<F> found = all<F>(1);
    Offsets<F, P> at(given, shape, row, rows);
    for (int lane = 0; lane < rows * P; ++lane) found[lane] = from[at.of[lane / P]];
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
template <class F, class Work> int in_blocks(const Shape& shape, int64_t longest, int threads, Work work) {
    if (shape.keys <= longest) return in_blocks<F, 1>(shape, threads, work);
    return in_blocks<F, F::W>(shape, threads, work);
}

}  // namespace
