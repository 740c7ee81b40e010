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

double uniform(std::uint64_t seed, std::uint64_t position) {
    // The seed is mixed before the position joins, so that (s, p + 1) is not (s + 1, p).
    return static_cast<double>(mix(mix(mix(seed)) ^ position) >> 11) * 0x1.0p-53;
}

}  // namespace quire
