// Bytes of a vector: what one register holds, since g++ takes wider ones apart number by number.

#pragma once

namespace {

#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

}  // namespace
