// A weight packed for products (_products.cpp), and what multiplies by it.

#pragma once

#include <cstdint>

namespace {

struct Packed {
    const float* words;
    int64_t outputs, inputs;
    const float* steps;    // of whole numbers, else null: what 1 is worth in each column,
    const int32_t* begin;  // and what sums begin with
};

// left: rows x inputs, so many numbers from one row to the next. bias: may be null. out: rows x outputs, contiguous.
using Product = void (*)(
    const float* left, int64_t row, const Packed* right, const float* bias, float* out, int64_t rows, int threads);

}  // namespace
