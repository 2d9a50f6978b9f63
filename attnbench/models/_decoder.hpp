// What compiled steps of decoders share: linear layers, embeddings, and attention over what is held.

#pragma once

#include <cstdint>

#include "../attention/backends/_few.hpp"
#include "../core/_products.hpp"

namespace {

constexpr int64_t SERIAL = 1 << 14;  // numbers up to here are one thread's work

struct Linear {
    Product product;  // null: what is given goes on as it is
    Packed weight;
    const float* bias;  // may be null

    // Where the products go, unless what is given goes on.
    const float* operator()(const float* from, float* to, int64_t rows, int threads) const {
        if (!product) return from;
        product(from, weight.inputs, &weight, bias, to, rows, threads);
        return to;
    }
};
struct Site {
    Linear query, context;
    int64_t heads;
    Attend attend;
    Forward forward;
    Transform transform;
    float scale;
};
struct Held {  // what is attended
    Rows keys, values;
    int64_t positions;
    Listed listed;   // which they are
    Strided keep;    // and which of them whatever their scores
    Strided valid;   // and whether they hold anything
};

// queries, out: rows x width, `asking` of them side by side share what is held. Not 0 where there is no memory.
int attend(const Site& site, const Held& held, float* queries, float* out, int64_t rows, int64_t asking, int64_t width,
           float* scores, float* weights, int threads) {
    const int64_t heads = site.heads, head = width / heads;
    const Rows asked = {queries, asking * width, head, width}, received = {out, asking * width, head, width};
    const Sizes sizes = {rows / asking * heads, heads, asking, held.positions, head};
    Transform transform = site.transform;
    transform.keep = held.keep;
    const Attention given = {asked,      held.keys, held.values, received,    sizes,        head,   site.scale,
                             transform, held.valid, held.listed, site.forward, scores, weights};
    return site.attend(&given, threads);
}

// The stages from `first` to `last` of so many layers, one after the other. Not 0 where there is no memory.
template <class Run, class Layer, class Step>
int run_layers(const Layer* layers, const Step* steps, int64_t count, int first, int last, int threads) {
    for (int64_t i = 0; i < count; ++i) {
        const Run run = {layers[i], steps[i], threads};
        for (int stage = first; stage <= last; ++stage)
            if (const int failed = run(stage)) return failed;
    }
    return 0;
}

struct Embeddings {  // what tokens are embedded with; so many numbers from one row of a table to the next
    const float* table;
    int64_t count, row;
    float scale;
    const float* positions;
    int64_t position, width;

    // Of tokens that stand at position `at`. Not 0 where one of them has none.
    int operator()(const int64_t* tokens, int64_t rows, int64_t at, float* out) const {
        const float* there = positions + at * position;
        for (int64_t r = 0; r < rows; ++r) {
            if (tokens[r] < 0 || tokens[r] >= count) return 1;
            const float* from = table + tokens[r] * row;
            float* to = out + r * width;
            for (int64_t i = 0; i < width; ++i) to[i] = from[i] * scale + there[i];
        }
        return 0;
    }
};

}  // namespace
