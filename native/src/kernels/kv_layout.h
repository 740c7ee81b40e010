// The layout of the keys and values of one head in a block; see kernels.h.
#pragma once

#include <type_traits>

#include "int4.h"
#include "steps.h"

namespace quire::QUIRE_ISA {

// A number of a key that lies in the layout of values: of a latent, which is both.
template <typename Number>
struct InRows {
    Number number;
};

template <typename Number>
struct Step<InRows<Number>> : Step<float> {};

template <typename Number>
constexpr bool kIsInRows = false;

template <typename Number>
constexpr bool kIsInRows<InRows<Number>> = true;

template <typename Number>
constexpr bool kIsInt8 = std::is_same_v<Number, CachedInt8>;

template <typename Number>
constexpr bool kIsInt4 = std::is_same_v<Number, CachedInt4>;

// Whole numbers with scales, which are multiplied by numbers of 16 bits.
template <typename Number>
constexpr bool kIsWhole = kIsInt8<Number> || kIsInt4<Number>;

// The form of the scales of a token; const if the numbers are.
template <typename Number>
using ScaleOf =
    std::conditional_t<std::is_const_v<Number>,
                       std::conditional_t<kIsInt4<std::remove_const_t<Number>>, const ScaleAndMinimum, const float>,
                       std::conditional_t<kIsInt4<Number>, ScaleAndMinimum, float>>;

// The elements of a key: its numbers, rounded up to whole steps, or the bytes of 4-bit numbers.
template <typename Number>
int key_stride(const PagedKv& kv) {
    if constexpr (kIsInRows<Number>) return kv.value_stride();
    return kIsInt4<Number> ? kv.value_stride() / 2 : num_steps<Number>(kv.head_dim) * Step<Number>::kInputs;
}

template <typename Number>
int value_elements(const PagedKv& kv) {
    return kIsInt4<Number> ? kv.value_stride() / 2 : kv.value_stride();
}

// The scales of the tokens of a block, after the numbers of a head.
template <typename Number>
ScaleOf<Number>* scales_of(const PagedKv& kv, Number* head) {
    const std::size_t numbers =
        static_cast<std::size_t>(kv.block_size) * value_elements<std::remove_const_t<Number>>(kv);
    return reinterpret_cast<ScaleOf<Number>*>(head + numbers);
}

}  // namespace quire::QUIRE_ISA
