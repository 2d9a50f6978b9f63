// What attention of a few queries a row (_few.cpp) takes.

#pragma once

#include <cstdint>

#include "../transforms/_transform.hpp"

namespace {

struct Rows {  // of a query, key or value each; strides in elements, the numbers of one position lie side by side
    float* data;
    int64_t batch, head, position;
    float* row(int64_t row, int64_t heads) const { return data + row / heads * batch + row % heads * head; }
};
struct Listed {  // keys of each row, as many as it has; so many elements from one batch or head to the next
    const int64_t* keys;  // null: all, in the order in which they lie
    int64_t batch, head;
    const int64_t* row(int64_t row, int64_t heads) const { return keys + row / heads * batch + row % heads * head; }
};
struct Sizes {
    int64_t rows, heads, queries, keys, width;  // batch * heads rows
};
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
