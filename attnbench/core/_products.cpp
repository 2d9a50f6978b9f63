// Products of matrices, out = left . right + bias, in float32 or, where the processor multiplies them, of bfloat16
// summed up in float32, or of whole numbers of 8 bits summed up exactly. The right side, a transposed weight, was
// packed before in panels of COLUMNS columns, in each of them the words of a row side by side (Goto and van de Geijn
// 2008). A word is one number of float32, or two of bfloat16 or four of 8 bits that follow each other down the depth.
//
// Each number of `out` is a sum in the order of the depth, cut every DEPTH words, whatever rows and threads there are.

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "_bfloat16.hpp"
#include "_products.hpp"

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define ATTNBENCH_WHOLE  // a processor that multiplies whole numbers of 8 bits
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
constexpr int DEPTH = 512;           // words of a block: a panel of it stays in the nearest cache but one
constexpr int BLOCK = ROWS * 12;     // rows of a block
constexpr int APART = DEPTH + 16;    // words from one copied row to the next: rows share no part of the nearest cache
constexpr float LARGEST = 127.0f;    // whole number
constexpr float LEAST = 1e-30f;      // rows of no number larger than this count as zeros, if they are rounded
constexpr int FEW = 3;               // rows that are taken with several panels at once
constexpr int64_t SERIAL = 1 << 17;  // multiplied words up to here are one thread's work

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef float Loose __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));

int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

struct Left {
    const float* at;
    int64_t row;         // words from one to the next
    const float* steps;  // what 1 is worth in each row of whole numbers
};

// What is added to sums, and makes numbers of them.
struct Ending {
    bool begun, ended;     // sums go on from those of the words before; none come after
    const float* bias;     // none: null
    const float* steps;    // of whole numbers: what 1 is worth in each column,
    const int32_t* begin;  // and what sums begin with
};

// Of a block's rows.
struct Steps {
    float worth[BLOCK], inverse[BLOCK];
};

Vector load(const void* from, int64_t count = WIDTH) {
    if (count >= WIDTH) return *(const Loose*)from;
    Vector to = {};
    std::memcpy(&to, from, count * sizeof(float));
    return to;
}

// Words whose products are summed up in float32.
struct Floats {
    static constexpr int TILE = ROWS;
    static void measure(Left, int64_t, int64_t, Steps&) {}
    // What is written for a sum of the columns from j on, of which there are `count`; at `held` lies what is there.
    static Vector finish(Vector sum, const float* held, const Left&, int, const Ending& end, int64_t j, int64_t count) {
        return end.begun ? sum + load(held, count) : end.bias ? sum + load(end.bias + j, count) : sum;
    }
};

// Words of one number.
struct Singles : Floats {
    static constexpr int HELD = 1;
    static void pack(float number, int, float& word) { word = number; }
    static Vector spread(float word) { return word - Vector{}; }
    static void add(Vector& sum, Vector left, Vector right) { sum += left * right; }
    // A block, or where rows are long a copy of it, whose rows lie near each other.
    static Left block(Left left, int64_t rows, int64_t numbers, bool is_near, const Steps&, float* to) {
        if (is_near) return left;
        for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * APART, left.at + r * left.row, numbers * sizeof(float));
        return {to, APART, nullptr};
    }
};

#ifdef __AVX512BF16__
// Up to a vector of numbers, then zeros.
inline __m512 part(const float* from, int64_t count) {
    return _mm512_maskz_loadu_ps((__mmask16)(count >= WIDTH ? 0xffff : count > 0 ? (1 << count) - 1 : 0), from);
}

// Words of two numbers of bfloat16, the first one lower. What is too small for a normal number counts as 0.
struct Pairs : Floats {
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
    static Left block(Left left, int64_t rows, int64_t numbers, bool, const Steps&, float* to) {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < numbers; k += 2 * WIDTH) {
                const float* from = left.at + r * left.row + k;
                __m512 low = part(from, numbers - k), high = part(from + WIDTH, numbers - k - WIDTH);
                _mm512_storeu_ps(to + r * APART + k / 2, (__m512)_mm512_cvtne2ps_pbh(high, low));
            }
        return {to, APART, nullptr};
    }
};
#endif

#ifdef ATTNBENCH_WHOLE
typedef int32_t Whole __attribute__((vector_size(WIDTH * sizeof(int32_t))));
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));

// Words of four whole numbers of 8 bits, as core/quantization.py has them.
struct Quads {
    static constexpr int HELD = 4;
#ifdef __AVX512VNNI__
    // The processor multiplies unsigned ones by signed ones: those of the left side are raised, which `Ending::begin`
    // takes away.
    static constexpr int TILE = ROWS, RAISED = 128;
    static void add(Vector& sum, Vector left, Vector right) {
        sum = (Vector)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
    }
    static Whole rounded(Vector x) { return (Whole)_mm512_cvtps_epi32((__m512)x); }
#else
    // Two products are summed up in 16 bits, where those of numbers up to 127 have room. A sign goes to the other
    // factor.
    static constexpr int TILE = 4, RAISED = 0;
    static void add(Vector& sum, Vector left, Vector right) {
        __m256i size = _mm256_abs_epi8((__m256i)right), other = _mm256_sign_epi8((__m256i)left, (__m256i)right);
        __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(size, other), _mm256_set1_epi16(1));
        sum = (Vector)((Whole)sum + (Whole)sums);
    }
    static Whole rounded(Vector x) { return (Whole)_mm256_cvtps_epi32((__m256)x); }
#endif
    static Vector spread(float word) {  // through whole numbers: arithmetic may change what is no number
        int32_t bits;
        std::memcpy(&bits, &word, sizeof bits);
        return (Vector)(bits - Whole{});
    }
    static void pack(float number, int place, float& word) {
        int8_t whole = number == number ? (int8_t)number : 0;  // of a row whose step is no number
        std::memcpy(reinterpret_cast<char*>(&word) + place, &whole, 1);
    }
    static void measure(Left left, int64_t rows, int64_t depth, Steps& steps) {
        for (int64_t r = 0; r < rows; ++r) {
            Whole most = {};  // as bits, sizes are in order, and what is no number comes last
            for (int64_t k = 0; k < depth; k += WIDTH) {
                Whole bits = (Whole)load(left.at + r * left.row + k, depth - k) & 0x7fffffff;
                most = bits > most ? bits : most;
            }
            int32_t bits = 0;
            for (int i = 0; i < WIDTH; ++i) bits = std::max(bits, most[i]);
            float largest;
            std::memcpy(&largest, &bits, sizeof largest);
            steps.inverse[r] = largest < LEAST ? 0.0f : LARGEST / largest;
            steps.worth[r] = bits < 0x7f800000 ? largest / LARGEST : __builtin_nanf("");
        }
    }
    // A copy of a block, rounded.
    static Left block(Left left, int64_t rows, int64_t numbers, bool, const Steps& steps, float* to) {
        for (int64_t r = 0; r < rows; ++r) {
            const float* from = left.at + r * left.row;
            char* bytes = reinterpret_cast<char*>(to + r * APART);
            for (int64_t k = 0; k < numbers; k += WIDTH) {
                Whole whole = rounded(load(from + k, numbers - k) * steps.inverse[r]) + RAISED;
                Bytes narrow = __builtin_convertvector(whole, Bytes);
                std::memcpy(bytes + k, &narrow, sizeof narrow);
            }
        }
        return {to, APART, steps.worth};
    }
    static Vector finish(
        Vector sum, const float* held, const Left& left, int r, const Ending& end, int64_t j, int64_t count) {
        Whole whole = (Whole)sum;
        if (end.begun) whole += (Whole)load(held, count);
        else if (RAISED) whole += (Whole)load(end.begin + j, count);
        if (!end.ended) return (Vector)whole;
        Vector found = __builtin_convertvector(whole, Vector) * left.steps[r] * load(end.steps + j, count);
        return end.bias ? found + load(end.bias + j, count) : found;
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
    int64_t column;  // the first one
    const Ending* end;
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
__attribute__((noinline)) void tile(
    int64_t depth, const Left& from, const Right& right, const Ahead& ahead, const Out& out) {
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
        // else the whole weight is one stream
        if constexpr (P == 1) __builtin_prefetch(ahead.at + k * ahead.step, 0, 3);
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
                float* to = out.at + r * out.row + n * WIDTH;
                *(Loose*)to = Kind::finish(sums[r][n], to, from, r, *out.end, out.column + n * WIDTH, WIDTH);
            }
        return;
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n * WIDTH < right.columns; ++n) {
            float* to = out.at + r * out.row + n * WIDTH;
            int64_t count = std::min<int64_t>(WIDTH, right.columns - n * WIDTH);
            Vector found = Kind::finish(sums[r][n], to, from, r, *out.end, out.column + n * WIDTH, count);
            std::memcpy(to, &found, count * sizeof(float));
        }
}

typedef void (*Tile)(int64_t, const Left&, const Right&, const Ahead&, const Out&);

template <class Kind, int R = Kind::TILE> Tile of_rows(int64_t rows) {
    if constexpr (R == 1) return tile<Kind, 1, 1>;
    else return rows == R ? tile<Kind, R, 1> : of_rows<Kind, R - 1>(rows);
}

// A block of rows with the panels from `first` to `last`.
template <class Kind>
void multiply(Left left, int64_t rows, int64_t depth, Right right, int64_t first, int64_t last, Out out) {
    auto below = [&](int64_t r) {
        return Left{left.at + r * left.row, left.row, left.steps ? left.steps + r : nullptr};
    };
    auto at = [&](int64_t r, int64_t p) {
        return Out{out.at + r * out.row + p * COLUMNS, out.row, p * COLUMNS, out.end};
    };
    int64_t p = first;
    if (rows <= FEW) {  // several panels at once: so few sums would wait for themselves
        int several = rows == 1 ? 4 : 2;
        Tile wide = rows == 1 ? tile<Kind, 1, 4> : rows == 2 ? tile<Kind, 2, 2> : tile<Kind, 3, 2>;
        for (; p + several <= last && (p + several) * COLUMNS <= right.columns; p += several)
            wide(depth, left, right.panel(p), {}, at(0, p));
    }
    constexpr int TILE = Kind::TILE;
    int64_t whole = rows / TILE * TILE, step = parts(COLUMNS, parts(rows, TILE));
    Tile rest = of_rows<Kind>(rows - whole);
    for (; p < last; ++p) {
        Ahead ahead = {right.panel(std::min(p + 1, last - 1)).at, step};
        for (int64_t r = 0; r < whole; r += TILE, ahead.at += depth * step)
            tile<Kind, TILE, 1>(depth, below(r), right.panel(p), ahead, at(r, p));
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
    const float* left, int64_t row, const Packed& weight, const float* bias, float* out, int64_t rows, int threads) {
    constexpr int TILE = Kind::TILE;
    const int64_t columns = weight.outputs, depth = weight.inputs;
    const int64_t panels = parts(columns, COLUMNS), tiles = parts(rows, TILE), words = parts(depth, Kind::HELD);
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
        Steps steps;
        int64_t top = by_rows ? tiles * me / all * TILE : 0;
        int64_t bottom = by_rows ? std::min(rows, tiles * (me + 1) / all * TILE) : rows;
        int64_t first = by_rows ? 0 : panels * me / all, last = by_rows ? panels : panels * (me + 1) / all;
        for (int64_t k = 0; k < words; k += DEPTH) {
            int64_t deep = std::min<int64_t>(DEPTH, words - k), begin = k * Kind::HELD;
            int64_t numbers = std::min(deep * Kind::HELD, depth - begin);
            Right part = {weight.words + k * COLUMNS, COLUMNS * words, columns};
            Ending end = {k > 0, k + deep == words, bias, weight.steps, weight.begin};
            for (int64_t i = top; i < bottom; i += BLOCK) {
                int64_t high = std::min<int64_t>(BLOCK, bottom - i);
                Kind::measure({left + i * row, row, nullptr}, high, depth, steps);
                Left from = {left + i * row + begin, row, nullptr};
                Left block = Kind::block(from, high, numbers, words <= DEPTH, steps, copied);
                multiply<Kind>(block, high, deep, part, first, last, {out + i * columns, columns, 0, &end});
            }
        }
    }
}

}  // namespace

extern "C" int attnbench_panel() { return COLUMNS; }

// pack: weight is columns x depth, contiguous; of whole numbers from -127 to 127. to: room for all panels.
// product: see `Product`.
#define PRODUCTS(NAME, KIND)                                                                                           \
    extern "C" void attnbench_pack_##NAME(                                                                             \
        const float* weight, int64_t columns, int64_t depth, float* to, int threads) {                                 \
        pack<KIND>(weight, columns, depth, to, threads);                                                               \
    }                                                                                                                  \
    extern "C" void attnbench_product_##NAME(                                                                          \
        const float* left, int64_t row, const Packed* right, const float* bias, float* out, int64_t rows,              \
        int threads) {                                                                                                 \
        product<KIND>(left, row, *right, bias, out, rows, threads);                                                    \
    }

PRODUCTS(float32, Singles)
// The others are not in the library where the processor does not multiply them.
#ifdef __AVX512BF16__
PRODUCTS(bfloat16, Pairs)
#endif
#ifdef ATTNBENCH_WHOLE
PRODUCTS(int8, Quads)

// What is added to whole numbers of the left side.
extern "C" int attnbench_raised() { return Quads::RAISED; }
#endif
