// One position of every row through a Transformer's decoder, without gradients, as Transformer.step in transformer.py
// defines it; products and attention are those of _products.cpp and _few.cpp.
//
// A layer falls into stages; an attention that is not compiled takes the place of its stage.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "_decoder.hpp"

namespace {

enum Stage { ASK, ATTEND, ASK_SOURCE, ATTEND_SOURCE, FINISH };

struct Norm {
    const float *weight, *bias;
    float epsilon;
};
struct Layer {
    int64_t width;
    int pre_norm;    // whether norms stand before sublayers, or after them
    Norm norms[3];   // of own attention, attention over the source, feed-forward
    Site own, source;
    Linear memory;   // keys, then values, of own attention
    Linear expand, contract;
};

struct Output {
    const Norm* norm;  // null: none
    Linear linear;
};

struct Step {
    int64_t rows, beams;         // `beams` rows a source
    int64_t filled;              // of the cache, before this step
    Rows keys, values;           // the cache,
    Held own, source;            // what of it is attended, and what of the source
    float* states;               // rows x width, which go in and come out,
    float *queries, *context;      // rows x width: queries, and what they receive
    float *room, *branch, *scores, *weights;  // rows x the widest inner, rows x width, and as `Attention` has them
};

// y = norm(x), one row each.
void normalise(const Norm& norm, const float* x, float* y, int64_t width) {
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += x[i];
    const float mean = sum / width;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const float scale = 1 / std::sqrt(squares / width + norm.epsilon);
    for (int64_t i = 0; i < width; ++i) y[i] = (x[i] - mean) * scale * norm.weight[i] + norm.bias[i];
}

struct Run {
    const Layer& layer;
    const Step& step;
    int threads;

    int64_t size() const { return step.rows * layer.width; }

    const float* through(const Linear& linear, const float* from, float* to) const {
        return linear(from, to, step.rows, threads);
    }

    // Adds `branch`, unless it is null, to the states; writes their norm, unless there is none, to `to`.
    void add_and_norm(const float* branch, const Norm* norm, float* to) const {
        const int64_t width = layer.width;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && size() > SERIAL)
        for (int64_t r = 0; r < step.rows; ++r) {
            float* x = step.states + r * width;
            if (branch)
                for (int64_t i = 0; i < width; ++i) x[i] += branch[r * width + i];
            if (norm) normalise(*norm, x, to + r * width, width);
        }
    }

    // What the next sublayer reads, once `branch` is added by the sublayer before it, if there was one.
    const float* next(const float* branch, int sublayer) const {
        const Norm* norms = layer.norms;
        if (layer.pre_norm) {
            add_and_norm(branch, sublayer < 3 ? norms + sublayer : nullptr, step.branch);
            return step.branch;
        }
        if (branch) add_and_norm(branch, norms + sublayer - 1, step.states);
        return step.states;
    }

    // Keys and values of the new position go to the cache.
    void append(const float* made) const {
        const int64_t width = layer.width, head = width / layer.own.heads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && size() > SERIAL)
        for (int64_t row = 0; row < step.rows * layer.own.heads; ++row) {
            const float* from = made + row / layer.own.heads * 2 * width + row % layer.own.heads * head;
            auto put = [&](const Rows& held, const float* what) {
                std::memcpy(held.row(row, layer.own.heads) + step.filled * held.position, what, head * sizeof(float));
            };
            put(step.keys, from);
            put(step.values, from + width);
        }
    }

    int attended(const Site& site, const Held& held, int64_t asking) const {
        return attend(site, held, step.queries, step.context, step.rows, asking, layer.width, step.scores, step.weights,
                      threads);
    }

    void ask(const Site& site, const float* states) const {
        const float* made = through(site.query, states, step.queries);
        if (made != step.queries) std::memcpy(step.queries, made, size() * sizeof(float));
    }

    // Not 0 where there is no memory.
    int operator()(int stage) const {
        switch (stage) {
            case ASK: {
                const float* states = next(nullptr, 0);
                append(through(layer.memory, states, step.room));
                ask(layer.own, states);
                return 0;
            }
            case ATTEND: return attended(layer.own, step.own, 1);
            case ASK_SOURCE: ask(layer.source, next(through(layer.own.context, step.context, step.room), 1)); return 0;
            case ATTEND_SOURCE: return attended(layer.source, step.source, step.beams);
            case FINISH: {
                const float* states = next(through(layer.source.context, step.context, step.room), 2);
                float* inner = step.room;
                through(layer.expand, states, inner);
                const int64_t count = step.rows * layer.expand.weight.outputs;
#pragma omp parallel for simd num_threads(threads) schedule(static) if (parallel : threads > 1 && count > SERIAL)
                for (int64_t i = 0; i < count; ++i) inner[i] = inner[i] < 0 ? 0 : inner[i];  // NaN stays
                next(through(layer.contract, inner, step.branch), 3);
                return 0;
            }
        }
        return 1;
    }
};

}  // namespace

// The embeddings of tokens that stand at position `at`. Not 0 where one of them has none.
extern "C" int attnbench_decoder_embed(
    const Embeddings* of, const int64_t* tokens, int64_t rows, int64_t at, float* states) {
    return (*of)(tokens, rows, at, states);
}

// See run_layers.
extern "C" int attnbench_decoder_layers(
    const Layer* layers, const Step* steps, int64_t count, int first, int last, int threads) {
    return run_layers<Run>(layers, steps, count, first, last, threads);
}

// logits: rows x words. room: rows x width.
extern "C" void attnbench_decoder_logits(
    const Output* output, const float* states, int64_t rows, float* room, float* logits, int threads) {
    const Packed& weight = output->linear.weight;
    const float* from = states;
    if (output->norm) {
        for (int64_t r = 0; r < rows; ++r)
            normalise(*output->norm, states + r * weight.inputs, room + r * weight.inputs, weight.inputs);
        from = room;
    }
    output->linear.product(from, weight.inputs, &weight, output->linear.bias, logits, rows, threads);
}
