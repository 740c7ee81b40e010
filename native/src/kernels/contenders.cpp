// The search for tokens that may win a draw: almost all others are ruled out without a logarithm or a weight.
#include <algorithm>
#include <bit>
#include <limits>

#include "kernels_of_set.h"
#include "quire/random.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// The bits of a positive float, read as an integer, are 2^23 times (127 + its logarithm of base 2), or less by at most
// 0.09 times 2^23. Distances from 1 are counted in steps of 2^-31, so their logarithms are larger by 31.
constexpr float kLogarithmUnit = 1 << 23, kOffset = 127.0F + 31.0F;
// More than the roundings of a comparison add up to.
constexpr float kSlack = 0x1.0p-10F;

// -log(u) is at least 1 - u, so a token wins only if 1 - u < time * weight. Both sides are compared as logarithms, and
// the left one is a lower bound.
struct Comparison {
    explicit Comparison(const RaceView& race)
        : key(race.key),
          highest(broadcast(race.highest)),
          scale(broadcast(std::min(race.scale, 1e30F) * kLogarithmUnit)),
          bound(broadcast((race.log_time + kOffset + kSlack) * kLogarithmUnit)) {}

    // The lanes whose tokens may win, one bit each. The tokens are consecutive.
    std::uint32_t contenders(const Floats& logits, int first) const {
        Floats distances;
        QUIRE_FOR_PARTS(i) {
            WordPart tokens;
            std::memcpy(&tokens, kIndex + i * kPartLanes, sizeof tokens);
            tokens += static_cast<std::uint32_t>(first);
            // 31 bits, because AVX2 converts only signed integers.
            const IntPart steps = (IntPart)(~upper_bits(tokens, key) >> 1);
            const FloatPart distance = __builtin_convertvector(steps, FloatPart);
            distances.part[i] = __builtin_convertvector((IntPart)distance, FloatPart);
        }
        return lanes_of(distances < fma(logits - highest, scale, bound));
    }

  private:
    static constexpr std::uint32_t kIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const DrawKey key;
    const Floats highest, scale, bound;
};

}  // namespace

int next_contender(const float* logits, int first, int count, const RaceView& race) {
    const Comparison comparison(race);
    for (; first + kLanes <= count; first += kLanes) {
        const std::uint32_t lanes = comparison.contenders(load(logits + first), first);
        if (lanes != 0) return first + std::countr_zero(lanes);
    }
    if (first >= count) return count;
    float rest[kLanes];
    std::fill(std::copy(logits + first, logits + count, rest), rest + kLanes, -std::numeric_limits<float>::infinity());
    const std::uint32_t lanes = comparison.contenders(load(rest), first);
    return lanes != 0 ? first + std::countr_zero(lanes) : count;
}

}  // namespace quire::QUIRE_ISA
