// bfloat16 in and out of float, with torch's rounding.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(BFloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, BFloat16& to) {  // to the nearest, ties to even; NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = (uint16_t)(x != x ? 0x7fc0 : rounded);
}

}  // namespace
