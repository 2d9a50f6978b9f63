// One position of every row through a ConvS2S's decoder, without gradients, as ConvS2S.step in convs2s.py defines it;
// products and attention are those of _products.cpp and _few.cpp.
//
// A layer falls into stages; an attention that is not compiled takes the place of its stage.

#include <cstdint>
#include <cstring>

#include "../core/_power.hpp"
#include "_decoder.hpp"

namespace {

enum Stage { CONVOLVE, ATTEND, FINISH };

struct Layer {
    int64_t width, embedding, kernel;
    Linear window;         // over `kernel` positions, one after the other, twice the width
    Linear query, context;
    Site site;
    int averages;          // whether a context is a mean
    float half;            // what a sum of two terms is multiplied by
};

struct Step {
    int64_t rows, beams;   // `beams` rows a source
    const float* before;   // rows x kernel - 1 x width, of which rows may lie apart:
    int64_t row;           // so many numbers from one to the next
    Held source;           // what is attended
    const float* scale;    // of a context that is a mean; one a source
    const float* embedded; // rows x embedding
    float* window;         // rows x kernel x width, what the layer sees; written here
    float* states;         // rows x width, which go in and come out,
    float *gated, *both;   // rows x width, rows x 2 width
    float *asked, *queries, *context;     // rows x embedding, twice, and rows x the width of contexts
    float *told, *scores, *weights;       // as `context`, and as `Attention` has them
};

struct Run {
    const Layer& layer;
    const Step& step;
    int threads;

    // `act` of each row, in all threads where there is much to do.
    template <class Act>
    void each_row(int64_t width, const Act& act) const {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && step.rows * width > SERIAL)
        for (int64_t r = 0; r < step.rows; ++r) act(r);
    }

    void see() const {
        const int64_t width = layer.width, known = (layer.kernel - 1) * width;
        each_row(known + width, [&](int64_t r) {
            float* to = step.window + r * (known + width);
            if (known) std::memcpy(to, step.before + r * step.row, known * sizeof(float));
            std::memcpy(to + known, step.states + r * width, width * sizeof(float));
        });
    }

    void convolve() const {
        const int64_t width = layer.width;
        layer.window(step.window, step.both, step.rows, threads);
        each_row(2 * width, [&](int64_t r) {
            const float* both = step.both + r * 2 * width;
            float* to = step.gated + r * width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) to[i] = both[i] * sigmoid(both[width + i]);
        });
    }

    void ask() const {
        const int64_t width = layer.embedding;
        float* asked = layer.site.query.product ? step.asked : step.queries;
        layer.query(step.gated, asked, step.rows, threads);
        each_row(width, [&](int64_t r) {
            const float* known = step.embedded + r * width;
            float* to = asked + r * width;
            for (int64_t i = 0; i < width; ++i) to[i] = (to[i] + known[i]) * layer.half;
        });
        layer.site.query(asked, step.queries, step.rows, threads);
    }

    void finish() const {
        const int64_t width = layer.width, wide = layer.context.weight.inputs;
        const float* told = layer.site.context(step.context, step.told, step.rows, threads);
        if (layer.averages) {
            each_row(wide, [&](int64_t r) {
                const float scale = step.scale[r / step.beams];
                for (int64_t i = 0; i < wide; ++i) step.told[r * wide + i] = told[r * wide + i] * scale;
            });
            told = step.told;
        }
        layer.context(told, step.both, step.rows, threads);
        each_row(width, [&](int64_t r) {
            const float *received = step.both + r * width, *gated = step.gated + r * width;
            float* to = step.states + r * width;
            for (int64_t i = 0; i < width; ++i) to[i] = ((received[i] + gated[i]) * layer.half + to[i]) * layer.half;
        });
    }

    // Not 0 where there is no memory.
    int operator()(int stage) const {
        switch (stage) {
            case CONVOLVE: see(), convolve(), ask(); return 0;
            case ATTEND:
                return attend(layer.site, step.source, step.queries, step.context, step.rows, step.beams,
                              layer.embedding, step.scores, step.weights, threads);
            case FINISH: finish(); return 0;
        }
        return 1;
    }
};

}  // namespace

// What the first layer is given for tokens that stand at position `at`. Not 0 where one of them has no embedding.
extern "C" int attnbench_convs2s_embed(
    const Embeddings* of, const Linear* expand, const int64_t* tokens, int64_t rows, int64_t at, float* embedded,
    float* states, int threads) {
    if ((*of)(tokens, rows, at, embedded)) return 1;
    (*expand)(embedded, states, rows, threads);
    return 0;
}

// See run_layers.
extern "C" int attnbench_convs2s_layers(
    const Layer* layers, const Step* steps, int64_t count, int first, int last, int threads) {
    return run_layers<Run>(layers, steps, count, first, last, threads);
}

// logits: rows x words. hidden: rows x embedding, written here.
extern "C" void attnbench_convs2s_logits(
    const Linear* contract, const Linear* output, const float* states, int64_t rows, float* hidden, float* logits,
    int threads) {
    (*contract)(states, hidden, rows, threads);
    (*output)(hidden, logits, rows, threads);
}
