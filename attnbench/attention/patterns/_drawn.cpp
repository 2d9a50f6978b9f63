// What rows of a drawn pattern draw, number for number as _drawn.py defines it.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

namespace {

constexpr int64_t SERIAL = 1 << 13;  // keys up to here are one thread's work

struct Drawing {
    const int64_t *ends, *heads, *positions;  // ends: of the keys of each row; null: each position's own
    int64_t rows, n_heads, queries, n, start;
    int64_t from, to, tokens;  // keys that are not drawn: `from` to `to` away from a position, and the first ones
};

struct Open {  // what a position draws from: `count` keys, `near` of them from `first` on, the others from `after` on
    int64_t first, near, after, count;
};

Open open(const Drawing& d, int64_t row, int64_t at) {
    const int64_t end = d.ends ? d.ends[row] : at + 1, first = std::min(end, d.tokens);
    const int64_t before = std::min(std::max(at + d.from, first), end);
    const int64_t after = std::min(std::max(at + d.to + 1, first), end);
    const bool draws = !d.ends || at >= d.tokens;
    return {first, before - first, after, draws ? before - first + end - after : 0};
}

uint32_t mixed(uint32_t x) {  // lowbias32 of Wellons 2018
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// last: of each key, the turn of this thread's work in which it was drawn last; nothing is cleared between positions
void draw(const Drawing& d, const Open& o, uint32_t hashed, int64_t turns, int64_t serial, int64_t* last, int64_t* keys,
          bool* there) {
    const uint32_t fewest = uint32_t(std::max<int64_t>(o.count - d.n, 0));
    for (int64_t turn = 0; turn < d.n; ++turn) {
        int64_t one = 0;
        if (turn < turns) {
            one = mixed(hashed + uint32_t(turn)) % (fewest + uint32_t(turn) + 1);
            if (last[one] == serial) one = fewest + turn;
            last[one] = serial;
        }
        keys[turn] = one + (one < o.near ? o.first : o.after - o.near);
        there[turn] = turn < o.count;
    }
}

}  // namespace

// keys, there: rows x heads x queries x n, contiguous. Not 0 where there is no memory to draw with.
extern "C" int attnbench_draw(const Drawing* drawing, int64_t* keys, bool* there, int threads) {
    const Drawing d = *drawing;
    int64_t most = 0;  // keys that any position draws from
    for (int64_t row = 0; row < (d.ends ? d.rows : 1); ++row)
        for (int64_t q = 0; q < d.queries; ++q) most = std::max(most, open(d, row, d.positions[q]).count);
    const int64_t turns = std::min(d.n, most);
    if (d.rows * d.n_heads * d.queries * d.n <= SERIAL) threads = 1;
    bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::unique_ptr<int64_t[]> last(new (std::nothrow) int64_t[most + 1]());
        int64_t serial = 0;
        if (!last) {
#pragma omp atomic write
            failed = true;
        }
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < d.rows; ++row) {
            for (int64_t head = 0; head < d.n_heads; ++head) {
                if (!last) continue;
                const uint32_t hashed = mixed(uint32_t(d.heads[head] + d.start));
                for (int64_t q = 0; q < d.queries; ++q) {
                    const int64_t at = d.positions[q], place = ((row * d.n_heads + head) * d.queries + q) * d.n;
                    draw(d, open(d, row, at), mixed(hashed + uint32_t(at)), turns, ++serial, last.get(), keys + place,
                         there + place);
                }
            }
        }
    }
    return failed;
}
