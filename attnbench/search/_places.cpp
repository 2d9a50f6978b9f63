// One step of a beam: the places of every source after one more token, as places.py defines it in torch operations.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

constexpr double NOTHING = -std::numeric_limits<double>::infinity();
constexpr int64_t SERIAL = 8;  // sources up to here are one thread's work

// n sources of `size` places, with room for `capacity` tokens each; see places.py.
struct Live {
    int64_t n, size, capacity;
    const int64_t* source;
    double* log_prob;
    int64_t *tokens, *taken;
    int16_t* lineage;
};
struct Ended {  // sources of the batch x size
    double *score, *log_prob;
    int64_t *length, *tokens;
};
struct Found {  // the likeliest tokens of each place, or of each source where its places are the same
    const float* log_prob;
    const int64_t* ids;
    int64_t places, choices;
};
struct Limits {
    const int64_t* room;    // of the batch
    const double* longest;  // the same: the length penalty of the longest output
    double divisor;         // the length penalty of this step
    int64_t step, eos, n_best;
};

struct Source {
    const Live& live;
    const Ended& ended;
    const Found& found;
    const Limits& limits;
    int64_t at;  // its row among the living

    int64_t size() const { return live.size; }
    double* log_prob() const { return live.log_prob + at * size(); }
    int64_t* tokens(int64_t place) const { return live.tokens + (at * size() + place) * live.capacity; }
    int16_t* lineage(int64_t place) const { return live.lineage + (at * size() + place) * live.capacity; }

    // How many tokens all places have in common that something may still come from or go to.
    int64_t shared() const {
        for (int64_t t = 0; t < limits.step; ++t)
            for (int64_t place = 1; place < size(); ++place) {
                const bool lost = place >= size() - live.taken[at] && log_prob()[place] == NOTHING;
                if (!lost && lineage(place)[t] != lineage(0)[t]) return t;
            }
        return limits.step;
    }

    // Their first tokens become those of the places that they come from.
    template <class T> void inherit(T* first, const int64_t* parent, std::vector<char>& room) const {
        const int64_t bytes = limits.step * sizeof(T);
        if (!bytes) return;  // nothing is said yet, and there is no room to copy to
        room.resize(size() * bytes);
        for (int64_t place = 0; place < size(); ++place)
            std::memcpy(room.data() + place * bytes, first + parent[place] * live.capacity, bytes);
        for (int64_t place = 0; place < size(); ++place)
            std::memcpy(first + place * live.capacity, room.data() + place * bytes, bytes);
    }

    bool advance(
        int64_t* parent, std::vector<double>& total, std::vector<int64_t>& order, std::vector<char>& room) const {
        const int64_t choices = found.choices, count = size() * choices, step = limits.step;
        const int64_t rows = found.places, source = live.source[at];
        total.resize(count), order.resize(count);
        auto entry = [&](int64_t i) { return (at * rows + (rows > 1 ? i / choices : 0)) * choices + i % choices; };
        for (int64_t i = 0; i < count; ++i) total[i] = log_prob()[i / choices] + found.log_prob[entry(i)];
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + size(), order.end(), [&](int64_t a, int64_t b) {
            return total[a] > total[b] || (total[a] == total[b] && a < b);
        });
        for (int64_t place = 0; place < size(); ++place) {
            const bool open = place < size() - live.taken[at];
            log_prob()[place] = open ? total[order[place]] : NOTHING;
            parent[place] = log_prob()[place] > NOTHING ? order[place] / choices : place;
        }
        inherit(tokens(0), parent, room);
        inherit(lineage(0), parent, room);
        double best = NOTHING;
        for (int64_t place = 0; place < size(); ++place) {
            const int64_t token = found.ids[entry(order[place])];
            tokens(place)[step] = token;
            lineage(place)[step] = (int16_t)place;
            double& log = log_prob()[place];
            if (log > NOTHING && (token == limits.eos || step + 1 >= limits.room[source])) end(place, source);
            best = std::max(best, log);
        }
        double* scores = ended.score + source * size();
        total.assign(scores, scores + size());
        std::nth_element(
            total.begin(), total.begin() + limits.n_best - 1, total.end(), [](double a, double b) { return a > b; });
        const bool done = total[limits.n_best - 1] >= best / limits.longest[source];
        if (done) std::fill_n(log_prob(), size(), NOTHING);
        return done;
    }

    void end(int64_t place, int64_t source) const {
        const int64_t into = source * size() + live.taken[at]++;
        double& log = log_prob()[place];
        ended.log_prob[into] = log;
        ended.score[into] = log / limits.divisor;
        ended.length[into] = limits.step + 1;
        std::memcpy(ended.tokens + into * live.capacity, tokens(place), live.capacity * sizeof(int64_t));
        log = NOTHING;
    }
};

}  // namespace

// parent: n x size, the place that each came from. done: n, which sources are. Returns how many tokens all places of
// each source have in common, before this step.
extern "C" int64_t attnbench_advance(
    const Live* live, const Ended* ended, const Found* found, const Limits* limits, int64_t* parent, bool* done,
    int threads) {
    int64_t shared = limits->step;
#pragma omp parallel num_threads(threads) reduction(min : shared) if (threads > 1 && live->n > SERIAL)
    {
        std::vector<double> total;
        std::vector<int64_t> order;
        std::vector<char> room;
#pragma omp for schedule(static)
        for (int64_t at = 0; at < live->n; ++at) {
            const Source source = {*live, *ended, *found, *limits, at};
            shared = std::min(shared, source.shared());
            done[at] = source.advance(parent + at * live->size, total, order, room);
        }
    }
    return shared;
}
