// e^x for x <= 0, to 2 ulp: 2^n times a polynomial on what is left; and the sigmoid that it makes.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float power(float x) {
    float n = std::floor((x > -87.3f ? x : -87.3f) * 1.44269504f + 0.5f);  // of NaN, too, a whole number
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x < -87.3f ? 0.0f : p * scale;
}

// to 3 ulp
inline float sigmoid(float x) {
    float small = power(-std::fabs(x)), near = 1 / (1 + small);
    return x < 0 ? small * near : near;
}

}  // namespace
