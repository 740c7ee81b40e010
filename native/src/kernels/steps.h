// One step of a sum of products, on one instruction set.
//
//     float32, and bfloat16 in general    a step: one input, multiplied and added
//     bfloat16 with AVX-512 BF16          a step: two adjacent inputs of a row that was rounded to bfloat16
//     int8 keys and values                a step: two numbers of 16 bits. Sums are exact integers
//
// A step adds to sixteen sums at once, and its weights have the layout [16][inputs of a step].
#pragma once

#include "quire/kernels.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {

constexpr std::size_t kLineBytes = 64;  // of a cache

constexpr int least(int a, int b) { return a < b ? a : b; }
inline int pieces_of(int count, int per_piece) { return (count + per_piece - 1) / per_piece; }

template <typename Number>
struct Step {
    using Input = float;
    using Vector = Floats;
    using Sum = Floats;
    static constexpr int kInputs = 1;

    static Vector weights(const Number* from) { return load(from); }
    static Vector input(const Input* from) { return broadcast(*from); }
    // The inputs of a row in the form that steps need: in place, or converted in `scratch`.
    static const Input* inputs(const float* row, int, Input*) { return row; }
    // The numbers as `inputs` rounds them, as floats.
    static Floats rounded(const Floats& values) { return values; }
    // The weights of the inputs first … end - 1 of a step, and zeros for the others.
    static Vector between(const Vector& weights, int, int) { return weights; }
    static Sum sum_from(const Floats& sum) { return sum; }
    static Floats add(const Floats& sum, const Vector& input, const Vector& weights) {
        return fma(input, weights, sum);
    }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Sixteen sums in two parts: those of even lanes and those of odd lanes.
struct ApartFloats {
    FloatPart even, odd;
};

inline Floats to_floats(const ApartFloats& apart) {
    const __m256 low = _mm256_unpacklo_ps(apart.even, apart.odd), high = _mm256_unpackhi_ps(apart.even, apart.odd);
    return {{_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)}};
}

// One input, whose weights are widened in place: a word holds those of two lanes, and each takes one instruction.
template <>
struct Step<std::uint16_t> {
    using Input = float;
    using Vector = ApartFloats;
    using Sum = ApartFloats;
    static constexpr int kInputs = 1;

    static Vector weights(const std::uint16_t* from) {
        return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static Vector widened(__m256i pairs) {
        const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, upper))};
    }
    static FloatPart input(const Input* from) { return _mm256_broadcast_ss(from); }
    static const Input* inputs(const float* row, int, Input*) { return row; }
    static Floats rounded(const Floats& values) { return values; }
    static Vector between(const Vector& weights, int, int) { return weights; }
    static Sum sum_from(const Floats& sum) {
        const auto apart = [](__m256 lanes) {
            return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(lanes), 0xd8));
        };
        return {apart(_mm256_shuffle_ps(sum.part[0], sum.part[1], 0x88)),
                apart(_mm256_shuffle_ps(sum.part[0], sum.part[1], 0xdd))};
    }
    static Sum add(const Sum& sum, FloatPart input, const Vector& weights) {
        return {_mm256_fmadd_ps(input, weights.even, sum.even), _mm256_fmadd_ps(input, weights.odd, sum.odd)};
    }
};
#endif

#if defined(__AVX512BF16__)
template <>
struct Step<std::uint16_t> {
    using Input = std::uint32_t;  // two bfloat16, the first one in the lower half
    using Vector = __m512i;
    using Sum = Floats;
    static constexpr int kInputs = 2;

    static Vector weights(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
    // Rounds to the nearest, ties to even, and pairs an odd last input with a zero. Writes whole vectors;
    // `scratch` may be the memory of the row itself.
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
    static Sum sum_from(const Floats& sum) { return sum; }
    // Multiplies and adds the second input of the pair, then the first, each with one rounding.
    static Floats add(const Floats& sum, const Vector& input, const Vector& weights) {
        Floats result;
        result.part[0] = _mm512_dpbf16_ps(sum.part[0], (__m512bh)input, (__m512bh)weights);
        return result;
    }
};
#endif

// In general, weights and the numbers of a row are widened to 16 bits. One instruction, if there is one, computes two
// products and their sum.
struct WidenedInt8 {
    using Input = std::uint32_t;  // two numbers of 16 bits, the first one in the lower half
    using Stored = std::int16_t;
    using Sum = Ints;
    static constexpr int kInputs = 2;

#if defined(__AVX512BW__)
    using Vector = __m512i;
    static Vector weights(const void* from) {
        return _mm512_maskz_cvtepi8_epi16(0xffffffff, _mm256_loadu_si256(static_cast<const __m256i*>(from)));
    }
    static Vector input(const Input* from) { return _mm512_set1_epi32(static_cast<int>(*from)); }
    static Ints add(const Ints& sum, const Vector& input, const Vector& weights) {
#if defined(__AVX512VNNI__)
        return {{(IntPart)_mm512_dpwssd_epi32((__m512i)sum.part[0], weights, input)}};
#else
        return {{sum.part[0] + (IntPart)_mm512_madd_epi16(weights, input)}};
#endif
    }
#elif defined(__AVX2__)
    struct Vector {
        __m256i part[kParts];
    };
    static Vector weights(const void* from) {
        Vector result;
        QUIRE_FOR_PARTS(i) {
            const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from) + i);
            result.part[i] = _mm256_cvtepi8_epi16(bytes);
        }
        return result;
    }
    static __m256i input(const Input* from) { return _mm256_set1_epi32(static_cast<int>(*from)); }
    static Ints add(const Ints& sum, const __m256i& input, const Vector& weights) {
        Ints result;
        QUIRE_FOR_PARTS(i) result.part[i] = sum.part[i] + (IntPart)_mm256_madd_epi16(weights.part[i], input);
        return result;
    }
#else
    using Vector = const std::int8_t*;
    static Vector weights(const void* from) { return static_cast<const std::int8_t*>(from); }
    static Input input(const Input* from) { return *from; }
    static Ints add(const Ints& sum, Input input, Vector weights) {
        const int first = static_cast<std::int16_t>(input), second = static_cast<std::int16_t>(input >> 16);
        Ints result;
        QUIRE_FOR_PARTS(i) {
            for (int lane = 0; lane < kPartLanes; ++lane) {
                const std::int8_t* pair = weights + (i * kPartLanes + lane) * kInputs;
                result.part[i][lane] = sum.part[i][lane] + first * pair[0] + second * pair[1];
            }
        }
        return result;
    }
#endif
};

// A number of a key or a value, stored as int8. The other factor has 16 bits on every instruction set.
enum class CachedInt8 : std::int8_t {};

template <>
struct Step<CachedInt8> : WidenedInt8 {};

// Two numbers of a key or a value, of 4 bits each; see int4.h.
enum class CachedInt4 : std::uint8_t {};

template <>
struct Step<CachedInt4> {
    using Input = std::uint32_t;  // two numbers of 16 bits, the first one in the lower half
    static constexpr int kInputs = 2;
};

template <typename Number>
int num_steps(int num_inputs) {
    return pieces_of(num_inputs, Step<Number>::kInputs);
}

}  // namespace quire::QUIRE_ISA
