// Tokens of a ragged batch to their places in a padded one, head by head, and back.

#include <cstdint>
#include <cstring>

extern "C" {

struct Padded {  // [B, H, S, width]; strides and width in bytes, those of one head and position lie side by side
    char* data;
    int64_t row, head, position, rows, heads, positions, width;
};

// place[b * S + s]: which token stands there; -1: none, and zeros are written
void attnbench_pad(const char* tokens, int64_t stride, const int64_t* place, const Padded* padded, int threads) {
    const Padded p = *padded;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) collapse(2)
    for (int64_t b = 0; b < p.rows; ++b) {
        for (int64_t h = 0; h < p.heads; ++h) {
            char* to = p.data + b * p.row + h * p.head;
            for (int64_t s = 0; s < p.positions; ++s, to += p.position) {
                const int64_t token = place[b * p.positions + s];
                if (token < 0) {
                    std::memset(to, 0, p.width);
                } else {
                    std::memcpy(to, tokens + token * stride + h * p.width, p.width);
                }
            }
        }
    }
}

// at: where each token stands, as b * S + s. stride: bytes from one token of the output to the next
void attnbench_take(
    const Padded* padded, const int64_t* at, int64_t count, char* tokens, int64_t stride, int threads
) {
    const Padded p = *padded;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t token = 0; token < count; ++token) {
        const char* from = p.data + at[token] / p.positions * p.row + at[token] % p.positions * p.position;
        char* to = tokens + token * stride;
        for (int64_t h = 0; h < p.heads; ++h) std::memcpy(to + h * p.width, from + h * p.head, p.width);
    }
}
}
