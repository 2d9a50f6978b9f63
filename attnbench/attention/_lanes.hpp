// Numbers of a register, and sums over them.

#pragma once

#include <utility>

#include "../core/_register.hpp"
#include "../core/_shuffle.hpp"

namespace {

constexpr int LANES = REGISTER / sizeof(float);

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef float Loose __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

template <int S, int... L> inline Lanes joined(Lanes a, Lanes b, std::integer_sequence<int, L...>) {
    return shuffled<((L & S) ? LANES + L : L)...>(a, b) + shuffled<((L & S) ? LANES + L - S : L + S)...>(a, b);
}
// sums over the lanes of LANES vectors at once: each step joins two of them, half the lanes of each
template <int S = LANES / 2> inline Lanes sums_of(Lanes* x) {
    for (int i = 0; i < S; ++i) x[i] = joined<S>(x[i], x[i + S], std::make_integer_sequence<int, LANES>{});
    if constexpr (S > 1) return sums_of<S / 2>(x);
    else return x[0];
}

}  // namespace
