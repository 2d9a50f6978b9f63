// One position of every row through a Transformer's decoder, without gradients, as Transformer.step in transformer.py
// defines it; products and attention are those of _products.cpp and _few.cpp.
//
// A layer falls into stages; an attention that is not compiled takes the place of its stage.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../attention/backends/_few.hpp"
#include "../core/_products.hpp"

namespace {

constexpr int64_t SERIAL = 1 << 14;  // numbers up to here are one thread's work

enum Stage { ASK, ATTEND, ASK_SOURCE, ATTEND_SOURCE, FINISH };

struct Linear {
    Product product;  // null: what is given goes on as it is
    Packed weight;
    const float* bias;  // may be null
};
struct Norm {
    const float *weight, *bias;
    float epsilon;
};
struct Site {
    Linear query, context;
    Attend attend;
    Forward forward;
    Transform transform;
    float scale;
};
struct Layer {
    int64_t width, heads;
    int before;      // whether norms stand before sublayers, or after them
    Norm norms[3];   // of own attention, attention over the source, feed-forward
    Site own, source;
    Linear memory;   // keys, then values, of own attention
    Linear expand, contract;
};

struct Words {  // what tokens are embedded with; so many numbers from one row of a table to the next
    const float* table;
    int64_t count, row;
    float scale;
    const float* positions;
    int64_t position, width;
};
struct Output {
    const Norm* norm;  // null: none
    Linear linear;
};

struct Step {
    int64_t rows, beams;         // `beams` rows a source
    int64_t filled;              // of the cache, before this step
    Rows keys, values;           // the cache,
    Rows own_keys, own_values;   // and what of it is attended,
    int64_t own;                 // so many positions
    Rows source_keys, source_values;
    int64_t positions;           // of the source
    Strided valid;               // of the source
    float* states;               // rows x width, which go in and come out,
    float *asked, *context;      // rows x width: queries, and what they receive
    float *room, *more, *scores, *weights;  // rows x the widest inner, rows x width, and as `Attention` has them
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

    // Where they go, unless they go on as they are.
    const float* through(const Linear& linear, const float* from, float* to) const {
        if (!linear.product) return from;
        linear.product(from, linear.weight.inputs, &linear.weight, linear.bias, to, step.rows, threads);
        return to;
    }

    // Adds `more`, unless it is null, to the states; writes their norm, unless there is none, to `to`.
    void settle(const float* more, const Norm* norm, float* to) const {
        const int64_t width = layer.width;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && size() > SERIAL)
        for (int64_t r = 0; r < step.rows; ++r) {
            float* x = step.states + r * width;
            if (more)
                for (int64_t i = 0; i < width; ++i) x[i] += more[r * width + i];
            if (norm) normalise(*norm, x, to + r * width, width);
        }
    }

    // What the next sublayer reads, once `more` is added by the sublayer before it, if there was one.
    const float* next(const float* more, int sublayer) const {
        const Norm* norms = layer.norms;
        if (layer.before) return settle(more, sublayer < 3 ? norms + sublayer : nullptr, step.more), step.more;
        if (more) settle(more, norms + sublayer - 1, step.states);
        return step.states;
    }

    // Keys and values of the new position go to the cache.
    void append(const float* made) const {
        const int64_t width = layer.width, head = width / layer.heads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && size() > SERIAL)
        for (int64_t row = 0; row < step.rows * layer.heads; ++row) {
            const float* from = made + row / layer.heads * 2 * width + row % layer.heads * head;
            auto put = [&](const Rows& held, const float* what) {
                std::memcpy(held.row(row, layer.heads) + step.filled * held.position, what, head * sizeof(float));
            };
            put(step.keys, from);
            put(step.values, from + width);
        }
    }

    int attend(const Site& site, const Rows& keys, const Rows& values, int64_t count, int64_t queries,
               const Strided& valid) const {
        const int64_t width = layer.width, head = width / layer.heads;
        const Rows asked = {step.asked, queries * width, head, width}, out = {step.context, queries * width, head, width};
        const Sizes sizes = {step.rows / queries * layer.heads, layer.heads, queries, count, head};
        const Attention given = {asked, keys, values, out, sizes, head, site.scale, site.transform, valid, site.forward,
                                 step.scores, step.weights};
        return site.attend(&given, threads);
    }

    void ask(const Site& site, const float* states) const {
        const float* asked = through(site.query, states, step.asked);
        if (asked != step.asked) std::memcpy(step.asked, asked, size() * sizeof(float));
    }

    int operator()(int stage) const {
        switch (stage) {
            case ASK: {
                const float* states = next(nullptr, 0);
                append(through(layer.memory, states, step.room));
                ask(layer.own, states);
                return 0;
            }
            case ATTEND: return attend(layer.own, step.own_keys, step.own_values, step.own, 1, {});
            case ASK_SOURCE: ask(layer.source, next(through(layer.own.context, step.context, step.room), 1)); return 0;
            case ATTEND_SOURCE:
                return attend(
                    layer.source, step.source_keys, step.source_values, step.positions, step.beams, step.valid);
            default: {
                const float* states = next(through(layer.source.context, step.context, step.room), 2);
                float* inner = step.room;
                through(layer.expand, states, inner);
                const int64_t count = step.rows * layer.expand.weight.outputs;
#pragma omp parallel for simd num_threads(threads) schedule(static) if (parallel : threads > 1 && count > SERIAL)
                for (int64_t i = 0; i < count; ++i) inner[i] = inner[i] < 0 ? 0 : inner[i];  // NaN stays
                next(through(layer.contract, inner, step.more), 3);
                return 0;
            }
        }
    }
};

}  // namespace

// The embeddings of tokens that stand at position `at`. Not 0 where one of them has none.
extern "C" int attnbench_decoder_embed(const Words* words, const int64_t* tokens, int64_t rows, int64_t at, float* states) {
    const float* position = words->positions + at * words->position;
    for (int64_t r = 0; r < rows; ++r) {
        if (tokens[r] < 0 || tokens[r] >= words->count) return 1;
        const float* from = words->table + tokens[r] * words->row;
        float* to = states + r * words->width;
        for (int64_t i = 0; i < words->width; ++i) to[i] = from[i] * words->scale + position[i];
    }
    return 0;
}

// The stages from `first` to `last` of so many layers, one after the other. Not 0 where there is no memory.
extern "C" int attnbench_decoder_layers(
    const Layer* layers, const Step* steps, int64_t count, int first, int last, int threads) {
    for (int64_t i = 0; i < count; ++i) {
        const Run run = {layers[i], steps[i], threads};
        for (int stage = first; stage <= last; ++stage)
            if (const int failed = run(stage)) return failed;
    }
    return 0;
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
