// What products with a cache (_cached.cpp) take.

#pragma once

#include <cstdint>

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

}  // namespace
