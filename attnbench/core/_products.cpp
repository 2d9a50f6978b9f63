// Products of float32 matrices, out = left . right + bias. The right side, a transposed weight, was packed before in
// panels of COLUMNS columns, in each of them the numbers of a row side by side (Goto and van de Geijn 2008).
//
// Each number of `out` is a sum in the order of the depth, cut every DEPTH terms, whatever rows and threads there are.

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

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
constexpr int DEPTH = 512;           // of a block: a panel of it stays in the nearest cache but one
constexpr int BLOCK = ROWS * 12;     // rows of a block
constexpr int APART = DEPTH + 16;    // numbers from one copied row to the next: rows share no part of the nearest cache
constexpr int FEW = 3;               // rows that are taken with several panels at once
constexpr int64_t SERIAL = 1 << 17;  // multiplications up to here are one thread's work

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef float Loose __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));

int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

struct Left {
    const float* at;
    int64_t row;  // numbers from one to the next
};

// A block, or where rows are long a copy of it, whose rows lie near each other.
Left near(Left left, int64_t rows, int64_t depth, bool is_near, float* to) {
    if (is_near) return left;
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * APART, left.at + r * left.row, depth * sizeof(float));
    return {to, APART};
}

void pack_panel(const float* weight, int64_t depth, int64_t columns, float* to) {
    for (int64_t k = 0; k < depth; ++k)
        for (int j = 0; j < COLUMNS; ++j) to[k * COLUMNS + j] = j < columns ? weight[j * depth + k] : 0.0f;
}

struct Out {
    float* at;
    int64_t row;
    const float* bias;  // none: null
    bool begun;         // what `at` holds is added to
};

struct Ahead {
    const float* at;  // of what comes next; fetched meanwhile, since it may lie far from the processor
    int64_t step;     // numbers on for each column
};

struct Right {
    const float* at;
    int64_t far;  // numbers from one panel to the next
    int64_t columns;
    Right panel(int64_t p) const { return {at + p * far, far, columns - p * COLUMNS}; }
};

// R rows by P panels.
template <int R, int P>
void tile(int64_t depth, const Left& from, const Right& right, const Ahead& ahead, const Out& out) {
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
            Vector number = left[r * apart + k] - Vector{};
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) sums[r][n] += number * row[n];
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

template <int R = ROWS> Tile of_rows(int64_t rows) {
    if constexpr (R == 1) return tile<1, 1>;
    else return rows == R ? tile<R, 1> : of_rows<R - 1>(rows);
}

// A block of rows with the panels from `first` to `last`.
void multiply(Left left, int64_t rows, int64_t depth, Right right, int64_t first, int64_t last, Out out) {
    auto below = [&](int64_t r) { return Left{left.at + r * left.row, left.row}; };
    auto at = [&](int64_t r, int64_t p) {
        return Out{out.at + r * out.row + p * COLUMNS, out.row, out.bias ? out.bias + p * COLUMNS : nullptr, out.begun};
    };
    int64_t p = first;
    if (rows <= FEW) {  // several panels at once: so few sums would wait for themselves
        int several = rows == 1 ? 4 : 2;
        Tile wide = rows == 1 ? tile<1, 4> : rows == 2 ? tile<2, 2> : tile<3, 2>;
        for (; p + several <= last && (p + several) * COLUMNS <= right.columns; p += several)
            wide(depth, left, right.panel(p), {}, at(0, p));
    }
    int64_t whole = rows / ROWS * ROWS, step = parts(COLUMNS, parts(rows, ROWS));
    Tile rest = of_rows(rows - whole);
    for (; p < last; ++p) {
        Ahead ahead = {right.panel(std::min(p + 1, last - 1)).at, step};
        for (int64_t r = 0; r < whole; r += ROWS, ahead.at += depth * step)
            tile<ROWS, 1>(depth, below(r), right.panel(p), ahead, at(r, p));
        if (whole < rows) rest(depth, below(whole), right.panel(p), ahead, at(whole, p));
    }
}

}  // namespace

extern "C" int attnbench_panel() { return COLUMNS; }

// weight: columns x depth, contiguous. to: room for all panels.
extern "C" void attnbench_pack(const float* weight, int64_t columns, int64_t depth, float* to, int threads) {
    if (depth * columns <= SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t p = 0; p < parts(columns, COLUMNS); ++p)
        pack_panel(
            weight + p * COLUMNS * depth, depth, std::min<int64_t>(COLUMNS, columns - p * COLUMNS),
            to + p * COLUMNS * depth);
}

// left: rows x depth, so many numbers from one row to the next. right: packed. out: rows x columns, contiguous. Each
// thread makes its own rows where there are many of them, or too few panels, else its own columns.
extern "C" void attnbench_product(
    const float* left, int64_t row, const float* right, const float* bias, float* out, int64_t rows, int64_t columns,
    int64_t depth, int threads) {
    int64_t panels = parts(columns, COLUMNS), tiles = parts(rows, ROWS);
    if (rows * columns * depth <= SERIAL) threads = 1;
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
        for (int64_t k = 0; k < depth; k += DEPTH) {
            int64_t deep = std::min<int64_t>(DEPTH, depth - k);
            Right part = {right + k * COLUMNS, COLUMNS * depth, columns};
            for (int64_t i = top; i < bottom; i += BLOCK) {
                int64_t high = std::min<int64_t>(BLOCK, bottom - i);
                Left block = near({left + i * row + k, row}, high, deep, depth <= DEPTH, copied);
                multiply(block, high, deep, part, first, last, {out + i * columns, columns, bias, k > 0});
            }
        }
    }
}
