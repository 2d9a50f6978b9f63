// What attention of a few queries a row (_few.cpp) takes.

#pragma once

#include <cstdint>

#include "../_cached.hpp"
#include "../transforms/_transform.hpp"

namespace {

struct Attention {
    Rows query, keys, values, out;
    Sizes sizes;        // with the width of queries and keys
    int64_t width;      // of values
    float scale;
    Transform transform;
    Strided valid;      // of rows that are batch, heads, queries
    Listed listed;
    Forward forward;
    float *scores, *weights;  // rows x queries x keys each, which are left there
};

// Not 0 where it has failed.
using Attend = int (*)(const Attention*, int threads);

}  // namespace
