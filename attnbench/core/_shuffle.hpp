// Lanes of two vectors in another order. g++ has clang's name for it from version 12 on.

#pragma once

#include <cstdint>
#include <type_traits>

namespace {

// lane i is lane L_i of a and b, one behind the other
template <int... L, class X> inline X shuffled(X a, X b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, L...);
#else
    typedef std::conditional_t<sizeof(a[0]) == 4, int32_t, int64_t> Lane;
    typedef Lane Order __attribute__((vector_size(sizeof(X))));
    return __builtin_shuffle(a, b, Order{L...});
#endif
}

}  // namespace
