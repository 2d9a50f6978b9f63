// Rows of a tensor to other rows, in place: through a buffer that stays in the processor's cache, a stretch of the rows
// at a time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t BUFFER = 1 << 19;  // bytes, a thread

struct Held {  // strides in bytes; those of one position lie side by side
    char* data;
    int64_t row, head, position, heads, positions, width;
};

}  // namespace

extern "C" void attnbench_relocate(const Held* held, const int64_t* into, const int64_t* from, int64_t moved, int threads) {
    const Held h = *held;
    const int64_t stretch = std::max<int64_t>(1, BUFFER / std::max<int64_t>(1, moved * h.width));
    const int64_t stretches = (h.positions + stretch - 1) / stretch;
    const bool whole = h.position == h.width;  // positions lie side by side, too
    if (moved * h.heads * h.positions * h.width <= BUFFER) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<char> buffer(moved * std::min(stretch, h.positions) * h.width);
#pragma omp for schedule(static)
        for (int64_t part = 0; part < h.heads * stretches; ++part) {
            const int64_t start = part % stretches * stretch, count = std::min(stretch, h.positions - start);
            char* at = h.data + part / stretches * h.head + start * h.position;
            char* kept = buffer.data();
            auto each = [&](const int64_t* rows, auto copy) {
                for (int64_t i = 0; i < moved; ++i) {
                    char* row = at + rows[i] * h.row;
                    char* place = kept + i * count * h.width;
                    if (whole) {
                        copy(row, place, count * h.width);
                    } else {
                        for (int64_t p = 0; p < count; ++p) copy(row + p * h.position, place + p * h.width, h.width);
                    }
                }
            };
            each(from, [](char* row, char* place, int64_t size) { std::memcpy(place, row, size); });
            each(into, [](char* row, char* place, int64_t size) { std::memcpy(row, place, size); });
        }
    }
}
