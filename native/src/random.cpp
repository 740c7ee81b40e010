#include "quire/random.h"

namespace quire {
namespace {

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input flips about half of the
// bits of the output.
std::uint64_t mix(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

}  // namespace

DrawKey draw_key(std::uint64_t seed, std::uint64_t position) {
    // The seed is mixed before the position joins, so that (s, p + 1) is not (s + 1, p).
    const std::uint64_t word = mix(mix(mix(seed)) ^ position);
    return {static_cast<std::uint32_t>(word >> 32), static_cast<std::uint32_t>(word)};
}

double number_of(std::uint32_t token, const DrawKey& key) {
    const std::uint32_t upper = upper_bits(token, key);
    std::uint32_t lower = (upper ^ key.first) * 0xac4c1b51U;
    lower = (lower ^ (lower >> 15)) * 0xed5ad4bbU;
    return (static_cast<double>(std::uint64_t{upper} << 20 | lower >> 12) + 0.5) * 0x1.0p-52;
}

}  // namespace quire
