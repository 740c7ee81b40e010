// Operations on sixteen numbers at a time, the same on every instruction set.
//
// Kernels are written once, over `Floats`: 16 lanes in one 512-bit, two 256-bit or four 128-bit
// registers. Kernel files are compiled once per instruction set, in the namespace QUIRE_ISA. The
// copies share no inline function: one that the linker took from the wrong copy would fault on an older
// processor.
//
// A lane is an output, never a part of a sum: the loop adds one step after another, so it alone sets
// the order of a sum. The two horizontal operations (`sum`, `highest`) have one fixed order.
//
// `fma` rounds once if the instruction set has it, else twice. Equal bits only require that this is always the
// same within one instruction set. The compiler must not fuse on its own (-ffp-contract=off), because it
// would do so in one place and not in another.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "quire/blocks.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#ifndef QUIRE_ISA
#error "kernels are compiled with QUIRE_ISA=portable, avx2, avx2_vnni, avx512, avx512_bf16 or amx"
#endif

namespace quire::QUIRE_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kPartBytes = 64;
#elif defined(__AVX2__)
constexpr int kPartBytes = 32;
#else
constexpr int kPartBytes = 16;
#endif
constexpr int kParts = 64 / kPartBytes;
constexpr int kPartLanes = kLanes / kParts;

typedef float FloatPart __attribute__((vector_size(kPartBytes)));
typedef std::int32_t IntPart __attribute__((vector_size(kPartBytes)));
typedef std::uint32_t WordPart __attribute__((vector_size(kPartBytes)));
typedef std::uint16_t LaneHalves __attribute__((vector_size(kPartBytes / 2)));
typedef std::uint8_t LaneBytes __attribute__((vector_size(kPartLanes)));

struct Floats {
    FloatPart part[kParts];
};

struct Ints {
    IntPart part[kParts];
};

#define QUIRE_FOR_PARTS(i) _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

// For loops over an array of registers: gcc keeps the array in memory unless the loop is unrolled.
#define QUIRE_UNROLLED _Pragma("GCC unroll 32")
// Prefetches a cache line to the second cache: the nearest one waits for fewer lines at a time.
inline void prefetch(const void* place) { __builtin_prefetch(place, 0, 2); }

// For loops over lines of memory: the processor's prefetchers follow a few loads with small strides, not many loads
// with large strides.
#define QUIRE_ROLLED _Pragma("GCC unroll 1")

inline Floats broadcast(float value) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = value - FloatPart{};
    return result;
}

inline Floats load(const float* from) {
    Floats result;
    // Part by part: gcc 12 copies all parts through memory, in words of the portable set.
    QUIRE_FOR_PARTS(i) std::memcpy(&result.part[i], from + i * kPartLanes, sizeof(FloatPart));
    return result;
}

inline void store(float* to, const Floats& value) {
    QUIRE_FOR_PARTS(i) std::memcpy(to + i * kPartLanes, &value.part[i], sizeof(FloatPart));
}

// bfloat16 is the upper half of a float.
inline float widened(std::uint16_t number) {
    const std::uint32_t bits = static_cast<std::uint32_t>(number) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline Floats load(const std::uint16_t* from) {
    Floats result;
#if defined(__AVX512F__)
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    // The masked form, with all lanes on: gcc 12 warns that the plain one starts from an undefined value.
    result.part[0] = (FloatPart)((IntPart)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16);
#elif defined(__AVX2__)
    QUIRE_FOR_PARTS(i) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
        result.part[i] = (FloatPart)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    }
#else
    QUIRE_FOR_PARTS(i) {
        LaneHalves halves;
        std::memcpy(&halves, from + i * kPartLanes, sizeof halves);
        result.part[i] = (FloatPart)(__builtin_convertvector(halves, WordPart) << 16);
    }
#endif
    return result;
}

#if !defined(__AVX2__)
// Bytes as words from 0 on.
inline WordPart words_at(const std::int8_t* from) {
    LaneBytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, WordPart);
}
#endif

// int8, widened. With intrinsics, because gcc 12 widens one lane at a time.
inline Floats load(const std::int8_t* from) {
    Floats result;
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    result.part[0] = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#elif defined(__AVX2__)
    QUIRE_FOR_PARTS(i) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * kPartLanes));
        result.part[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
#else
    QUIRE_FOR_PARTS(i) {
        const auto bytes = (IntPart)(words_at(from + i * kPartLanes) << 24);
        result.part[i] = __builtin_convertvector(bytes >> 24, FloatPart);
    }
#endif
    return result;
}

#if !defined(__F16C__)
// Float16 numbers in the lower halves of words; the same as from_float16 of each, from 0 on.
inline FloatPart widened_halves(const WordPart& halves) {
    const auto rest = (IntPart)((halves & 0x7fff) << 13), least_normal = IntPart{} + (0x400 << 13);
    // Below the normal numbers 2^-14, which is added and subtracted, makes the unit 2^-24.
    const IntPart bias = IntPart{} + (113 << 23);
    const auto small = (IntPart)((FloatPart)(rest + bias) - (FloatPart)bias);
    const IntPart size = rest < least_normal         ? small
                         : rest >= 31 * least_normal ? rest | 255 << 23
                                                     : rest + (112 << 23);
    return (FloatPart)(size | (IntPart)((halves & 0x8000) << 16));
}
#endif

// float16: processors have instructions for conversions, C++20 has no type.
inline Floats load_float16(const std::uint16_t* from) {
    Floats result;
#if defined(__AVX512F__)
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    result.part[0] = _mm512_maskz_cvtph_ps(0xffff, halves);
#elif defined(__F16C__)
    QUIRE_FOR_PARTS(i) {
        result.part[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
    }
#else
    QUIRE_FOR_PARTS(i) {
        LaneHalves halves;
        std::memcpy(&halves, from + i * kPartLanes, sizeof halves);
        result.part[i] = widened_halves(__builtin_convertvector(halves, WordPart));
    }
#endif
    return result;
}

// Numbers in e4m3 from 0 on, times 2^-8: their bits are those of a float16 with another bias. Bits of a float32 would
// do too, but small scales would be denormal floats, which slow some processors down.
inline Floats load_e4m3(const std::int8_t* from) {
    Floats result;
#if defined(__AVX512F__)
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    result.part[0] = _mm512_maskz_cvtph_ps(0xffff, _mm256_slli_epi16(bytes, 7));
#elif defined(__F16C__)
    QUIRE_FOR_PARTS(i) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * kPartLanes));
        result.part[i] = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
    }
#else
    QUIRE_FOR_PARTS(i) result.part[i] = widened_halves(words_at(from + i * kPartLanes) << 7);
#endif
    return result;
}

// Powers of two, from the exponent bits of floats; zero for 0.
inline Floats load_powers(const std::int8_t* from) {
    Floats result;
    QUIRE_FOR_PARTS(i) {
#if defined(__AVX512F__)
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        const auto bits = (IntPart)_mm512_maskz_cvtepu8_epi32(0xffff, bytes);
#elif defined(__AVX2__)
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * kPartLanes));
        const auto bits = (IntPart)_mm256_cvtepu8_epi32(bytes);
#else
        const WordPart bits = words_at(from + i * kPartLanes);
#endif
        result.part[i] = (FloatPart)(bits << 23);
    }
    return result;
}

// Rounds to the nearest float16, ties to even.
inline void store_float16(std::uint16_t* to, const Floats& value) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, value.part[0], 0));
#elif defined(__F16C__)
    QUIRE_FOR_PARTS(i) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, _mm256_cvtps_ph(value.part[i], 0)); }
#else
    QUIRE_FOR_PARTS(i) {
        for (int lane = 0; lane < kPartLanes; ++lane) to[i * kPartLanes + lane] = to_float16(value.part[i][lane]);
    }
#endif
}

inline Floats operator+(const Floats& a, const Floats& b) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] + b.part[i];
    return result;
}

inline Floats operator-(const Floats& a, const Floats& b) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] - b.part[i];
    return result;
}

inline Floats operator*(const Floats& a, const Floats& b) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] * b.part[i];
    return result;
}

inline Floats operator/(const Floats& a, const Floats& b) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] / b.part[i];
    return result;
}

// a * b + c
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    Floats result;
#if defined(__AVX512F__)
    result.part[0] = _mm512_fmadd_ps(a.part[0], b.part[0], c.part[0]);
#elif defined(__FMA__)
    QUIRE_FOR_PARTS(i) result.part[i] = _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]);
#else
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
    return result;
}

#if defined(__AVX512F__)
struct Mask {
    __mmask16 lanes;
};

inline Mask operator<(const Floats& a, const Floats& b) {
    return {_mm512_cmp_ps_mask(a.part[0], b.part[0], _CMP_LT_OQ)};
}

// Where the mask is set `yes`, elsewhere `no`.
inline Floats select(const Mask& mask, const Floats& yes, const Floats& no) {
    Floats result;
    result.part[0] = _mm512_mask_blend_ps(mask.lanes, no.part[0], yes.part[0]);
    return result;
}

// Lane i of the mask is set where first <= i < end.
inline Mask lanes_between(int first, int end) {
    const auto below = [](int lane) { return lane <= 0 ? 0U : lane < kLanes ? (1U << lane) - 1 : 0xffffU; };
    return {static_cast<__mmask16>(below(end) & ~below(first))};
}

// The lanes of a mask, one bit each.
inline std::uint32_t lanes_of(const Mask& mask) { return mask.lanes; }
#else
// A lane is all ones or all zeros.
struct Mask {
    IntPart part[kParts];
};

inline Mask operator<(const Floats& a, const Floats& b) {
    Mask result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] < b.part[i];
    return result;
}

// Where the mask is set `yes`, elsewhere `no`.
inline Floats select(const Mask& mask, const Floats& yes, const Floats& no) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
    return result;
}

// Lane i of the mask is set where first <= i < end.
inline Mask lanes_between(int first, int end) {
    static constexpr std::int32_t kIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Mask result;
    QUIRE_FOR_PARTS(i) {
        IntPart index;
        std::memcpy(&index, kIndex + i * kPartLanes, sizeof index);
        result.part[i] = (index >= first) & (index < end);
    }
    return result;
}

// The lanes of a mask, one bit each.
inline std::uint32_t lanes_of(const Mask& mask) {
    std::uint32_t result = 0;
    QUIRE_FOR_PARTS(i) {
#if defined(__AVX2__)
        result |= static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)mask.part[i])) << (i * kPartLanes);
#elif defined(__SSE2__)
        result |= static_cast<std::uint32_t>(_mm_movemask_ps((__m128)mask.part[i])) << (i * kPartLanes);
#else
        for (int lane = 0; lane < kPartLanes; ++lane) result |= (mask.part[i][lane] & 1U) << (i * kPartLanes + lane);
#endif
    }
    return result;
}
#endif

inline Floats max(const Floats& a, const Floats& b) { return select(a < b, b, a); }

// Joins the upper half of the lanes with the lower one, until one lane is left.
template <typename Lanes, typename Join>
auto fold(const Lanes& value, Join join) {
    auto part = value.part[0];
#if defined(__AVX512F__)
    // Only lane 0 of each is used; the others are such that one instruction moves them all.
    part = join(part, __builtin_shufflevector(part, part, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    part = join(part, __builtin_shufflevector(part, part, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    part = join(part, __builtin_shufflevector(part, part, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    part = join(part, __builtin_shufflevector(part, part, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif defined(__AVX2__)
    part = join(part, value.part[1]);
    part = join(part, __builtin_shufflevector(part, part, 4, 5, 6, 7, 0, 0, 0, 0));
    part = join(part, __builtin_shufflevector(part, part, 2, 3, 0, 0, 0, 0, 0, 0));
    part = join(part, __builtin_shufflevector(part, part, 1, 0, 0, 0, 0, 0, 0, 0));
#else
    part = join(join(part, value.part[2]), join(value.part[1], value.part[3]));
    part = join(part, __builtin_shufflevector(part, part, 2, 3, 0, 0));
    part = join(part, __builtin_shufflevector(part, part, 1, 0, 0, 0));
#endif
    return part[0];
}

inline float sum(const Floats& value) {
    return fold(value, [](FloatPart a, FloatPart b) { return a + b; });
}

inline float highest(const Floats& value) {
    return fold(value, [](FloatPart a, FloatPart b) { return a < b ? b : a; });
}

// value * 2^n for a whole n from -127 to 128; undefined for other n.
inline Floats times_power_of_two(const Floats& value, const Floats& n) {
    Floats result;
#if defined(__AVX512F__)
    result.part[0] = _mm512_maskz_scalef_ps(0xffff, value.part[0], n.part[0]);
#else
    // In two factors, because 2^128 is not a float. Clamped, because converting a float beyond int is undefined.
    const Floats below = broadcast(-127.0F), above = broadcast(128.0F);
    const Floats inside = select(n < below, below, select(above < n, above, n));
    QUIRE_FOR_PARTS(i) {
        const IntPart exponent = __builtin_convertvector(inside.part[i], IntPart);
        const IntPart half = exponent >> 1;
        const FloatPart first = (FloatPart)((half + 127) << 23);
        const FloatPart second = (FloatPart)((exponent - half + 127) << 23);
        result.part[i] = value.part[i] * first * second;
    }
#endif
    return result;
}

inline Ints broadcast_int(std::int32_t value) {
    Ints result;
    QUIRE_FOR_PARTS(i) result.part[i] = value - IntPart{};
    return result;
}

inline Floats to_floats(const Floats& value) { return value; }

inline Floats to_floats(const Ints& value) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = __builtin_convertvector(value.part[i], FloatPart);
    return result;
}

inline std::int32_t sum_int(const Ints& value) {
    return fold(value, [](IntPart a, IntPart b) { return a + b; });
}

inline std::int32_t highest_int(const Ints& value) {
    return fold(value, [](IntPart a, IntPart b) { return a < b ? b : a; });
}

// e to the x, to about one unit in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
//
// x = n ln 2 + f with |f| <= ln 2 / 2; e^f is a polynomial, and n goes into the exponent.
inline Floats exp(const Floats& x) {
    constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats lowest = broadcast(-87.33654F), largest = broadcast(88.72283F);
    const Floats shifted = fma(x, broadcast(1.44269504F), broadcast(kRounding));
    const Floats n = shifted - broadcast(kRounding);
    Floats f = fma(n, broadcast(-0.693359375F), x);
    f = fma(n, broadcast(2.12194440e-4F), f);
    Floats p = broadcast(1.9875691500e-4F);
    p = fma(p, f, broadcast(1.3981999507e-3F));
    p = fma(p, f, broadcast(8.3334519073e-3F));
    p = fma(p, f, broadcast(4.1665795894e-2F));
    p = fma(p, f, broadcast(1.6666665459e-1F));
    p = fma(p, f, broadcast(5.0000001201e-1F));
    p = fma(p, f * f, f + broadcast(1.0F));
    const Floats result = select(x < lowest, broadcast(0.0F), times_power_of_two(p, n));
    return select(largest < x, broadcast(std::numeric_limits<float>::infinity()), result);
}

// tanh as 1 - 2 / (e^2|x| + 1), with the sign of x. Near 0 that would lose precision, so an odd polynomial (Cephes)
// is used there.
inline Floats tanh(const Floats& x) {
    const Floats zero = broadcast(0.0F), one = broadcast(1.0F), two = broadcast(2.0F);
    const Mask negative = x < zero;
    const Floats size = select(negative, zero - x, x);
    const Floats result = one - two / (exp(size * two) + one);
    const Floats square = x * x;
    Floats p = broadcast(-5.70498872745e-3F);
    p = fma(p, square, broadcast(2.06390887954e-2F));
    p = fma(p, square, broadcast(-5.37397155531e-2F));
    p = fma(p, square, broadcast(1.33314422036e-1F));
    p = fma(p, square, broadcast(-3.33332819422e-1F));
    return select(size < broadcast(0.625F), fma(p * square, x, x), select(negative, zero - result, result));
}

}  // namespace quire::QUIRE_ISA
