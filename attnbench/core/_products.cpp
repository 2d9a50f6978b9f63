// Products of matrices, out = left . right + bias, in float32 or, where the processor multiplies it, of bfloat16 summed up
// in float32. The right side, a transposed weight, was packed before in panels of COLUMNS columns, in each of them the
// words of a row side by side (Goto and van de Geijn 2008). A word is one number of float32, or two of bfloat16 that
// follow each other down the depth.
//
// Each number of `out` is a sum in the order of the depth, cut every DEPTH words, whatever rows and threads there are.

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "_bfloat16.hpp"

namespace {

// Numbers of a vector; rows of a tile, as many as leave registers for a row of the right side and a number of the left.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, ROWS = 14;
#elif defined(__AVX__)
constexpr int WIDTH = 8, ROWS = 6;
#elif defined(__ARM_NEON)
constexpr int WIDTH = 4, ROWS = 12;
#else
constexpr int WIDTH = 4, ROWS = 6;
#endif
constexpr int COLUMNS = 2 * WIDTH;
constexpr int DEPTH = 512;           // words of a block: a panel of it stays in the nearest cache but one
constexpr int BLOCK = ROWS * 12;     // rows of a block
constexpr int APART = DEPTH + 16;    // words from one copied row to the next: rows share no part of the nearest cache
constexpr int FEW = 3;               // rows that are taken with several panels at once
constexpr int64_t SERIAL = 1 << 17;  // multiplied words up to here are one thread's work

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef float Loose __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));

int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

struct Left {
    const float* at;
    int64_t row;  // words from one to the next
};

// Words of one number.
struct Singles {
    static constexpr int HELD = 1;
    static void pack(float number, int, float& word) { word = number; }
    static Vector spread(float word) { return word - Vector{}; }
    static void add(Vector& sum, Vector left, Vector right) { sum += left * right; }
    // A block, or where rows are long a copy of it, whose rows lie near each other.
    static Left block(Left left, int64_t rows, int64_t numbers, bool is_near, float* to) {
        if (is_near) return left;
        for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * APART, left.at + r * left.row, numbers * sizeof(float));
        return {to, APART};
    }
};

#ifdef __AVX512BF16__
// Words of two numbers of bfloat16, the first one lower. What is too small for a normal number counts as 0.
struct Pairs {
    static constexpr int HELD = 2;
    static void pack(float number, int place, float& word) {
        BFloat16 half;
        narrow(number, half);
        std::memcpy(reinterpret_cast<char*>(&word) + place * sizeof half, &half, sizeof half);
    }
    static Vector spread(float word) { return (Vector)_mm512_set1_ps(word); }
    static void add(Vector& sum, Vector left, Vector right) {
        sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
    }
    // A copy of a block, rounded.
    static Left block(Left left, int64_t rows, int64_t numbers, bool, float* to) {
        auto part = [&](const float* from, int64_t count) {  // up to a vector of them, then zeros
            return _mm512_maskz_loadu_ps((__mmask16)(count >= WIDTH ? 0xffff : count > 0 ? (1 << count) - 1 : 0), from);
        };
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < numbers; k += 2 * WIDTH) {
                const float* from = left.at + r * left.row + k;
                __m512 low = part(from, numbers - k), high = part(from + WIDTH, numbers - k - WIDTH);
                _mm512_storeu_ps(to + r * APART + k / 2, (__m512)_mm512_cvtne2ps_pbh(high, low));
            }
        return {to, APART};
    }
};
#endif

template <class Kind> void pack_panel(const float* weight, int64_t depth, int64_t columns, float* to) {
    for (int64_t k = 0; k < parts(depth, Kind::HELD) * Kind::HELD; ++k)
        for (int j = 0; j < COLUMNS; ++j)
            Kind::pack(
                j < columns && k < depth ? weight[j * depth + k] : 0.0f, k % Kind::HELD,
                to[k / Kind::HELD * COLUMNS + j]);
}

struct Out {
    float* at;
    int64_t row;
    const float* bias;  // none: null
    bool begun;         // what `at` holds is added to
};

struct Ahead {
    const float* at;  // of what comes next; fetched meanwhile, since it may lie far from the processor
    int64_t step;     // words on for each word of depth
};

struct Right {
    const float* at;
    int64_t far;  // words from one panel to the next
    int64_t columns;
    Right panel(int64_t p) const { return {at + p * far, far, columns - p * COLUMNS}; }
};

// R rows by P panels. A function of its own: within another one the compiler keeps sums in memory.
template <class Kind, int R, int P>
__attribute__((noinline)) void tile(int64_t depth, const Left& from, const Right& right, const Ahead& ahead, const Out& out) {
    const float *__restrict left = from.at, *__restrict panels = right.at;
    const int64_t apart = from.row, far = right.far;
    constexpr int N = 2 * P;
    Vector sums[R][N] = {};
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {  // written when the sums are done
        __builtin_prefetch(out.at + r * out.row, 1);
        __builtin_prefetch(out.at + r * out.row + COLUMNS - 1, 1);
    }
    for (int64_t k = 0; k < depth; ++k) {
        if constexpr (P == 1) __builtin_prefetch(ahead.at + k * ahead.step, 0, 3);  // else the whole weight is one stream
        Vector row[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) row[n] = *(const Loose*)(panels + n / 2 * far + k * COLUMNS + n % 2 * WIDTH);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            Vector word = Kind::spread(left[r * apart + k]);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) Kind::add(sums[r][n], word, row[n]);
        }
    }
    if (right.columns >= P * COLUMNS) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) {
                Loose* to = (Loose*)(out.at + r * out.row + n * WIDTH);
                if (out.begun) sums[r][n] += *to;
                else if (out.bias) sums[r][n] += *(const Loose*)(out.bias + n * WIDTH);
                *to = sums[r][n];
            }
        return;
    }
    for (int r = 0; r < R; ++r)
        for (int64_t j = 0; j < right.columns; ++j) {
            float& to = out.at[r * out.row + j];
            to = sums[r][j / WIDTH][j % WIDTH] + (out.begun ? to : out.bias ? out.bias[j] : 0.0f);
        }
}

typedef void (*Tile)(int64_t, const Left&, const Right&, const Ahead&, const Out&);

template <class Kind, int R = ROWS> Tile of_rows(int64_t rows) {
    if constexpr (R == 1) return tile<Kind, 1, 1>;
    else return rows == R ? tile<Kind, R, 1> : of_rows<Kind, R - 1>(rows);
}

// A block of rows with the panels from `first` to `last`.
template <class Kind>
void multiply(Left left, int64_t rows, int64_t depth, Right right, int64_t first, int64_t last, Out out) {
    auto below = [&](int64_t r) { return Left{left.at + r * left.row, left.row}; };
    auto at = [&](int64_t r, int64_t p) {
        return Out{out.at + r * out.row + p * COLUMNS, out.row, out.bias ? out.bias + p * COLUMNS : nullptr, out.begun};
    };
    int64_t p = first;
    if (rows <= FEW) {  // several panels at once: so few sums would wait for themselves
        int several = rows == 1 ? 4 : 2;
        Tile wide = rows == 1 ? tile<Kind, 1, 4> : rows == 2 ? tile<Kind, 2, 2> : tile<Kind, 3, 2>;
        for (; p + several <= last && (p + several) * COLUMNS <= right.columns; p += several)
            wide(depth, left, right.panel(p), {}, at(0, p));
    }
    int64_t whole = rows / ROWS * ROWS, step = parts(COLUMNS, parts(rows, ROWS));
    Tile rest = of_rows<Kind>(rows - whole);
    for (; p < last; ++p) {
        Ahead ahead = {right.panel(std::min(p + 1, last - 1)).at, step};
        for (int64_t r = 0; r < whole; r += ROWS, ahead.at += depth * step)
            tile<Kind, ROWS, 1>(depth, below(r), right.panel(p), ahead, at(r, p));
        if (whole < rows) rest(depth, below(whole), right.panel(p), ahead, at(whole, p));
    }
}

template <class Kind> void pack(const float* weight, int64_t columns, int64_t depth, float* to, int threads) {
    const int64_t words = parts(depth, Kind::HELD);
    if (words * columns <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t p = 0; p < parts(columns, COLUMNS); ++p)
        pack_panel<Kind>(
            weight + p * COLUMNS * depth, depth, std::min<int64_t>(COLUMNS, columns - p * COLUMNS),
            to + p * COLUMNS * words);
}

// Each thread makes its own rows where there are many of them, or too few panels, else its own columns.
template <class Kind>
void product(
    const float* left, int64_t row, const float* right, const float* bias, float* out, int64_t rows, int64_t columns,
    int64_t depth, int threads) {
    const int64_t panels = parts(columns, COLUMNS), tiles = parts(rows, ROWS), words = parts(depth, Kind::HELD);
    if (rows * columns * words <= SERIAL) threads = 1;
    bool by_rows = rows >= BLOCK * threads || (panels < threads && panels < tiles);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
        int me = omp_get_thread_num(), all = omp_get_num_threads();
#else
        int me = 0, all = 1;
#endif
        alignas(64) static thread_local float copied[BLOCK * APART];
        int64_t top = by_rows ? tiles * me / all * ROWS : 0;
        int64_t bottom = by_rows ? std::min(rows, tiles * (me + 1) / all * ROWS) : rows;
        int64_t first = by_rows ? 0 : panels * me / all, last = by_rows ? panels : panels * (me + 1) / all;
        for (int64_t k = 0; k < words; k += DEPTH) {
            int64_t deep = std::min<int64_t>(DEPTH, words - k), begin = k * Kind::HELD;
            int64_t numbers = std::min(deep * Kind::HELD, depth - begin);
            Right part = {right + k * COLUMNS, COLUMNS * words, columns};
            for (int64_t i = top; i < bottom; i += BLOCK) {
                int64_t high = std::min<int64_t>(BLOCK, bottom - i);
                Left block = Kind::block({left + i * row + begin, row}, high, numbers, words <= DEPTH, copied);
                multiply<Kind>(block, high, deep, part, first, last, {out + i * columns, columns, bias, k > 0});
            }
        }
    }
}

}  // namespace

extern "C" int attnbench_panel() { return COLUMNS; }

// weight: columns x depth, contiguous. to: room for all panels.
extern "C" void attnbench_pack_float32(const float* weight, int64_t columns, int64_t depth, float* to, int threads) {
    pack<Singles>(weight, columns, depth, to, threads);
}

// left: rows x depth, so many numbers from one row to the next. right: packed. out: rows x columns, contiguous.
extern "C" void attnbench_product_float32(
    const float* left, int64_t row, const float* right, const float* bias, float* out, int64_t rows, int64_t columns,
    int64_t depth, int threads) {
    product<Singles>(left, row, right, bias, out, rows, columns, depth, threads);
}

#ifdef __AVX512BF16__
// The same with numbers rounded to bfloat16; not in the library where the processor does not multiply them.
extern "C" void attnbench_pack_bfloat16(const float* weight, int64_t columns, int64_t depth, float* to, int threads) {
    pack<Pairs>(weight, columns, depth, to, threads);
}

extern "C" void attnbench_product_bfloat16(
    const float* left, int64_t row, const float* right, const float* bias, float* out, int64_t rows, int64_t columns,
    int64_t depth, int threads) {
    product<Pairs>(left, row, right, bias, out, rows, columns, depth, threads);
}
#endif
