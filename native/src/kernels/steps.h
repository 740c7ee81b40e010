// What a step of a sum of products does on one instruction set.
//
//     float32, and bfloat16 in general    a step: one input, multiplied and added
//     bfloat16 with AVX-512 BF16          a step: two inputs beside each other, of a row that has been
//                                         rounded to bfloat16
//
// Sixteen sums go side by side, and the weights of a step lie as [16][inputs of a step].
#pragma once

#include "quire/kernels.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {

constexpr int least(int a, int b) { return a < b ? a : b; }
inline int pieces_of(int count, int per_piece) { return (count + per_piece - 1) / per_piece; }

template <typename Number>
struct Step {
    using Input = float;
    using Vector = Floats;
    static constexpr int kInputs = 1;

    static Vector weights(const Number* from) { return load(from); }
    static Vector input(const Input* from) { return broadcast(*from); }
    // The inputs of a row as steps want them: where they are, or in `scratch`.
    static const Input* inputs(const float* row, int, Input*) { return row; }
    // What inputs make of numbers, as floats.
    static Floats rounded(const Floats& values) { return values; }
    // The weights of the inputs first … end - 1 of a step, zeros for others.
    static Vector between(const Vector& weights, int, int) { return weights; }
    static Floats add(const Floats& sum, const Vector& input, const Vector& weights) {
        return fma(input, weights, sum);
    }
};

#if defined(__AVX512BF16__)
template <>
struct Step<std::uint16_t> {
    using Input = std::uint32_t;  // two bfloat16, the first one in the lower half
    using Vector = __m512i;
    static constexpr int kInputs = 2;

    static Vector weights(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
    // Rounded to the nearest, ties to even, an odd last one beside a zero; whole vectors are written, and
    // may be written over what has been read.
    static const Input* inputs(const float* row, int count, Input* scratch) {
        constexpr int kAtOnce = 2 * kLanes;
        const auto first_lanes = [](int left) {
            return static_cast<__mmask16>(left >= kLanes ? 0xffff : (1 << (left < 0 ? 0 : left)) - 1);
        };
        for (int i = 0; i < count; i += kAtOnce) {
            const __m512 low = _mm512_maskz_loadu_ps(first_lanes(count - i), row + i);
            const __m512 high = _mm512_maskz_loadu_ps(first_lanes(count - i - kLanes), row + i + kLanes);
            _mm512_storeu_si512(scratch + i / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
        return scratch;
    }
    static Floats rounded(const Floats& values) {
        Floats result;
        // The masked form, as in simd.h.
        const __m256i halves = (__m256i)_mm512_cvtneps_pbh(values.part[0]);
        result.part[0] = (FloatPart)((IntPart)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16);
        return result;
    }
    static Vector between(const Vector& weights, int first, int end) {
        const std::uint32_t low = first <= 0 && end > 0 ? 0xffffU : 0, high = first <= 1 && end > 1 ? 0xffff0000U : 0;
        return _mm512_and_si512(weights, _mm512_set1_epi32(static_cast<int>(low | high)));
    }
    static Vector input(const Input* from) { return _mm512_set1_epi32(static_cast<int>(*from)); }
    // Multiplies and adds the second input of the pair, then the first, each with one rounding.
    static Floats add(const Floats& sum, const Vector& input, const Vector& weights) {
        Floats result;
        result.part[0] = _mm512_dpbf16_ps(sum.part[0], (__m512bh)input, (__m512bh)weights);
        return result;
    }
};
#endif

template <typename Number>
int num_steps(int num_inputs) {
    return pieces_of(num_inputs, Step<Number>::kInputs);
}

}  // namespace quire::QUIRE_ISA
