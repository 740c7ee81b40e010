// The layout of the keys and values of one head in a block; see kernels.h.
#pragma once

#include <type_traits>

#include "steps.h"

namespace quire::QUIRE_ISA {

template <typename Number>
constexpr bool kIsInt8 = std::is_same_v<Number, CachedInt8>;

// The numbers of a key, rounded up to whole steps.
template <typename Number>
int key_stride(int head_dim) {
    return num_steps<Number>(head_dim) * Step<Number>::kInputs;
}

// The scales of the tokens of a block, after the numbers of a head.
template <typename Number>
auto scales_of(const PagedKv& kv, Number* head) {
    using Scale = std::conditional_t<std::is_const_v<Number>, const float, float>;
    return reinterpret_cast<Scale*>(head + static_cast<std::size_t>(kv.block_size) * kv.value_stride());
}

}  // namespace quire::QUIRE_ISA
